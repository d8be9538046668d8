"""pagedlc: an LLM that lives inside your own process, for LangChain and LlamaIndex."""

from pagedlc.llm import LLM
from pagedlc.outputs import CompletionChunk, CompletionOutput, RequestOutput, Timings
from pagedlc.registry import shared_llm
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

__all__ = [
    "LLM",
    "CompletionChunk",
    "CompletionOutput",
    "ConfigError",
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
