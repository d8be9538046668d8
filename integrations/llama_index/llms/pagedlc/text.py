"""Text that is continued as it is, read the same way as the turns of a conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from typing import Any

from pagedlc import LLM, SamplingParams
from pagedlc.reasoning import ReasoningSplitter
from pagedlc.tools import MessageReader, TurnDelta
from pagedlc.tools.parser import PlainParser
from pagedlc.tools.stops import TextStops

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

    def sampling_params(self, params: SamplingParams) -> SamplingParams:
        """See :meth:`pagedlc.tools.ChatTurn.sampling_params`; text needs nothing."""
        return params

    def reader(self, params: SamplingParams | None = None) -> MessageReader:
        """See :meth:`pagedlc.tools.ChatTurn.reader`; all is text, and the engine looks for stop strings."""
        return MessageReader(ReasoningSplitter(None), PlainParser(), TextStops(()))

    def stream(self, params: SamplingParams, **request_options: Any) -> Generator[TurnDelta, None, None]:
        """See :meth:`pagedlc.tools.ChatTurn.stream`."""
        readers = [self.reader() for _ in range(params.n)]
        with closing(self._llm.generate_stream(self._prompt, params, **request_options)) as chunks:
            for chunk in chunks:
                reader = readers[chunk.index]
                yield TurnDelta(chunk, reader.read(chunk), reader.message)

    async def astream(self, params: SamplingParams, **request_options: Any) -> AsyncGenerator[TurnDelta, None]:
        """See :meth:`pagedlc.tools.ChatTurn.astream`."""
        readers = [self.reader() for _ in range(params.n)]
        async with aclosing(self._llm.agenerate_stream(self._prompt, params, **request_options)) as chunks:
            async for chunk in chunks:
                reader = readers[chunk.index]
                yield TurnDelta(chunk, reader.read(chunk), reader.message)
