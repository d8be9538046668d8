"""Text that is continued as it is, read the same way as the turns of a conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from typing import Any

from pagedlc import LLM, CompletionChunk, SamplingParams
from pagedlc.tools import ChatMessage, MessageFinish, TextDelta, TurnDelta

__all__ = ["TextTurn"]


class TextTurn:
    """The counterpart of :class:`pagedlc.tools.ChatTurn` for a prompt without messages.

    Args:
        llm: The model.
        prompt: Goes in as it is.
    """

    def __init__(self, llm: LLM, prompt: str) -> None:
        self._llm = llm
        self._prompt = prompt

    def stream(self, params: SamplingParams, **request_options: Any) -> Generator[TurnDelta, None, None]:
        """See :meth:`pagedlc.tools.ChatTurn.stream`."""
        messages = [ChatMessage() for _ in range(params.n)]
        with closing(self._llm.generate_stream(self._prompt, params, **request_options)) as chunks:
            for chunk in chunks:
                yield _read(messages[chunk.index], chunk)

    async def astream(self, params: SamplingParams, **request_options: Any) -> AsyncGenerator[TurnDelta, None]:
        """See :meth:`pagedlc.tools.ChatTurn.astream`."""
        messages = [ChatMessage() for _ in range(params.n)]
        async with aclosing(self._llm.agenerate_stream(self._prompt, params, **request_options)) as chunks:
            async for chunk in chunks:
                yield _read(messages[chunk.index], chunk)


def _read(message: ChatMessage, chunk: CompletionChunk) -> TurnDelta:
    events: list[Any] = [TextDelta(chunk.text)] if chunk.text else []
    if chunk.finish_reason is not None:
        events.append(MessageFinish(chunk.finish_reason, chunk.stop_reason))
    message.add(events)
    return TurnDelta(chunk, events, message)
