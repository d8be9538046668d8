"""Objects of a pydantic class as answers: the grammar of the class' JSON schema makes every answer one."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any, TypeVar

from llama_index.core.base.llms.generic_utils import (
    astream_chat_response_to_completion_response,
    stream_chat_response_to_completion_response,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    MessageRole,
    TextBlock,
)
from llama_index.core.bridge.pydantic import BaseModel, ValidationError
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictInProgressEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.program.utils import FlexibleModel, create_flexible_model
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import PydanticProgramMode

from llama_index.llms.pagedlc.blocks import parse_partial
from llama_index.llms.pagedlc.errors import IncompleteOutputError
from llama_index.llms.pagedlc.tool_calling import ToolCallingLLM
from pagedlc.cut_off import is_whole_json
from pagedlc_engine.errors import InvalidRequestError
from pagedlc_engine.grammar import StructuredOutputsParams

__all__ = ["StructuredOutputLLM", "StructuredVllm"]

M = TypeVar("M", bound=BaseModel)

dispatcher = get_dispatcher(__name__)

#: LlamaIndex' programs may bring these; here no tools are involved.
_TOOL_KEYWORDS = frozenset({"tools", "tool_required", "tool_choice", "allow_parallel_tool_calls"})


class StructuredOutputLLM(ToolCallingLLM):
    """Structured prediction through the engine's grammars.

    With a ``pydantic_program_mode`` other than the default, LlamaIndex' own programs do it their way.
    """

    def structured_predict(
        self,
        output_cls: type[M],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> M:
        """Answer a prompt with an object.

        Args:
            output_cls: Class of the object. The model reads its JSON schema, descriptions included.
            prompt: Template of the prompt.
            llm_kwargs: Keywords of ``chat``, such as ``temperature`` or ``max_tokens``.
            prompt_args: Variables of the template.

        Raises:
            IncompleteOutputError: The object was cut off by ``max_new_tokens``, a stop string or an interruption.
            pydantic.ValidationError: The object breaks a rule that no JSON schema expresses, such as a validator's.
        """
        if self.pydantic_program_mode is not PydanticProgramMode.DEFAULT:
            found: M = super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return found
        _started(output_cls, prompt, prompt_args)
        messages, options = self._structured_chat(output_cls, prompt, llm_kwargs, prompt_args)
        return _ended(_object(output_cls, self.chat(messages, **options)))

    async def astructured_predict(
        self,
        output_cls: type[M],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> M:
        """:meth:`structured_predict` for asyncio; cancelling the task ends the request."""
        if self.pydantic_program_mode is not PydanticProgramMode.DEFAULT:
            found: M = await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return found
        _started(output_cls, prompt, prompt_args)
        messages, options = self._structured_chat(output_cls, prompt, llm_kwargs, prompt_args)
        return _ended(_object(output_cls, await self.achat(messages, **options)))

    def stream_structured_predict(
        self,
        output_cls: type[M],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[M | FlexibleModel, None, None]:
        """Answer a prompt with an object, and yield what is known of it whenever that grows.

        Until all that ``output_cls`` requires is there, the partial objects are of a class with the same fields of
        which none is required. The last one is a complete ``output_cls``. Texts grow, numbers come when they are
        complete.

        Args, Raises:
            As for :meth:`structured_predict`.
        """
        if self.pydantic_program_mode is not PydanticProgramMode.DEFAULT:
            return super().stream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)

        def objects() -> Generator[M | FlexibleModel, None, None]:
            _started(output_cls, prompt, prompt_args)
            messages, options = self._structured_chat(output_cls, prompt, llm_kwargs, prompt_args)
            reader = _PartialReader(output_cls)
            with closing(self.stream_chat(messages, **options)) as responses:
                for response in responses:
                    for found in reader.read(response):
                        dispatcher.event(LLMStructuredPredictInProgressEvent(output=found))
                        yield found
            _ended(found)

        return objects()

    async def astream_structured_predict(
        self,
        output_cls: type[M],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[M | FlexibleModel, None]:
        """:meth:`stream_structured_predict` for asyncio."""
        if self.pydantic_program_mode is not PydanticProgramMode.DEFAULT:
            return await super().astream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)

        async def objects() -> AsyncGenerator[M | FlexibleModel, None]:
            _started(output_cls, prompt, prompt_args)
            messages, options = self._structured_chat(output_cls, prompt, llm_kwargs, prompt_args)
            reader = _PartialReader(output_cls)
            async with aclosing(await self.astream_chat(messages, **options)) as responses:
                async for response in responses:
                    for found in reader.read(response):
                        dispatcher.event(LLMStructuredPredictInProgressEvent(output=found))
                        yield found
            _ended(found)

        return objects()

    def as_structured_llm(self, output_cls: type[BaseModel], **kwargs: Any) -> StructuredVllm:
        """An LLM whose answers are objects of ``output_cls``: ``response.raw`` the object, the text its JSON."""
        return StructuredVllm(llm=self, output_cls=output_cls, **kwargs)

    def _structured_chat(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None,
        prompt_args: Mapping[str, Any],
    ) -> tuple[list[ChatMessage], dict[str, Any]]:
        if not (isinstance(output_cls, type) and issubclass(output_cls, BaseModel)):
            raise InvalidRequestError(f"output_cls must be a pydantic class, not {output_cls!r}.")
        schema = output_cls.model_json_schema()
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        options = {name: value for name, value in (llm_kwargs or {}).items() if name not in _TOOL_KEYWORDS}
        options |= {"n": 1, "structured_outputs": StructuredOutputsParams(json=schema)}
        return _with_schema(messages, schema), options


class StructuredVllm(StructuredLLM):
    """LlamaIndex' structured LLM, with streamed completions as well."""

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a prompt with growing objects."""
        messages = [ChatMessage(role=MessageRole.USER, content=prompt)]
        return stream_chat_response_to_completion_response(self.stream_chat(messages, **kwargs))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Answer a prompt with growing objects."""
        messages = [ChatMessage(role=MessageRole.USER, content=prompt)]
        return astream_chat_response_to_completion_response(await self.astream_chat(messages, **kwargs))


