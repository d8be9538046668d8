"""LangChain messages as the model's chat template gets them."""

from __future__ import annotations

import json

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_pagedlc._messages import to_chat_messages
from pagedlc.messages import normalize_messages
from pagedlc_engine.errors import InvalidRequestError


def test_roles() -> None:
    messages = [
        SystemMessage("s"),
        HumanMessage("h"),
        AIMessage("a"),
        ToolMessage("t", tool_call_id="call-1"),
        FunctionMessage(name="f", content="r"),
        ChatMessage(role="critic", content="c"),
        ChatMessage(role="human", content="d"),
        AIMessageChunk("e"),
    ]
    assert to_chat_messages(messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "h"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "t", "tool_call_id": "call-1"},
        {"role": "tool", "content": "r", "name": "f"},
        {"role": "critic", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]


def test_names_are_kept() -> None:
    messages = [HumanMessage("h", name="Ada"), ToolMessage("t", tool_call_id="1", name="search")]
    assert [message["name"] for message in to_chat_messages(messages)] == ["Ada", "search"]


@pytest.mark.parametrize(
    "content",
    [
        ["one", "two"],
        [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        [{"text": "one"}, "two"],
        [{"type": "text", "text": "one", "index": 0, "annotations": []}, {"type": "text-plain", "text": "two"}],
    ],
)
def test_text_blocks_of_every_kind_are_read(content: list[str | dict[str, object]]) -> None:
    (message,) = normalize_messages(to_chat_messages([HumanMessage(content)]))
    assert message == {"role": "user", "content": "one\ntwo"}


def test_the_pieces_of_an_answer_are_put_together_as_they_were_written() -> None:
    answer = AIMessage([{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}])
    assert to_chat_messages([answer]) == [{"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize("message_class", [HumanMessage, SystemMessage])
@pytest.mark.parametrize(
    "block",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "image", "url": "https://example.com/a.png"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {}},
        {"surprise": 1},
    ],
)
def test_content_that_is_not_text_is_an_error(message_class: type[BaseMessage], block: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=rf"{message_class.__name__}.*text only"):
        to_chat_messages([message_class(content=[block])])


def test_tool_calls_travel_in_openais_form_with_readable_arguments() -> None:
    call = {"name": "search", "args": {"query": "Öl für 5 €"}, "id": "call-1", "type": "tool_call"}
    (message,) = to_chat_messages([AIMessage("", tool_calls=[call])])
    (sent,) = message["tool_calls"]
    assert (sent["id"], sent["type"], sent["function"]["name"]) == ("call-1", "function", "search")
    assert json.loads(sent["function"]["arguments"]) == {"query": "Öl für 5 €"}
    assert "Öl für 5 €" in sent["function"]["arguments"]


def test_histories_of_other_providers_are_read() -> None:
    anthropic = AIMessage(
        [
            {"type": "thinking", "thinking": "I should look it up.", "signature": "x"},
            {"type": "text", "text": "One moment."},
            {"type": "tool_use", "id": "1", "name": "search", "input": {"q": "x"}},
        ],
        tool_calls=[{"name": "search", "args": {"q": "x"}, "id": "1"}],
    )
    standard = AIMessage(content_blocks=[{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "Yes."}])
    first, second = to_chat_messages([anthropic, standard])
    assert first["content"] == "One moment."
    assert first["reasoning_content"] == "I should look it up."
    assert [call["function"]["name"] for call in first["tool_calls"]] == ["search"]
    assert second == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


@pytest.mark.parametrize(
    "block",
    [
        {"type": "tool_use", "id": "1", "name": "search", "input": {"q": "Öl"}},
        {"type": "function_call", "call_id": "1", "name": "search", "arguments": '{"q": "Öl"}'},
        {"type": "tool_call", "id": "1", "name": "search", "args": {"q": "Öl"}},
    ],
)
def test_calls_that_stand_in_the_content_only_are_calls(block: dict[str, object]) -> None:
    (message,) = normalize_messages(to_chat_messages([AIMessage([{"type": "text", "text": "One moment."}, block])]))
    assert message["content"] == "One moment."
    (call,) = message["tool_calls"]
    assert (call["id"], call["function"]) == ("1", {"name": "search", "arguments": {"q": "Öl"}})


def test_what_a_provider_did_by_itself_is_left_out() -> None:
    answer = AIMessage(
        [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "server_tool_call", "id": "s", "name": "web_search", "args": {}},
            {"type": "server_tool_result", "tool_call_id": "s", "status": "success"},
            {"type": "web_search_call", "id": "w", "status": "completed"},
            {"type": "mcp_list_tools", "id": "m"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "non_standard", "value": {}},
            {"type": "output_text", "text": "Here it is."},
        ]
    )
    assert to_chat_messages([answer]) == [{"role": "assistant", "content": "Here it is."}]


