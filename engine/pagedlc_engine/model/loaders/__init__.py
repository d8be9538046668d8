"""Where weights come from: GGUF files, safetensors folders, or a random generator."""
