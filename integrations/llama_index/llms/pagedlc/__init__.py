"""LlamaIndex integration of pagedlc: an LLM that runs inside your own process."""

from llama_index.llms.pagedlc.base import Vllm

__all__ = ["Vllm"]
