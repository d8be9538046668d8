"""``VLLM``: pagedlc's in-process engine as a LangChain completion model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import Any, ClassVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM, LangSmithParams, LanguageModelInput
from langchain_core.outputs import GenerationChunk, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list

from langchain_pagedlc._batching import admit_all, batch_name, check_wanted, invoke_all, invoke_as_completed
from langchain_pagedlc._call import CALL_OPTIONS, Call, call_values
from langchain_pagedlc._engine import EngineBacked
from langchain_pagedlc._results import Describer, says_something
from langchain_pagedlc._sampling import SamplingFields
from pagedlc import SamplingParams

__all__ = ["VLLM"]


class VLLM(EngineBacked, SamplingFields, BaseLLM):
    """A text completion model inside your own process.

    Takes the constructor of ``langchain_community.llms.VLLM``, and engine options directly as keywords
    (``gpu_memory_utilization=0.85``, ``max_num_seqs=128`` …). What that class has and this engine has not (beam
    search, tensor parallelism …) is accepted at the value that asks for nothing. Model, options and sampling
    values are checked at once; weights load with the first request or by ``load()``; all models made with the
    same name and engine options share one engine.

    Instantiate and invoke::

        from langchain_pagedlc import VLLM

        llm = VLLM(model="smollm2", max_new_tokens=32, temperature=0.7, top_k=50)
        print(llm.invoke("The three primary colours are"))

    Stream, async, batch::

        for text in llm.stream("Once upon a time"):
            print(text, end="", flush=True)

        answer = await llm.ainvoke("Once upon a time")

        answers = llm.batch(["Cats are", "Dogs are"])

    Usage, finish reason, timings and log-probabilities are in ``generation_info``::

        llm.generate(["Cats are"]).generations[0][0].generation_info

    The prompt goes to the model as it is. For a conversation and the model's chat template use
    :class:`~langchain_pagedlc.VLLMChat`.

    Raises:
        ConfigError: An option is unknown (the nearest is named), cannot work, or is given twice with different values.
        InvalidRequestError: A sampling value is out of range.
        ModelLoadError: The name leads to no model this engine can run.
    """

    max_new_tokens: int | None = 512
    """Most tokens to generate; ``None`` goes to the end of the context. Also spelled ``max_tokens``."""

    logprobs: int | None = None
    """Log-probabilities of the chosen and the k likeliest tokens, per generated token."""

    _aliases: ClassVar[Mapping[str, str]] = {
        "max_tokens": "max_new_tokens",
        "max_completion_tokens": "max_new_tokens",
        "stop_sequences": "stop",
        "model_name": "model",
    }

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._call(None, {})

    @property
    def _llm_type(self) -> str:
        return "pagedlc"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        own = {"max_new_tokens", "logprobs"}
        return self.model_dump(include={*EngineBacked.model_fields, *SamplingFields.model_fields, *own})

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self._stop_list(), **kwargs)
        params["ls_provider"] = "pagedlc"
        params["ls_max_tokens"] = kwargs.get("max_new_tokens", kwargs.get("max_tokens", self.max_new_tokens))
        return params

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._call(stop, kwargs)
        name = batch_name()
        if name is None:
            return call.describer.llm_result(self.llm.generate(prompts, call.params, **call.options))
        with self.llm.running.running(self.llm.abort, [name]) as answer:
            outputs = self.llm.generate(prompts, call.params, request_id=answer.request_id, **call.options)
        check_wanted()
        return call.describer.llm_result(outputs)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._call(stop, kwargs)
        return call.describer.llm_result(await self.llm.agenerate(prompts, call.params, **call.options))

    # LangChain leaves it to _stream and _astream of a completion model to report chunks to the callbacks.

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        call = self._call(stop, kwargs).single()
        stream: Any = self.llm.generate_stream(prompt, call.params, **call.options)
        with closing(stream) as chunks:
            for chunk in filter(says_something, chunks):
                generation = call.describer.text_chunk(chunk)
                if run_manager is not None:
                    run_manager.on_llm_new_token(generation.text, chunk=generation)
                yield generation

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        call = self._call(stop, kwargs).single()
        stream: Any = self.llm.agenerate_stream(prompt, call.params, **call.options)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                if not says_something(chunk):
                    continue
                generation = call.describer.text_chunk(chunk)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(generation.text, chunk=generation)
                yield generation

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Complete all ``inputs`` at once (or ``max_concurrency`` of them at a time, where the config sets it).

        With ``return_exceptions`` an input's error stands in its place and leaves the others alone. Ctrl-C ends
        them all.
        """
        if not inputs:
            return []
        configs = get_config_list(config, len(inputs))
        if self._one_request_each(configs, return_exceptions):
            configs = admit_all(configs, len(inputs))
            invoke = partial(self.invoke, **kwargs)
            return invoke_all(invoke, inputs, configs, return_exceptions, self.llm.interrupt)
        return super().batch(inputs, configs, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """As :meth:`batch`, on the running loop."""
        if not inputs:
            return []
        configs = get_config_list(config, len(inputs))
        if self._one_request_each(configs, return_exceptions):
            return await Runnable.abatch(self, inputs, configs, return_exceptions=return_exceptions, **kwargs)
        return await super().abatch(inputs, configs, **kwargs)

    def batch_as_completed(  # type: ignore[override]  # the overloads say no more than this signature
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, str | Exception]]:
        """As :meth:`batch`, yielding index and answer of each input when it is done.

        Closing the generator ends those that are not done.
        """
        if inputs:
            configs = admit_all(config, len(inputs))
            invoke = partial(self.invoke, **kwargs)
            yield from invoke_as_completed(invoke, inputs, configs, return_exceptions, self.llm.interrupt)

    @staticmethod
    def _one_request_each(configs: list[RunnableConfig], return_exceptions: bool) -> bool:
        # LangChain's own batch of a completion model is one call for all, where one error is everybody's, and
        # it waits for a whole group of max_concurrency before it starts the next.
        return return_exceptions or configs[0].get("max_concurrency") is not None

    def _call(self, stop: list[str] | None, overrides: Mapping[str, Any]) -> Call:
        own = {name: getattr(self, name) for name in CALL_OPTIONS if name != "max_tokens"}
        values = call_values({**own, "max_tokens": self.max_new_tokens}, stop, overrides)
        options = {name: values.pop(name) for name in ("priority", "cache_salt")}
        params = SamplingParams(**values)
        return Call(params, options, Describer(self.model, self._token_text, params.logprobs))
