"""``VLLMChat``: pagedlc's in-process engine as a LangChain chat model."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any, ClassVar, Final, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import Field

from langchain_pagedlc._batching import check_wanted
from langchain_pagedlc._call import CALL_OPTIONS, call_values, logprobs_wanted, own_logprobs
from langchain_pagedlc._engine import EngineBacked
from langchain_pagedlc._many_runs import ManyRunsChat
from langchain_pagedlc._messages import to_chat_messages
from langchain_pagedlc._results import ChatAnswer, Describer
from langchain_pagedlc._runs import run_of
from langchain_pagedlc._sampling import SAMPLING_ALIASES, SamplingFields
from langchain_pagedlc._structured import Method, Schema, structured_output
from langchain_pagedlc._tools import ToolLike, bound_tools, openai_tools
from langchain_pagedlc._turn import ChatCall, structured_outputs_of
from pagedlc import ConfigError, InvalidRequestError, SamplingParams
from pagedlc.chat import import_renderer
from pagedlc.prefix import PrefixExplanation
from pagedlc.turns import Interruption

__all__ = ["VLLMChat"]

#: Of a turn: fields of the model, and what only a call or ``bind_tools`` can give.
_TURN_FIELDS: Final = frozenset({"chat_template_kwargs", "tool_call_format", "reasoning"})
_TURN_CALL_OPTIONS: Final = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
_INTERRUPTION_FIELDS: Final = frozenset({"stop_when", "conversation_id", "barge_in"})
_CHAT_FIELDS: Final = frozenset({"top_logprobs", "stream_usage"}) | _TURN_FIELDS | _INTERRUPTION_FIELDS
_CALL_ONLY: Final = _TURN_CALL_OPTIONS | {"response_format"}
_CHAT_OPTIONS: Final = _CHAT_FIELDS | _CALL_ONLY


class VLLMChat(EngineBacked, SamplingFields, ManyRunsChat):
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

    Tools. Arguments are held to the tool's schema while they are written, so that they are always valid;
    ``tool_choice`` is ``"auto"``, ``"none"``, ``"any"`` (or ``"required"``) or a tool's name::

        def weather(city: str) -> str:
            \"\"\"The weather in a city.\"\"\"
            return f"Sunny in {city}."

        answer = chat.bind_tools([weather], tool_choice="any").invoke("What is the weather in Oslo?")
        print(answer.tool_calls)
        # [{'name': 'weather', 'args': {'city': 'Oslo'}, 'id': 'call_...', 'type': 'tool_call'}]

    Structured output, from a pydantic model, a TypedDict or a JSON schema; streaming yields the object as it grows::

        from pydantic import BaseModel, Field

        class Person(BaseModel):
            name: str = Field(max_length=20)
            age: int = Field(ge=0, le=150)

        print(chat.with_structured_output(Person).invoke("Ada is 36 years old."))

    Interrupt. ``stop_when`` ends an answer by what it says; ``interrupt`` ends it by the id of its run or its
    conversation; with ``barge_in`` a new turn ends what its conversation is still generating. The text so far stays,
    with ``finish_reason`` ``"interrupted"``. LangChain's cache gets no such answer, and is not asked where there is a
    ``stop_when``::

        answer = chat.invoke(messages, stop_when=lambda text: text.count(",") >= 2)

        for chunk in chat.stream(messages, conversation_id="interview-7", barge_in=True):
            chat.interrupt("interview-7")

    Models that think before they answer: the thoughts are in ``additional_kwargs["reasoning_content"]`` and in
    ``content_blocks``, streamed like the text and not part of it. ``chat_template_kwargs={"enable_thinking": False}``
    is for templates that have such a switch.

    Why a prompt misses the prefix cache::

        print(chat.explain_prefix(messages))

    Every sampling parameter, ``priority``, ``cache_salt``, ``chat_template_kwargs``, ``stream_usage``,
    ``response_format`` and what is described above can be given in one call or bound::

        chat.invoke(messages, temperature=0.7, stop=["\\n"])
        brief = chat.bind(max_tokens=8)

    Engine options are plain keywords too (``max_num_seqs=128``, ``block_size=32``, ``gpu_memory_utilization=0.85``
    …), with the names of ``pagedlc_engine.EngineConfig``. The engine's own ``seed`` goes into
    ``engine_options={"seed": 1}``, since ``seed`` seeds the sampling of each request.

    Raises:
        ConfigError: An option is unknown (the nearest is named), cannot work, or is given twice with different values.
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

    tool_call_format: str | None = None
    """How the model writes tool calls (``"hermes"``, ``"llama3_json"``, ``"mistral"``, ``"generic"``), instead of how
    its chat template has it."""

    reasoning: bool | None = None
    """Whether to look for ``<think>`` in answers; ``None``: if the chat template speaks of it."""

    stop_when: Callable[[str], bool] | None = Field(default=None, exclude=True)
    """Called with the text so far; the answer ends when it returns true."""

    conversation_id: str | None = None
    """A name for :meth:`interrupt`, and what ``barge_in`` goes by."""

    barge_in: bool = False
    """A new turn interrupts what its conversation is still generating."""

    stream_usage: bool = True
    """Put usage metadata on the last chunk of a stream."""

    streaming: bool = False
    """Generate by streaming in ``invoke``, too, so that callbacks see every chunk."""

    _aliases: ClassVar[Mapping[str, str]] = {**SAMPLING_ALIASES, "model_name": "model"}

    def __init__(self, **options: Any) -> None:
        for name in sorted(_CALL_ONLY & options.keys()):
            way = "bind_tools(...)" if "tool" in name else f"bind({name}=...)"
            raise ConfigError(f"{name} belongs to a call, not to the model: use {way}, or give it to invoke().")
        super().__init__(**options)
        self._call(None, {})
        if self.profile is None:
            self.profile = self._default_profile()

    def load(self) -> Self:
        """Load the weights, and what writes conversations, now rather than with the first request."""
        super().load()
        import_renderer()
        return self

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
            tool_calling=True,
            tool_choice=True,
            tool_call_streaming=True,
            structured_output=True,
        )

    def _may_cache(self, options: Mapping[str, Any]) -> bool:
        return options.get("stop_when", self.stop_when) is None

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(stop, kwargs).named(*run_of(run_manager))
        answers: dict[int, ChatAnswer] = {}
        with closing(call.stream(self.llm, to_chat_messages(messages), whole=True)) as deltas:
            for delta in deltas:
                ChatAnswer.collect(answers, delta)
        check_wanted()
        return call.describer.chat_result(answers)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(stop, kwargs).named(*run_of(run_manager))
        answers: dict[int, ChatAnswer] = {}
        async with aclosing(await call.astream(self.llm, to_chat_messages(messages), whole=True)) as deltas:
            async for delta in deltas:
                ChatAnswer.collect(answers, delta)
        return call.describer.chat_result(answers)

    # LangChain reports the chunks of a chat stream to the callbacks itself: _stream and _astream must not.

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._call(stop, kwargs).single().named(*run_of(run_manager))
        with closing(call.stream(self.llm, to_chat_messages(messages))) as deltas:
            for delta in deltas:
                yield from call.describer.chat_chunks(delta)
        check_wanted()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._call(stop, kwargs).single().named(*run_of(run_manager))
        async with aclosing(await call.astream(self.llm, to_chat_messages(messages))) as deltas:
            async for delta in deltas:
                for chunk in call.describer.chat_chunks(delta):
                    yield chunk

    def bind_tools(
        self,
        tools: Sequence[ToolLike],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model with tools it may call.

        Args:
            tools: Functions, pydantic models, TypedDicts, LangChain tools, Runnables, or dicts of OpenAI's or
                Anthropic's form or JSON schema.
            tool_choice: ``"auto"`` (the default) leaves it to the model, ``"any"``, ``"required"`` or True demand a
                call, ``"none"`` forbids them, a tool's name demands that one.
            parallel_tool_calls: Whether an answer may have several calls; by default as the model's format has it.
            strict: As in OpenAI's API. Arguments are held to the schema either way.
            **kwargs: Call options to bind along.

        Raises:
            InvalidRequestError: A tool cannot be read, or ``tool_choice`` names none of them.
        """
        return self.bind(**bound_tools(tools, tool_choice, parallel_tool_calls, strict), **kwargs)

    def with_structured_output(
        self,
        schema: Schema | None = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """This model, answering with objects of a schema.

        Args:
            schema: A pydantic model (the result is an instance of it), or a TypedDict or JSON schema (the result is
                a dict).
            method: ``"json_schema"``: the answer is held to the schema. ``"function_calling"``: the schema, which must
                be one of objects, is a tool that must be called, so that the model is told about it, too.
                ``"json_mode"``: the answer is some JSON object, and what keys it has is up to the prompt; ``schema``
                may be left out.
            include_raw: The result is a dict of ``raw`` (the message), ``parsed`` and ``parsing_error``.
            strict: As in OpenAI's API. The answer is held to the schema either way.
            **kwargs: Call options to bind along.

        Raises:
            InvalidRequestError: The schema cannot be read, or there is no such method.
            OutputParserException: When called: the object was cut off, by ``max_tokens``, a stop string or an
                interruption, or the model class refuses it.
        """
        return structured_output(self, schema, method, include_raw, strict, kwargs)

    def interrupt(self, name: str | uuid.UUID) -> int:
        """End answers within a step, by the id of their run, of the run they are part of, or of their conversation.

        They end with the text they have and ``finish_reason`` ``"interrupted"``. Conversations are known to all
        models that share the engine.

        Returns:
            How many answers there were.
        """
        return self.llm.interrupt(str(name))

    def explain_prefix(
        self, input: LanguageModelInput, tools: Sequence[ToolLike] | None = None, **options: Any
    ) -> PrefixExplanation:
        """Say how much of a prompt the prefix cache would serve now and, where it stops, what differs.

        Args:
            input: What :meth:`invoke` takes.
            tools: The tools the model would have.
            **options: Call options.
        """
        call = self._call(None, {**options, "tools": tools})
        turn = call.turn(self.llm, to_chat_messages(self._convert_input(input).to_messages()))
        return self.llm.explain_prefix(turn.prompt_token_ids, cache_salt=call.request_options["cache_salt"])

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Prompt tokens of a conversation as the chat template writes it, cue for the answer included."""
        if not messages:
            return 0
        call = self._call(None, {"tools": tools})
        return len(call.turn(self.llm, to_chat_messages(messages), must_fit=False).prompt_token_ids)

    def _call(self, stop: list[str] | None, overrides: Mapping[str, Any]) -> ChatCall:
        own = {name: getattr(self, name) for name in (*CALL_OPTIONS, *_CHAT_FIELDS)}
        values = call_values(own_logprobs(own, overrides), stop, overrides, _CHAT_OPTIONS)
        turn = {name: values.pop(name) for name in (*_TURN_FIELDS, *_TURN_CALL_OPTIONS) if name in values}
        turn["tools"] = openai_tools(turn.get("tools") or ())
        request = {name: values.pop(name) for name in ("priority", "cache_salt")}
        interruption = Interruption(**{name: values.pop(name) for name in _INTERRUPTION_FIELDS})
        stream_usage = bool(values.pop("stream_usage"))
        values["logprobs"] = logprobs_wanted(values["logprobs"], values.pop("top_logprobs"))
        form = structured_outputs_of(values.pop("response_format", None))
        if form is not None and overrides.get("structured_outputs") is not None:
            raise InvalidRequestError(
                "response_format and structured_outputs both say what the answer must look like: leave one out."
            )
        if form is not None:
            values["structured_outputs"] = form
        params = SamplingParams(**values)
        interruption.check(params)
        if overrides.get("barge_in") and interruption.conversation_id is None:
            raise InvalidRequestError("barge_in needs a conversation_id: it says which conversation is cut into.")
        in_blocks = self.output_version == "v1"
        describer = Describer(self.model, self._token_text, params.logprobs, stream_usage, in_blocks)
        return ChatCall(params, turn, request, interruption, describer)
