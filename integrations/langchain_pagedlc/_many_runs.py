"""What a chat model whose engine takes any number of requests does with many inputs, and with the runs they are."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import Any, Self

from langchain_core.caches import BaseCache
from langchain_core.callbacks import Callbacks
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatResult, LLMResult
from langchain_core.runnables import RunnableConfig

from langchain_pagedlc._batching import MAX_THREADS, Batch, admit_all, invoke_all, invoke_as_completed
from langchain_pagedlc._caching import WholeAnswersCache
from langchain_pagedlc._runs import run_of, running_in, with_run_id

__all__ = ["ManyRunsChat"]


class ManyRunsChat(BaseChatModel):
    """A chat model that hands all inputs of a batch to its engine at once, and knows which run asks for an answer."""

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Answer, piece by piece; the pieces add up to the answer of :meth:`invoke`."""
        config, run = with_run_id(config)
        stream: Any = super().stream(input, config, stop=stop, **kwargs)
        with closing(stream) as chunks:
            with running_in(run):
                first = next(chunks)
            yield first
            yield from chunks

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """:meth:`stream` for asyncio."""
        config, run = with_run_id(config)
        stream: Any = super().astream(input, config, stop=stop, **kwargs)
        async with aclosing(stream) as chunks:
            with running_in(run):
                first = await anext(chunks)
            yield first
            async for chunk in chunks:
                yield chunk

    @abstractmethod
    def interrupt(self, name: str | uuid.UUID) -> int:
        """End answers by a name; returns how many there were."""

    @abstractmethod
    def _may_cache(self, options: Mapping[str, Any]) -> bool:
        """Whether what LangChain's cache goes by says all that decides about the answer of a call."""

    @abstractmethod
    def _twin(self, **changes: Any) -> Self:
        """A copy with other fields, but the same hold on the engine."""

    def _generate_with_cache(self, *args: Any, **kwargs: Any) -> ChatResult:
        with running_in(run_of(kwargs.get("run_manager"))):
            return super(ManyRunsChat, self._caching(kwargs))._generate_with_cache(*args, **kwargs)

    async def _agenerate_with_cache(self, *args: Any, **kwargs: Any) -> ChatResult:
        with running_in(run_of(kwargs.get("run_manager"))):
            return await super(ManyRunsChat, self._caching(kwargs))._agenerate_with_cache(*args, **kwargs)

    def _caching(self, options: Mapping[str, Any]) -> Self:
        """This model for one call, which neither gets nor leaves in LangChain's cache what was cut short."""
        cache = self.cache if isinstance(self.cache, BaseCache) else get_llm_cache()
        if self.cache is False or cache is None:
            return self
        return self._twin(cache=WholeAnswersCache(cache) if self._may_cache(options) else False)

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        *,
        run_id: uuid.UUID | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer several conversations, all in the engine at once.

        Args:
            messages: The conversations.
            stop: Strings that end the answers.
            callbacks: As in ``BaseChatModel.generate``.
            run_id: Id of the first conversation's run.
            **kwargs: ``tags``, ``metadata``, ``run_name`` and call options.

        Raises:
            Exception: The first conversation's error, after the others are done.
        """
        if len(messages) < 2:
            return super().generate(messages, stop, callbacks, run_id=run_id, **kwargs)
        run_ids = [run_id, *[None] * (len(messages) - 1)]
        with Batch(min(len(messages), MAX_THREADS), self.interrupt) as batch:
            futures = [
                batch.submit(super(ManyRunsChat, self).generate, [each], stop, callbacks, run_id=id_, **kwargs)
                for each, id_ in zip(messages, run_ids, strict=True)
            ]
        results = [future.result() for future in futures]
        return LLMResult(
            generations=[result.generations[0] for result in results],
            llm_output=self._combine_llm_outputs([result.llm_output for result in results]),
            run=[run for result in results for run in result.run or ()] or None,
        )

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answer all ``inputs`` at once (or ``max_concurrency`` of them at a time, where the config sets it).

        Ctrl-C ends them all.
        """
        if not inputs:
            return []
        configs = admit_all(config, len(inputs))
        return invoke_all(partial(self.invoke, **kwargs), inputs, configs, return_exceptions, self.interrupt)

    def batch_as_completed(  # type: ignore[override]  # the overloads say no more than this signature
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, AIMessage | Exception]]:
        """As :meth:`batch`, yielding index and answer of each input when it is done.

        Closing the generator ends those that are not done.
        """
        if inputs:
            configs = admit_all(config, len(inputs))
            invoke = partial(self.invoke, **kwargs)
            yield from invoke_as_completed(invoke, inputs, configs, return_exceptions, self.interrupt)
