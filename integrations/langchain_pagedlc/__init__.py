"""LangChain integration of pagedlc: chat and completion models that run inside your own process."""

from langchain_pagedlc.chat_models import VLLMChat
from langchain_pagedlc.llms import VLLM

__all__ = ["VLLM", "VLLMChat"]
