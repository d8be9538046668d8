"""pagedlc: an LLM that lives inside your own process, for LangChain and LlamaIndex."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from pagedlc.outputs import CompletionChunk, CompletionOutput, RequestOutput, Timings
from pagedlc_engine.config import EngineConfig
from pagedlc_engine.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
    OutOfMemoryError,
    PagedLCError,
    PromptTooLongError,
    UnsupportedModelError,
)
from pagedlc_engine.grammar.spec import StructuredOutputsParams
from pagedlc_engine.request import Logprob, SamplingParams
from pagedlc_engine.stats import EngineStats

if TYPE_CHECKING:
    from pagedlc.documents import DocumentError
    from pagedlc.llm import LLM
    from pagedlc.registry import shared_llm

__all__ = [
    "LLM",
    "CompletionChunk",
    "CompletionOutput",
    "ConfigError",
    "DocumentError",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "InvalidRequestError",
    "Logprob",
    "ModelLoadError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "PagedLCError",
    "PromptTooLongError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "Timings",
    "UnsupportedModelError",
    "shared_llm",
]

_ON_DEMAND = {"LLM": "pagedlc.llm", "shared_llm": "pagedlc.registry", "DocumentError": "pagedlc.documents"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("pagedlc")
    # These import torch, which takes seconds: a command's --help and a wrong option need not wait for it.
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_DEMAND[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
