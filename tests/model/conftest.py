"""A tiny model on disk, and random tokens for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from model_helpers import TINY, randomize
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """A saved Llama and the transformers model it was saved from."""
    torch.manual_seed(0)
    model = randomize(LlamaForCausalLM(LlamaConfig(**TINY)))
    folder = tmp_path_factory.mktemp("tiny-llama")
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def tokens() -> Callable[[int], torch.Tensor]:
    """Random token ids of the tiny models' vocabulary."""
    return lambda length: torch.randint(0, 199, (length,), generator=torch.Generator().manual_seed(length))