def _with_schema(messages: Sequence[ChatMessage], schema: Mapping[str, Any]) -> list[ChatMessage]:
    """The messages, the first of which says what is asked for.

    The grammar sees to the form; only what the model reads makes it find the right content. The place is the same in
    every turn of a conversation, so that the turns share their beginning.
    """
    if not messages:
        return []
    request = f"Answer with a JSON object that matches this JSON schema:\n{json.dumps(schema, ensure_ascii=False)}"
    first = messages[0]
    told = ChatMessage(
        role=first.role,
        blocks=[*first.blocks, TextBlock(text=request)],
        additional_kwargs=first.additional_kwargs,
    )
    return [told, *messages[1:]]


def _is_whole(response: ChatResponse) -> bool:
    details = response.additional_kwargs
    if details["finish_reason"] != "stop":
        return False
    stop = details["stop_reason"]
    return stop is None or is_whole_json(response.message.content or "", stop)


def _object(output_cls: type[M], response: ChatResponse) -> M:
    if not _is_whole(response):
        raise IncompleteOutputError.of(f"the JSON of a {output_cls.__name__}", response)
    return output_cls.model_validate_json(response.message.content or "")


class _PartialReader:
    """Finds objects in a stream."""

    def __init__(self, output_cls: type[BaseModel]) -> None:
        self._output_cls = output_cls
        self._partial_cls = create_flexible_model(output_cls)
        self._known: dict[str, Any] = {}

    def read(self, response: ChatResponse) -> Iterator[Any]:
        """The object so far if there is more of it; at the end of the stream, the object."""
        if not _is_whole(response):
            known = parse_partial(response.message.content or "")
            if known != self._known:
                self._known = known
                yield self._partial()
        if response.additional_kwargs["finish_reason"] is not None:
            yield _object(self._output_cls, response)

    def _partial(self) -> BaseModel:
        try:
            return self._output_cls.model_validate(self._known)
        except ValidationError:
            return self._partial_cls.model_validate(self._known)


def _started(output_cls: type[BaseModel], prompt: BasePromptTemplate, prompt_args: dict[str, Any]) -> None:
    dispatcher.event(LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args))


def _ended(output: M) -> M:
    dispatcher.event(LLMStructuredPredictEndEvent(output=output))
    return output
