"""``with_structured_output``: the answer is an object of a schema, whole or as far as it has come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import (
    BaseLLMOutputParser,
    JsonOutputKeyToolsParser,
    JsonOutputParser,
    PydanticOutputParser,
    PydanticToolsParser,
)
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel
from typing_extensions import TypeIs

from langchain_pagedlc._tools import openai_tools
from pagedlc import InvalidRequestError, StructuredOutputsParams
from pagedlc.cut_off import is_whole_json, stop_and_option

__all__ = ["Method", "Schema", "structured_output"]

Method: TypeAlias = Literal["json_schema", "function_calling", "json_mode"]
#: A pydantic model, a TypedDict, or a JSON schema.
Schema: TypeAlias = type | Mapping[str, Any]

_METHODS: Final[tuple[Method, ...]] = ("json_schema", "function_calling", "json_mode")

_FOR_TRACES: Final = "ls_structured_output_format"

#: Why an answer may end before its object is complete, and what to do about it.
_CUT_OFF: Final[Mapping[str, str]] = {
    "length": "max_tokens (or the end of the context) cut the object off before it was complete: raise max_tokens, or "
    "bound its lists and strings (max_length), in which a small model may repeat itself without end.",
    "interrupted": "The answer was interrupted before the object was complete.",
    "abort": "The answer was given up before the object was complete.",
}


class _WholeObjects(BaseLLMOutputParser[Any]):
    """Mixin for parsers: says what happened when an object was cut off.

    Raises:
        OutputParserException: The object is not complete and will not be.
    """

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """See ``BaseLLMOutputParser``."""
        generation = result[0]
        message = generation.message if isinstance(generation, ChatGeneration) else None
        reason = message and message.response_metadata.get("finish_reason")
        if message and reason and (reason in _CUT_OFF or not _is_whole(message)):
            raise OutputParserException(f"finish_reason={reason!r}: {_ending(message)}", llm_output=generation.text)
        # Nothing follows a finished answer: what is wrong with its object is an error in a stream, too.
        partial = partial and not reason
        return super().parse_result(result, partial=partial)  # type: ignore[safe-super]  # a parser comes next


def _is_whole(message: BaseMessage) -> bool:
    """Whether a finished answer holds an object. LangChain's parsers would close whatever is open."""
    if isinstance(message, AIMessage) and message.tool_calls:
        return True
    return is_whole_json(message.text, message.response_metadata.get("stop_reason"))


def _ending(message: BaseMessage) -> str:
    reason, stop = (message.response_metadata.get(key) for key in ("finish_reason", "stop_reason"))
    if stop is None:
        return _CUT_OFF.get(str(reason), "The answer ended before the object was complete.")
    what, option = stop_and_option(stop)
    return f"The {what} ended the answer before the object was complete: leave it out of {option}."


class _JsonParser(_WholeObjects, JsonOutputParser):
    """An answer's object as a dict."""


class _PydanticParser(_WholeObjects, PydanticOutputParser[Any]):
    """An answer's object as an instance of a model."""


class _JsonCallParser(_WholeObjects, JsonOutputKeyToolsParser):
    """A call's arguments as a dict."""


class _PydanticCallParser(_WholeObjects, PydanticToolsParser):
    """A call's arguments as an instance of a model."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """See ``BaseLLMOutputParser``."""
        try:
            return super().parse_result(result, partial=partial)
        except OutputParserException:
            raise
        except ValueError as error:  # of either of pydantic's versions
            raise OutputParserException(f"The arguments of the call were refused: {error}") from error


def structured_output(
    model: BaseChatModel,
    schema: Schema | None,
    method: Method,
    include_raw: bool,
    strict: bool | None,
    options: Mapping[str, Any],
) -> Runnable[LanguageModelInput, Any]:
    """See ``VLLMChat.with_structured_output``."""
    if method not in _METHODS:
        raise InvalidRequestError(f"There is no method {method!r}; choose one of {', '.join(_METHODS)}.")
    if given := {"structured_outputs", "response_format"} & options.keys():
        raise InvalidRequestError(f"The schema says what the answer must look like: leave {min(given)} out.")
    if schema is None:
        if method != "json_mode":
            raise InvalidRequestError(f"method={method!r} needs a schema.")
        free = model.bind(structured_outputs=StructuredOutputsParams(json_object=True), **options)
        return _joined(free, _JsonParser(), include_raw)
    # What traces show of the schema.
    options = {**options, _FOR_TRACES: {"kwargs": {"method": method, "strict": strict}, "schema": schema}}
    if method == "function_calling":
        (tool,) = openai_tools([schema], strict)
        name = tool["function"]["name"]
        calling = model.bind_tools([tool], tool_choice=name, parallel_tool_calls=False, **options)
        return _joined(calling, _call_parser(schema, name), include_raw)
    form = StructuredOutputsParams(json_object=True) if method == "json_mode" else _schema_params(schema)
    parser = _PydanticParser(pydantic_object=schema) if _is_model(schema) else _JsonParser()
    return _joined(model.bind(structured_outputs=form, **options), parser, include_raw)


def _call_parser(schema: Schema, name: str) -> Runnable[Any, Any]:
    if _is_model(schema):
        return _PydanticCallParser(tools=[schema], first_tool_only=True)
    return _JsonCallParser(key_name=name, first_tool_only=True)


def _schema_params(schema: Schema) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(json=_json_schema(schema))
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"{schema!r} cannot be read as a schema: {error}") from error


def _json_schema(schema: Schema) -> dict[str, Any]:
    # LangChain's conversion writes references out, which a recursive model has no end to, and wants a title.
    if isinstance(schema, type):
        own = getattr(schema, "model_json_schema", None)
        return dict(own()) if own is not None else convert_to_json_schema(schema)
    a_tool = {"function", "parameters", "input_schema"} & set(schema)
    return convert_to_json_schema(dict(schema)) if a_tool else dict(schema)


def _joined(
    model: Runnable[LanguageModelInput, Any], parser: Runnable[Any, Any], include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """The object; or the message, the object, and the error if there is none."""
    if not include_raw:
        return model | parser

    def read(raw: BaseMessage, config: RunnableConfig) -> dict[str, Any]:
        try:
            return {"raw": raw, "parsed": parser.invoke(raw, config), "parsing_error": None}
        except Exception as error:
            return {"raw": raw, "parsed": None, "parsing_error": error}

    # The model comes first, as options of a call reach the first step only.
    return model | RunnableLambda(read)


def _is_model(schema: Schema | None) -> TypeIs[type[BaseModel]]:
    return isinstance(schema, type) and is_basemodel_subclass(schema)
