"""Free text in which a trigger starts a part with a format of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagedlc import InvalidRequestError, SamplingParams
from scripted_model import ScriptedLLM

Make = Callable[..., ScriptedLLM]

ARGUMENTS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
CONTENT = {"type": "json_schema", "json_schema": ARGUMENTS}
TAGS = [
    {
        "type": "tag",
        "begin": f'<tool_call>{{"name": "{name}", "arguments": ',
        "content": CONTENT,
        "end": "}</tool_call>",
    }
    for name in ("add", "sub")
]
CALLS: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": TAGS}
CALL = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'


def say(scripted_llm: Make, script: str, tag: dict[str, Any], **params: Any) -> str:
    llm = scripted_llm(script)
    options = {"max_tokens": 80, "temperature": 0.0, "skip_special_tokens": False, **params}
    output = llm.generate("Hello", SamplingParams(structured_outputs={"structural_tag": tag}, **options))[0]
    return output.outputs[0].text.removesuffix("<|im_end|>")


@pytest.mark.parametrize(
    "text",
    ["Just text, with <tool and < in it.", f"Let me see. {CALL}", f"{CALL}\n{CALL.replace('add', 'sub')} done", ""],
)
def test_free_text_and_well_formed_calls_are_left_as_they_are(scripted_llm: Make, text: str) -> None:
    assert say(scripted_llm, text, CALLS) == text


def test_after_the_trigger_only_a_declared_call_is_possible(scripted_llm: Make) -> None:
    wrong = '<tool_call>{"name": "multiply", "arguments": {"y": "a"}}</tool_call>'
    said = say(scripted_llm, f"Hm. {wrong}", CALLS)
    assert said.startswith('Hm. <tool_call>{"name": "')
    assert "multiply" not in said
    assert '"x"' in said


def test_the_older_form_with_structures_means_the_same(scripted_llm: Make) -> None:
    structures = [{"begin": tag["begin"], "schema": ARGUMENTS, "end": tag["end"]} for tag in TAGS]
    older = {"type": "structural_tag", "structures": structures, "triggers": ["<tool_call>"]}
    assert say(scripted_llm, f"Yes. {CALL}", older) == f"Yes. {CALL}"
    assert say(scripted_llm, f"Yes. {CALL}", {"type": "structural_tag", "format": CALLS}) == f"Yes. {CALL}"


def test_at_least_one_and_stop_after_first(scripted_llm: Make) -> None:
    least_one = {**CALLS, "at_least_one": True}
    assert say(scripted_llm, "I would rather not.", least_one).startswith('<tool_call>{"name": ')
    assert say(scripted_llm, f"Well: {CALL} And now: {CALL}", least_one) == f"{CALL} And now: {CALL}"
    once = {**CALLS, "stop_after_first": True}
    assert say(scripted_llm, f"First {CALL} then {CALL}", once) == f"First {CALL}"


def test_calls_and_nothing_else(scripted_llm: Make) -> None:
    only = {"type": "tags_with_separator", "tags": TAGS, "separator": "\n", "at_least_one": True}
    assert say(scripted_llm, f"Certainly! {CALL}\n{CALL}", only) == f"{CALL}\n{CALL}"
    assert say(scripted_llm, f"{CALL}\n{CALL}", {**only, "stop_after_first": True}) == CALL


def test_a_special_token_can_be_a_trigger(scripted_llm: Make) -> None:
    tag = {"begin": "<repo_name>add", "content": CONTENT, "end": "<file_sep>"}
    calls = {"type": "triggered_tags", "triggers": ["<repo_name>"], "tags": [tag]}
    text = 'Look: <repo_name>add{"x": 12}<file_sep> and more'
    assert say(scripted_llm, text, calls) == text
    assert say(scripted_llm, "<repo_name>nonsense", calls).startswith("<repo_name>add{")


def test_thoughts_before_json(scripted_llm: Make) -> None:
    thought = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
    thinking = {"type": "sequence", "elements": [thought, CONTENT]}
    text = '<think>1 < 2, so {"x": 5}? No.</think>{"x": 2}'
    assert say(scripted_llm, text, thinking) == text
    number = {"type": "regex", "pattern": "[0-9]+/2"}
    refusal = {"type": "grammar", "grammar": 'root ::= "no"'}
    marker = {"type": "const_string", "value": "ANSWER "}
    elements = [{"type": "any_text"}, marker, {"type": "or", "elements": [number, refusal]}]
    answered = {"type": "sequence", "elements": elements}
    assert say(scripted_llm, "let me see ANSWER 3/2", answered) == "let me see ANSWER 3/2"
    assert say(scripted_llm, "let me see ANSWER no", answered) == "let me see ANSWER no"


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ({"type": "tag", "begin": "a"}, "content"),
        ({"type": "triggered_tags", "triggers": ["<b>"], "tags": TAGS}, "<b>"),
        ({"type": "triggered_tags", "triggers": [], "tags": TAGS}, "begins with no trigger"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, CONTENT]}, "any_text"),
        ({"type": "sequence", "elements": []}, "elements"),
    ],
)
def test_mistakes_are_named(scripted_llm: Make, tag: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        say(scripted_llm, "x", tag)
