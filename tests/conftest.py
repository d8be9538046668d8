"""Fixtures that are dear: models that load once per test run."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

# Read when torch is imported: OpenMP threads that spin while they wait would starve the tests' own threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

from pagedlc import LLM
from pagedlc.models import resolve_model
from scripted_model import ScriptedLLM, share


def pytest_configure() -> None:
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(scope="session")
def smollm2() -> Iterator[LLM]:
    """The default model as a user gets it on this CPU."""
    with LLM("smollm2") as llm:
        yield llm


@pytest.fixture(scope="session")
def smollm2_fp32() -> Iterator[LLM]:
    """The default model in exact float32."""
    with LLM("smollm2", quantization=None) as llm:
        yield llm


@pytest.fixture(scope="session")
def hf_smollm2() -> Any:
    """transformers' own reading of the same GGUF file, the oracle. Takes half a minute to load."""
    from transformers import AutoModelForCausalLM

    path = resolve_model("smollm2").path
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture
def no_collection() -> Iterator[None]:
    """For tests that press Ctrl-C: in the middle of a garbage collection it would be lost in Hypothesis's callback."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def scripted_llm() -> Iterator[Callable[..., ScriptedLLM]]:
    """Makes LLMs that say what they are told: ``scripted_llm("Hello", **options)``; see :class:`ScriptedLLM`.

    ``VLLMChat(**llm.options)`` and ``Vllm(**llm.options)`` talk to the same engine.
    """
    with ExitStack() as stack:

        def make(script: Any, *model: Any, **options: Any) -> ScriptedLLM:
            return stack.enter_context(share(ScriptedLLM(script, *model, **options)))

        yield make
