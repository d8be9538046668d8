"""Dense attention for the decoder's seam, and shapes of tiny models."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from pagedlc_engine.model import Decoder, load_model, read_spec


class CausalAttention:
    """One sequence, all of it in this step, no cache."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self.windows = windows

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        length = len(query)
        behind = torch.arange(length)[:, None] - torch.arange(length)
        visible = (behind >= 0) & (behind < (self.windows[layer] or length))
        heads = [part.transpose(0, 1)[None] for part in (query, key, value)]
        result = functional.scaled_dot_product_attention(*heads, attn_mask=visible, enable_gqa=True)
        return result[0].transpose(0, 1).reshape(length, -1)


def decoder_logits(decoder: Decoder, token_ids: torch.Tensor) -> torch.Tensor:
    attention = CausalAttention(decoder.spec.layer_windows)
    return decoder.compute_logits(decoder.forward(token_ids, torch.arange(len(token_ids)), attention))


def load(path: Path, quantization: str | None = None, load_format: str = "auto", seed: int = 0) -> Decoder:
    spec = read_spec(path, load_format)
    return load_model(path, spec, load_format, torch.float32, torch.device("cpu"), quantization, seed)


#: Shapes that divide nothing evenly by accident.
TINY = {
    "vocab_size": 199,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "eos_token_id": 7,
    "bos_token_id": 1,
}


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """Also the norms and biases, which start as ones and zeros, get values that a mistake would show in."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith(".bias"):
                weight.normal_(0.0, 0.5, generator=generator)
    return model.eval()
