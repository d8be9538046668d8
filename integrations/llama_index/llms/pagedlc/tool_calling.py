"""LlamaIndex's way of giving tools to a model and of getting its calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, ToolCallBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools.types import BaseTool

from llama_index.llms.pagedlc.blocks import parse_partial
from llama_index.llms.pagedlc.errors import IncompleteOutputError
from pagedlc.tools import resolve_choice, tool_specs
from pagedlc_engine.errors import InvalidRequestError

__all__ = ["ToolCallingLLM", "to_tool_dicts"]


def _to_tool_dict(tool: BaseTool | Mapping[str, Any]) -> dict[str, Any]:
    """A LlamaIndex tool in OpenAI's form; what is in that form already stays as it is.

    Raises:
        InvalidRequestError: It is neither.
    """
    if isinstance(tool, BaseTool):
        return tool.metadata.to_openai_tool(skip_length_check=True)
    if not isinstance(tool, Mapping):
        raise InvalidRequestError(
            f"{tool!r:.80} is no tool: give LlamaIndex tools (FunctionTool.from_defaults(function)), or dicts in "
            "OpenAI's form."
        )
    return dict(tool)


def to_tool_dicts(tools: Iterable[BaseTool | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools in OpenAI's form.

    Raises:
        InvalidRequestError: They are no list of tools.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Iterable):
        raise InvalidRequestError(f"tools must be a list of tools, not {tools!r:.80}.")
    return [_to_tool_dict(tool) for tool in tools]


class ToolCallingLLM(FunctionCallingLLM):
    """Turns the arguments of ``chat_with_tools`` and its variants into those of ``chat``, and responses into calls."""

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | Mapping[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Arguments for ``chat``.

        Args:
            tools: What the model may call.
            user_msg: Follows the history.
            chat_history: The conversation so far; it is not changed.
            verbose: Taken for compatibility.
            allow_parallel_tool_calls: Whether one answer may have several calls.
            tool_required: The answer must be a call.
            tool_choice: ``"auto"``, ``"none"``, ``"required"`` or a tool's name; goes before ``tool_required``.
            strict: Taken for compatibility: arguments always match the tool's schema.
            kwargs: Further keywords of ``chat``.

        Raises:
            InvalidRequestError: ``tool_choice`` names none of the tools, or they are malformed.
        """
        messages = list(chat_history or [])
        if user_msg is not None:
            message = ChatMessage(role=MessageRole.USER, content=user_msg) if isinstance(user_msg, str) else user_msg
            messages.append(message)
        dicts = to_tool_dicts(tools)
        if not dicts and tool_choice is None:
            return {"messages": messages, **kwargs}
        wanted = tool_choice if tool_choice is not None else "required" if tool_required else "auto"
        choice = resolve_choice(wanted, tool_specs(dicts))
        # Who names a tool means one call of it.
        parallel = allow_parallel_tool_calls and not choice.named
        options = {"tools": dicts, "tool_choice": wanted, "parallel_tool_calls": parallel}
        return {"messages": messages, **options, **kwargs}

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls of a response; of a stream's response so far, with the arguments that are known.

        Args:
            response: From any of the chat methods.
            error_on_no_tool_call: Raise if there is no call.
            kwargs: Taken for compatibility.

        Raises:
            ValueError: There is no call.
            IncompleteOutputError: ``max_new_tokens`` cut the answer off in the middle of a call.
        """
        invalid = response.additional_kwargs.get("invalid_tool_calls")
        finish_reason = response.additional_kwargs.get("finish_reason")
        if invalid and finish_reason == "length":
            name = invalid[-1]["name"] or "a tool"
            raise IncompleteOutputError.of(f"the call of {name}", response)
        blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not blocks and error_on_no_tool_call:
            ending = f" (finish reason {finish_reason!r})" if finish_reason else ""
            raise ValueError(
                f"The model called no tool{ending} and said: {response.message.content!r}. With tool_required=True it "
                "has to call one."
            )
        return [_selection(block) for block in blocks]


def _selection(block: ToolCallBlock) -> ToolSelection:
    arguments = block.tool_kwargs
    if isinstance(arguments, str):
        arguments = parse_partial(arguments)
    return ToolSelection(tool_id=block.tool_call_id or "", tool_name=block.tool_name, tool_kwargs=arguments)
