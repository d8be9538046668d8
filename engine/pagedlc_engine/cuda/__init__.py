"""The engine on NVIDIA GPUs: device-resident state, fused layers, CUDA graphs, memory sizing."""