def test_pictures_in_an_answer_are_an_error() -> None:
    with pytest.raises(InvalidRequestError, match=r"'image'.*AIMessage.*text only"):
        to_chat_messages([AIMessage([{"type": "image", "url": "https://example.com/a.png"}])])


def test_thoughts_come_from_blocks_summaries_and_keywords() -> None:
    summary = [{"type": "summary_text", "text": "First."}, {"type": "summary_text", "text": "Then."}]
    answers = [
        AIMessage([{"type": "reasoning", "id": "r", "summary": summary}, {"type": "text", "text": "Yes."}]),
        AIMessage("Yes.", additional_kwargs={"reasoning_content": "First.\nThen."}),
        AIMessage([{"type": "reasoning", "reasoning": "First.", "summary": "Then."}, "Yes."]),
        AIMessage([{"type": "thinking", "thinking": "First.", "summary": ["Then.", None, {"text": 5}]}, "Yes."]),
        AIMessage([{"type": "reasoning", "reasoning": 7, "summary": 7}, "Yes."]),
    ]
    expected = {"role": "assistant", "content": "Yes.", "reasoning_content": "First.\nThen."}
    *thoughtful, thoughtless = to_chat_messages(answers)
    assert thoughtful == [expected] * 4
    assert thoughtless == {"role": "assistant", "content": "Yes."}


def test_results_of_tools() -> None:
    parts: list[str | dict[object, object]] = ["rain", {"type": "text", "text": "wind"}]
    messages = [
        ToolMessage("broken", tool_call_id="1", status="error"),
        ToolMessage(parts, tool_call_id="2", name="weather"),
        HumanMessage(
            [
                {"type": "tool_result", "tool_use_id": "3", "content": [{"type": "text", "text": "5"}]},
                {"type": "tool_result", "tool_use_id": "4", "content": "none", "is_error": True},
                {"type": "text", "text": "Go on."},
            ]
        ),
    ]
    assert normalize_messages(to_chat_messages(messages)) == [
        {"role": "tool", "content": "broken", "tool_call_id": "1", "status": "error"},
        {"role": "tool", "content": "rain\nwind", "tool_call_id": "2", "name": "weather"},
        {"role": "tool", "content": "5", "tool_call_id": "3"},
        {"role": "tool", "content": "none", "tool_call_id": "4", "status": "error"},
        {"role": "user", "content": "Go on."},
    ]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (HumanMessage([{"type": "tool_result"}]), "'tool_result' in a HumanMessage has no 'tool_use_id'"),
        (HumanMessage([{"type": "tool_result", "tool_use_id": "1", "content": 5}]), "text or a list of blocks, not 5"),
        (HumanMessage([{"type": "tool_result", "tool_use_id": "1", "content": [5]}]), "list of blocks, not .5."),
        (AIMessage([{"type": "tool_use", "id": "1"}]), "'tool_use' in a AIMessage has no 'name'"),
        (AIMessage([{"type": ["text"]}]), "not supported"),
    ],
)
def test_a_block_that_lacks_something_is_an_error_that_says_so(message: BaseMessage, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        to_chat_messages([message])


def test_a_call_that_was_no_json_is_left_out() -> None:
    broken = {"name": "f", "args": "{oops", "id": "1", "error": "no JSON"}
    assert to_chat_messages([AIMessage("Hm", invalid_tool_calls=[broken])]) == [{"role": "assistant", "content": "Hm"}]


def test_messages_that_cannot_be_sent_are_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        to_chat_messages([])
    with pytest.raises(InvalidRequestError, match="RemoveMessage"):
        to_chat_messages([RemoveMessage(id="1")])
