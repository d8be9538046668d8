"""Asking the engine: one call, four ways (whole or streamed, blocking or async)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any, TypeVar

import pagedlc
from llama_index.llms.pagedlc.responses import Answer, StreamCollector, answer_from_output
from pagedlc_engine.errors import InvalidRequestError

__all__ = ["Call", "aanswer", "answer", "astream", "stream"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Call:
    """One request.

    Args:
        prompt: Text that goes in as it is, or message dicts for the chat template.
        params: How to sample.
        options: Further keywords for the engine's method.
    """

    prompt: str | list[dict[str, Any]]
    params: pagedlc.SamplingParams
    options: dict[str, Any]

    @property
    def chats(self) -> bool:
        """True when the prompt goes through the chat template."""
        return not isinstance(self.prompt, str)


def answer(llm: pagedlc.LLM, call: Call) -> Answer:
    """Wait for the whole answer."""
    ask: Callable[..., Any] = llm.chat if call.chats else llm.generate
    outputs = ask(call.prompt, call.params, use_tqdm=False, **call.options)
    return answer_from_output(outputs[0], llm.model_name, llm.tokenizer.token_text)


async def aanswer(llm: pagedlc.LLM, call: Call) -> Answer:
    """Await the whole answer; cancelling the task ends the request."""
    ask: Callable[..., Any] = llm.achat if call.chats else llm.agenerate
    outputs = await ask(call.prompt, call.params, **call.options)
    return answer_from_output(outputs[0], llm.model_name, llm.tokenizer.token_text)


def stream(llm: pagedlc.LLM, call: Call, convert: Callable[[Answer], R]) -> Generator[R, None, None]:
    """The answer so far, converted, with every new piece; closing the generator ends the request.

    Raises:
        InvalidRequestError: The call asks for several answers.
    """
    _refuse_several_answers(call)
    ask: Callable[..., Any] = llm.chat_stream if call.chats else llm.generate_stream

    def parts() -> Generator[R, None, None]:
        collector = StreamCollector(llm.model_name, llm.tokenizer.token_text)
        with closing(ask(call.prompt, call.params, **call.options)) as chunks:
            for chunk in chunks:
                if (so_far := collector.add(chunk)) is not None:
                    yield convert(so_far)

    return parts()


def astream(llm: pagedlc.LLM, call: Call, convert: Callable[[Answer], R]) -> AsyncGenerator[R, None]:
    """As :func:`stream`, for ``async for``."""
    _refuse_several_answers(call)
    ask: Callable[..., Any] = llm.achat_stream if call.chats else llm.agenerate_stream

    async def parts() -> AsyncGenerator[R, None]:
        collector = StreamCollector(llm.model_name, llm.tokenizer.token_text)
        async with aclosing(ask(call.prompt, call.params, **call.options)) as chunks:
            async for chunk in chunks:
                if (so_far := collector.add(chunk)) is not None:
                    yield convert(so_far)

    return parts()


def _refuse_several_answers(call: Call) -> None:
    if call.params.n > 1:
        raise InvalidRequestError(f"A stream gives one answer, but n is {call.params.n}; set n=1 or do not stream.")
