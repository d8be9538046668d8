"""LlamaIndex integration of pagedlc: an LLM that runs inside your own process."""

from llama_index.llms.pagedlc.base import Vllm
from llama_index.llms.pagedlc.errors import IncompleteOutputError

__all__ = ["IncompleteOutputError", "Vllm"]
