"""A model of a few thousand weights with a real tokenizer's surface, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagedlc import LLM

VOCAB_SIZE = 258
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


def make_tiny_model(folder: Path, **changes: Any) -> Path:
    """A folder that looks like a Hugging Face model: byte-level tokenizer, template, config; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    write_byte_tokenizer(folder, chat_template=TEMPLATE)
    return folder


def write_byte_tokenizer(folder: Path, **settings: Any) -> None:
    """Tokenizer files of a token a byte, and a beginning and an end; ``settings`` go into their configuration."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**known, **settings}))


def tiny_llm(folder: Path, *, vocab_size: int = VOCAB_SIZE, **options: Any) -> LLM:
    """The tiny model with random weights, the same each time; a larger ``vocab_size`` adds rows that are no token."""
    options = {"load_format": "dummy", "quantization": None, "num_blocks": 400, "seed": 1, **options}
    return LLM(str(make_tiny_model(folder / "tiny", vocab_size=vocab_size)), **options)
