"""``VLLMChat``: pagedlc's in-process engine as a LangChain chat model."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any, ClassVar, Final

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun, Callbacks
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ContextThreadPoolExecutor
from langchain_core.utils.function_calling import convert_to_openai_tool

from langchain_pagedlc._batching import MAX_THREADS, admit_all
from langchain_pagedlc._call import CALL_OPTIONS, Call, call_values, logprobs_wanted
from langchain_pagedlc._engine import EngineBacked
from langchain_pagedlc._messages import to_chat_messages
from langchain_pagedlc._results import Describer, says_something
from langchain_pagedlc._sampling import SAMPLING_ALIASES, SamplingFields
from pagedlc import SamplingParams

__all__ = ["VLLMChat"]

_CHAT_OPTIONS: Final = frozenset({"top_logprobs", "chat_template_kwargs", "stream_usage"})


class VLLMChat(EngineBacked, SamplingFields, BaseChatModel):
    """A chat model inside your own process.

    Setup::

        pip install "pagedlc[langchain]"

    Instantiate. Model, options and sampling values are checked at once; weights load with the first request or
    by ``load()``. All models made with the same name and engine options share one engine, its memory and its
    prefix cache::

        from langchain_pagedlc import VLLMChat

        chat = VLLMChat(model="smollm2", temperature=0, max_tokens=32)

    Invoke::

        messages = [("system", "You are a helpful assistant."), ("human", "Name three fruits.")]
        answer = chat.invoke(messages)
        print(answer.text)

    Stream::

        for chunk in chat.stream(messages):
            print(chunk.text, end="", flush=True)

    Async, natively on the running loop; cancelling the task ends the generation::

        answer = await chat.ainvoke(messages)

        async for chunk in chat.astream(messages):
            print(chunk.text, end="", flush=True)

    Batch. All prompts run in the engine at once, whatever the number of CPUs; ``max_concurrency`` in the config
    limits that::

        answers = chat.batch(["What is a fruit?", "What is a nut?"], return_exceptions=True)

    Usage. ``cache_read`` counts the prompt tokens that came from the prefix cache; when streaming, the last
    chunk has the usage::

        answer.usage_metadata
        # {'input_tokens': 29, 'output_tokens': 14, 'total_tokens': 43, 'input_token_details': {'cache_read': 16}}
        answer.response_metadata
        # {'model_name': 'smollm2', 'finish_reason': 'stop', 'timings': {'queue_time': 0.0001, ...}, ...}

    Every sampling parameter, ``priority``, ``cache_salt``, ``chat_template_kwargs`` and ``stream_usage`` can be
    overridden in one call or bound::

        chat.invoke(messages, temperature=0.7, stop=["\\n"])
        brief = chat.bind(max_tokens=8)

    Engine options are plain keywords too (``max_num_seqs=128``, ``block_size=32``, ``gpu_memory_utilization=0.85``
    …), with the names of ``pagedlc_engine.EngineConfig``. The engine's own ``seed`` goes into
    ``engine_options={"seed": 1}``, since ``seed`` seeds the sampling of each request.

    Raises:
        ConfigError: An option is unknown (the nearest is named) or cannot work.
        InvalidRequestError: A sampling value is out of range, or a message has content the model cannot read.
        ModelLoadError: The name leads to no model this engine can run.
    """

    max_tokens: int | None = 512
    """Most tokens to generate; ``None`` goes to the end of the context. Also spelled ``max_new_tokens``."""

    logprobs: bool | int | None = None
    """Log-probabilities of the answer's tokens: vLLM's way, how many of the likeliest, or OpenAI's, yes or no."""

    top_logprobs: int | None = None
    """How many of the likeliest tokens to report per position."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as ``{"enable_thinking": False}``."""

    stream_usage: bool = True
    """Put usage metadata on the last chunk of a stream."""

    streaming: bool = False
    """Generate by streaming in ``invoke``, too, so that callbacks see every chunk."""

    _aliases: ClassVar[Mapping[str, str]] = {**SAMPLING_ALIASES, "model_name": "model"}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._call(None, {})
        if self.profile is None:
            self.profile = self._default_profile()

    @property
    def _llm_type(self) -> str:
        return "pagedlc-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        own = {"max_tokens", "logprobs", "top_logprobs", "chat_template_kwargs"}
        return self.model_dump(include={*EngineBacked.model_fields, *SamplingFields.model_fields, *own})

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self._stop_list(), **kwargs)
        params["ls_provider"] = "pagedlc"
        return params

    def _default_profile(self) -> ModelProfile:
        return ModelProfile(
            max_input_tokens=self.llm.max_model_len,
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            tool_calling=False,
            structured_output=False,
        )

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(stop, kwargs)
        (output,) = self.llm.chat(to_chat_messages(messages), call.params, **call.options)
        return call.describer.chat_result(output)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(stop, kwargs)
        (output,) = await self.llm.achat(to_chat_messages(messages), call.params, **call.options)
        return call.describer.chat_result(output)

    # LangChain reports the chunks of a chat stream to the callbacks itself: _stream and _astream must not.

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._call(stop, kwargs).single()
        stream: Any = self.llm.chat_stream(to_chat_messages(messages), call.params, **call.options)
        with closing(stream) as chunks:
            for chunk in filter(says_something, chunks):
                yield call.describer.chat_chunk(chunk)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._call(stop, kwargs).single()
        stream: Any = self.llm.achat_stream(to_chat_messages(messages), call.params, **call.options)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                if says_something(chunk):
                    yield call.describer.chat_chunk(chunk)

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
        with ContextThreadPoolExecutor(max_workers=min(len(messages), MAX_THREADS)) as threads:
            futures = [
                threads.submit(super(VLLMChat, self).generate, [each], stop, callbacks, run_id=id_, **kwargs)
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
        """Answer all ``inputs`` at once (or ``max_concurrency`` of them at a time, where the config sets it)."""
        if not inputs:
            return []
        configs = admit_all(config, len(inputs))
        return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    def batch_as_completed(  # type: ignore[override]  # the overloads say no more than this signature
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, AIMessage | Exception]]:
        """As :meth:`batch`, yielding index and answer of each input when it is done."""
        if inputs:
            configs = admit_all(config, len(inputs))
            yield from super().batch_as_completed(  # type: ignore[call-overload]
                inputs, configs, return_exceptions=return_exceptions, **kwargs
            )

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Prompt tokens of a conversation as the chat template writes it, cue for the answer included."""
        if not messages:
            return 0
        schemas = [convert_to_openai_tool(tool) for tool in tools or ()]
        conversation = to_chat_messages(messages)
        return len(self.llm.render_chat(conversation, schemas or None, chat_template_kwargs=self.chat_template_kwargs))

    def _call(self, stop: list[str] | None, overrides: Mapping[str, Any]) -> Call:
        own = {name: getattr(self, name) for name in (*CALL_OPTIONS, *_CHAT_OPTIONS)}
        values = call_values(own, stop, overrides, _CHAT_OPTIONS)
        options = {name: values.pop(name) for name in ("priority", "cache_salt", "chat_template_kwargs")}
        stream_usage = bool(values.pop("stream_usage"))
        values["logprobs"] = logprobs_wanted(values["logprobs"], values.pop("top_logprobs"))
        params = SamplingParams(**values)
        describer = Describer(self.model, self._token_text, params.logprobs, stream_usage)
        return Call(params, options, describer)
