"""Answers become text and tool calls, the same however the stream was cut."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_samples import NAMES, feed_all, numbered_ids, splits, tokens

from pagedlc.tools import FORMATS, ChatMessage, TextDelta, ToolCallArguments, ToolCallParser, ToolCallStart

SYNTAX = {form.name: form.syntax for form in FORMATS}
PARIS = '{"city": "Paris", "days": 2}'


def parser(form: str, names: list[str] = NAMES) -> ToolCallParser:
    return ToolCallParser(SYNTAX[form], names, numbered_ids())


def read(form: str, text: str) -> ChatMessage:
    """The message of a text, which must be the same at every split."""
    whole = feed_all(parser(form), [text])
    for pieces in [*splits(text), tokens(text)]:
        assert feed_all(parser(form), pieces) == whole, f"differs when fed as {pieces}"
    return whole


def calls(message: ChatMessage) -> list[tuple[str, str]]:
    assert all(call.valid for call in message.tool_calls), message.tool_calls
    return [(call.name, call.arguments) for call in message.tool_calls]


def write(form: str, *made: tuple[str, str]) -> str:
    """The calls as a model of that family writes them."""
    if form == "llama3_json":
        return "; ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in made)
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in made]
    if form == "mistral":
        return f"[TOOL_CALLS][{', '.join(objects)}]"
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in objects)


ALL = pytest.mark.parametrize("form", sorted(SYNTAX))


@ALL
def test_a_call_is_read(form: str) -> None:
    message = read(form, write(form, ("get_weather", PARIS)))
    assert calls(message) == [("get_weather", PARIS)]
    assert message.text == ""


@ALL
def test_calls_in_a_row_have_their_own_index_and_id(form: str) -> None:
    message = read(form, write(form, ("get_weather", PARIS), ("add", '{"b": 1, "a": 2}'), ("get_weather", PARIS)))
    assert [call.name for call in message.tool_calls] == ["get_weather", "add", "get_weather"]
    assert [call.index for call in message.tool_calls] == [0, 1, 2]
    assert len({call.id for call in message.tool_calls}) == 3
    assert message.text == ""


@ALL
def test_text_before_a_call_streams_and_blank_space_beside_calls_is_dropped(form: str) -> None:
    message = read(form, "\nI will look.\n\n" + write(form, ("get_weather", PARIS)) + "\n")
    assert message.text == "\nI will look."
    assert calls(message) == [("get_weather", PARIS)]


@ALL
def test_text_after_a_call_is_kept(form: str) -> None:
    message = read(form, "One." + write(form, ("now", "{}")) + "\nTwo. " + write(form, ("add", '{"b": 1, "a": 2}')))
    assert message.text == "One.\nTwo."
    assert calls(message) == [("now", "{}"), ("add", '{"b": 1, "a": 2}')]


@ALL
@pytest.mark.parametrize(
    "text",
    ["", " ", "Hi", "a < b <tool < c", "x\n\n", "[TOOL] [TOOL_CALL", "<|python_ta", "{", '{"', "{}", '{"name',
     "<tool_call", '{"a": 1}', '{"city": "get_weather"}', 'A set: {1, 2}', '{"name": "Bob", "age": 3}',
     'f({"name": 1})', "{{}}",
     'Use {"name": "Bob"} and\n', "{ \n", "}", "]", "</tool_call> "],
)  # fmt: skip
def test_text_that_is_no_call_comes_out_as_it_is(form: str, text: str) -> None:
    assert read(form, text) == ChatMessage(text=text)


@ALL
@pytest.mark.parametrize("arguments", [None, "{}", "null", " { } "])
def test_a_tool_without_arguments_gets_an_empty_object(form: str, arguments: str | None) -> None:
    text = write(form, ("now", arguments or "{}"))
    if arguments is None:
        text = text.replace(', "arguments": {}', "").replace(', "parameters": {}', "")
    message = read(form, text)
    assert [call.name for call in message.tool_calls] == ["now"]
    assert message.tool_calls[0].valid
    assert json.loads(message.tool_calls[0].arguments) == {}


HARD_STRINGS = [
    'say "hi" {[(',
    "</tool_call>",
    "<tool_call>",
    "[TOOL_CALLS]",
    "back\\slash\\",
    "line\nbreak\ttab",
    "Zürich – 北京 👍🏽",
    '}"}]',
    "<|python_tag|>",
]


@ALL
@pytest.mark.parametrize("value", HARD_STRINGS)
def test_anything_may_stand_in_a_string(form: str, value: str) -> None:
    arguments = json.dumps({"city": value, "more": [{"x": value}]}, ensure_ascii=False)
    assert calls(read(form, write(form, ("get_weather", arguments)))) == [("get_weather", arguments)]


@ALL
def test_arguments_stream_while_the_model_writes_them(form: str) -> None:
    text = write(form, ("get_weather", '{"city": "Llanfairpwllgwyngyll", "days": 2}'))
    reader = parser(form)
    events = [event for char in text for event in reader.feed(char)]
    assert [type(event) for event in events[:1]] == [ToolCallStart]
    assert sum(isinstance(event, ToolCallStart) for event in events) == 1
    pieces = [event.text for event in events if isinstance(event, ToolCallArguments)]
    assert len(pieces) == len("".join(pieces)) == 43


@ALL
def test_text_streams_while_tools_are_bound(form: str) -> None:
    reader = parser(form)
    events = [event for word in ["The ", "sky ", "is ", "blue."] for event in reader.feed(word)]
    assert all(isinstance(event, TextDelta) for event in events)
    assert len(events) == 4
    assert "".join(event.text for event in events) == "The sky is blue."


@ALL
def test_an_answer_may_end_anywhere(form: str) -> None:
    """Cut at every character: never an error, never two calls, and the call is valid only when it is complete."""
    text = "Look: " + write(form, ("get_weather", PARIS))
    for end in range(len(text)):
        message = feed_all(parser(form), list(text[:end]))
        assert message == feed_all(parser(form), [text[:end]])
        assert len(message.tool_calls) <= 1
        for call in message.tool_calls:
            assert call.valid == (call.arguments == PARIS)
            assert call.error is None or "ended" in call.error
    assert feed_all(parser(form), [text[: text.index("Paris") + 2]]).tool_calls[0].arguments == '{"city": "Pa'


@pytest.mark.parametrize(
    ("text", "says", "calls"),
    [
        ("Well. <tool_cal", "Well.", 1),
        ("Well. <tool", "Well.", 1),
        ("Well, a <", "Well, a <", 0),
        ("A <t", "A <t", 0),
    ],
)
def test_half_an_opener_is_no_text_where_it_was_cut_off(text: str, says: str, calls: int) -> None:
    reader, message = parser("hermes"), ChatMessage()
    message.add([*reader.feed(text), *reader.finish(cut_off=True)])
    assert message.text == says
    assert [(call.name, call.arguments, call.valid) for call in message.tool_calls] == [("", "", False)] * calls


@pytest.mark.parametrize("form", ["hermes", "generic", "mistral"])
def test_an_unknown_tool_makes_an_invalid_call_with_what_the_model_wrote(form: str) -> None:
    message = read(form, write(form, ("fly", '{"to": "Mars"}'), ("now", "{}")))
    unknown, known = message.tool_calls
    assert (unknown.name, unknown.arguments, unknown.valid) == ("fly", '{"to": "Mars"}', False)
    assert "'fly'" in (unknown.error or "")
    assert known.valid


def test_an_object_that_names_no_tool_is_text_for_llama_unless_the_tag_says_call() -> None:
    fly = '{"name": "fly", "parameters": {"to": "Mars"}}'
    assert read("llama3_json", fly) == ChatMessage(text=fly)
    assert not read("llama3_json", f"<|python_tag|>{fly}").tool_calls[0].valid


@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        ('{"name": "add", "arguments": {\'b\': 1}}', "add", "{'b': 1}"),
        ('{"name": "add", "arguments": [1, 2]}', "add", "[1, 2]"),
        ('{"name": "add", "arguments": 5}', "add", "5"),
        ('{"name": "add", "arguments": "five"}', "add", '"five"'),
        ('{"name": "add", arguments: {}}', "add", "arguments: {}}"),
        ('{"nme": "add"}', "", '{"nme": "add"}'),
        ("add(1, 2)", "", "add(1, 2)"),
        ('{"name": 7, "arguments": {}}', "", '{"name": 7, "arguments": {}}'),
    ],
)
def test_malformed_calls_are_invalid_calls_that_keep_the_text(body: str, name: str, arguments: str) -> None:
    message = read("hermes", f"Well. <tool_call>{body}</tool_call> Done.")
    (call,) = message.tool_calls
    assert (call.name, call.arguments, call.valid) == (name, arguments, False)
    assert message.text == "Well. Done."


@pytest.mark.parametrize(
    "body",
    [
        f'{{"arguments": {PARIS}, "name": "get_weather"}}',
        f'{{"type": "function", "id": "abcdefghi", "name": "get_weather", "arguments": {PARIS}}}',
        f'{{"name": "get_weather", "arguments": {PARIS}, "id": "abcdefghi"}}',
        f'{{ "name" : "get_weather" ,\n "arguments" : {PARIS} \n}}',
        f'{{"name": "get_weather", "parameters": {PARIS}}}',
        f'{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}',
        f'{{"name": "get\\u005fweather", "arguments": {PARIS}}}',
        f'{{"name": "get_weather", "arguments": {PARIS}',
        f'[{{"name": "get_weather", "arguments": {PARIS}}}]',
    ],
)
def test_calls_are_understood_as_models_vary_them(body: str) -> None:
    assert calls(read("hermes", f"<tool_call>{body}</tool_call>")) == [("get_weather", PARIS)]


def test_a_forgotten_end_tag_does_not_swallow_what_follows() -> None:
    message = read("hermes", '<tool_call>{"name": "now"}<tool_call>{"name": "now"}\nBye')
    assert calls(message) == [("now", "{}"), ("now", "{}")]
    assert message.text == "\nBye"


def test_a_broken_call_ends_where_the_next_begins() -> None:
    message = read("hermes", '<tool_call>oops<tool_call>{"name": "now"}</tool_call>')
    assert [(call.arguments, call.valid) for call in message.tool_calls] == [("oops", False), ("{}", True)]


@pytest.mark.parametrize(
    "text",
    [
        f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}",
        f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{PARIS}[TOOL_CALLS]now[CALL_ID]abcdefghj[ARGS]{{}}",
        f"[TOOL_CALLS]get_weather{PARIS}[TOOL_CALLS]now{{}}",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}},{{"name": "now", "arguments": {{}}}}]',
        f'[TOOL_CALLS]{{"name": "get_weather", "arguments": {PARIS}}}[TOOL_CALLS]{{"name": "now"}}',
    ],
)
def test_all_of_mistrals_ways_are_read(text: str) -> None:
    assert calls(read("mistral", text)) == [("get_weather", PARIS), ("now", "{}")]


@pytest.mark.parametrize("between", ["", "\n", ";", "; ", " ;\n"])
def test_llama_calls_follow_each_other_with_or_without_the_tag(between: str) -> None:
    text = (
        f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}{between}{{"name": "now", "parameters": {{}}}}'
    )
    expected = [("get_weather", PARIS), ("now", "{}")]
    assert calls(read("llama3_json", text)) == expected
    assert calls(read("llama3_json", text.removeprefix("<|python_tag|>"))) == expected


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[", "]", "<|python_tag|>", "{", "}", '"', "\\", ",", ":",
    '"name"', '"arguments"', '"parameters"', '"get_weather"', '"now"', '"fly"', "now[ARGS]", "null", "17", " ", "\n",
    ";", "word",
    '{"name": "now", "arguments": {}}', '{"name": "add", "parameters": {"b": 1, "a": 2}}', "ü👍🏽",
]  # fmt: skip


@ALL
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_text_at_any_split_gives_the_same_message(form: str, data: Any) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=14)))
    cuts = sorted(data.draw(st.sets(st.integers(0, max(len(text), 1)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True)]
    whole = feed_all(parser(form), [text])
    assert feed_all(parser(form), pieces) == whole
    assert feed_all(parser(form), list(text)) == whole
    for call in whole.tool_calls:
        assert not call.valid or (call.name in NAMES and isinstance(json.loads(call.arguments), dict))


@ALL
def test_short_answers_at_every_possible_split(form: str) -> None:
    """All 2^n ways to cut a short stream of tokens."""
    text = "A " + write(form, ("now", '{"x": "}"}')) + " B"
    pieces = tokens(text)
    pieces = [*pieces[:4], *("".join(pieces[n : n + 3]) for n in range(4, len(pieces), 3))][:12]
    whole = feed_all(parser(form), ["".join(pieces)])
    for cuts in product([True, False], repeat=len(pieces) - 1):
        grouped = [pieces[0]]
        for piece, cut in zip(pieces[1:], cuts, strict=True):
            grouped[-1:] = [grouped[-1], piece] if cut else [grouped[-1] + piece]
        assert feed_all(parser(form), grouped) == whole
