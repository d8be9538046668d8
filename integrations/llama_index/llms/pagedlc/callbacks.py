"""LlamaIndex's callbacks around the ways to chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms.callbacks import llm_chat_callback

from llama_index.llms.pagedlc.messages import as_chat_messages

__all__ = ["chat_callback"]

M = TypeVar("M", bound=Callable[..., Any])


def chat_callback(method: M) -> M:
    """``llm_chat_callback()`` for a method that is called with messages.

    They are checked first: LlamaIndex's event does so, too, with an error that speaks of the event.
    """
    called = llm_chat_callback()(method)

    @wraps(called)
    def call(self: Any, messages: Sequence[ChatMessage], **kwargs: Any) -> Any:
        return called(self, as_chat_messages(messages), **kwargs)

    @wraps(called)
    async def acall(self: Any, messages: Sequence[ChatMessage], **kwargs: Any) -> Any:
        return await called(self, as_chat_messages(messages), **kwargs)

    return cast(M, acall if iscoroutinefunction(method) else call)
