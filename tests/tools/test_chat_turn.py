"""One turn with a model that says what it is told: prompt, grammar, stream and message, end to end."""

from __future__ import annotations

import asyncio
import json
import math
import uuid
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import UUID4, Base64Bytes, BaseModel, SecretStr
from tool_samples import (
    LLAMA_LIKE,
    MISTRAL_LIKE,
    MISTRAL_NAMED,
    QWEN_LIKE,
    QWEN_THINKING,
    TOOLS,
    fold,
    make_model,
)

from pagedlc import LLM, InvalidRequestError, SamplingParams
from pagedlc.tools import ChatMessage, ChatTurn, ReasoningDelta, TextDelta, ToolCallArguments, TurnDelta
from scripted_model import ScriptedLLM

Make = Callable[..., ScriptedLLM]
ASK = [{"role": "user", "content": "Weather in Zürich?"}]
PARAMS = SamplingParams(max_tokens=400, temperature=0)
ZURICH = '{"city": "Zürich", "days": 2}'
HERMES = f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {ZURICH}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def run(turn: ChatTurn, params: SamplingParams = PARAMS) -> ChatMessage:
    """The streamed message, which must be what the events add up to."""
    deltas = list(turn.stream(params))
    message = deltas[-1].message
    assert fold(event for delta in deltas for event in delta.events) == message
    return message


def called(message: ChatMessage) -> list[tuple[str, str]]:
    assert all(call.valid for call in message.tool_calls), message.tool_calls
    return [(call.name, call.arguments) for call in message.tool_calls]


def test_auto_streams_text_and_then_the_call(scripted_llm: Make) -> None:
    message = run(ChatTurn(scripted_llm(HERMES), ASK, TOOLS))
    assert message.text == "Let me see."
    assert called(message) == [("get_weather", ZURICH)]
    assert message.finish_reason == "tool_calls"
    assert message.tool_calls[0].id.startswith("call_")


def test_auto_leaves_plain_answers_alone(scripted_llm: Make) -> None:
    message = run(ChatTurn(scripted_llm("Snow < 2 cm.\n"), ASK, TOOLS))
    assert message == ChatMessage(text="Snow < 2 cm.\n", finish_reason="stop", stop_reason=message.stop_reason)


@pytest.mark.parametrize("choice", ["auto", "required", "now"])
@pytest.mark.parametrize(
    "wish",
    ["Look: <tool_call>{'name': oops", '<tool_call>\n{"name": "fly", "arguments": {"to": "Mars"}}\n</tool_call>',
     '<tool_call>\n{"name": "add", "arguments": {"a": "x", "c": [}}\n</tool_call> and more'],
)  # fmt: skip
def test_the_grammar_makes_malformed_calls_impossible(scripted_llm: Make, choice: str, wish: str) -> None:
    message = run(ChatTurn(scripted_llm(wish), ASK, TOOLS, tool_choice=choice))
    ((name, arguments),) = called(message)
    assert name in ({"now"} if choice == "now" else {"get_weather", "add", "now"})
    assert isinstance(json.loads(arguments), dict)
    if choice != "auto":
        assert message.text == ""


@pytest.mark.parametrize("choice", ["required", "any", "now"])
def test_a_call_can_be_demanded_of_a_model_that_wants_to_talk(scripted_llm: Make, choice: str) -> None:
    message = run(ChatTurn(scripted_llm("No, I will not."), ASK, TOOLS, tool_choice=choice))
    assert len(called(message)) == 1
    assert message.finish_reason == "tool_calls"


def test_with_none_calls_are_text_and_the_prompt_stays_the_same(scripted_llm: Make) -> None:
    llm = scripted_llm(HERMES)
    silent, free = (ChatTurn(llm, ASK, TOOLS, tool_choice=choice) for choice in ("none", "auto"))
    assert run(silent).text == HERMES
    assert silent.prompt_token_ids == free.prompt_token_ids


@pytest.mark.parametrize(("parallel", "expected"), [(True, 2), (False, 1), (None, 1)])
def test_parallel_calls_are_for_the_caller_to_allow(scripted_llm: Make, parallel: bool | None, expected: int) -> None:
    llm = scripted_llm(f"{HERMES}\n{NOW}\n")
    message = run(ChatTurn(llm, ASK, TOOLS, parallel_tool_calls=parallel))
    assert called(message) == [("get_weather", ZURICH), ("now", "{}")][:expected]
    assert [call.index for call in message.tool_calls] == list(range(expected))
    assert len({call.id for call in message.tool_calls}) == expected


def test_arguments_arrive_in_many_deltas(scripted_llm: Make) -> None:
    events = [event for delta in ChatTurn(scripted_llm(HERMES), ASK, TOOLS).stream(PARAMS) for event in delta.events]
    assert sum(isinstance(event, TextDelta) for event in events) >= 3
    assert sum(isinstance(event, ToolCallArguments) for event in events) >= 8


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_streamed_and_complete_answers_are_the_same_message(scripted_llm: Make, choice: str) -> None:
    llm = scripted_llm(HERMES)
    turn = ChatTurn(llm, ASK, TOOLS, tool_choice=choice)
    streamed = run(turn)
    (output,) = llm.generate(turn.prompt_token_ids, turn.sampling_params(PARAMS))
    reader = turn.reader(PARAMS)
    assert fold(reader.read_output(output.outputs[0])) == reader.message
    for call in (*streamed.tool_calls, *reader.message.tool_calls):
        call.id = ""
    assert reader.message == streamed


def whole(turn: ChatTurn, params: SamplingParams) -> list[TurnDelta]:
    return list(turn.stream(params, whole=True))


async def whole_async(turn: ChatTurn, params: SamplingParams) -> list[TurnDelta]:
    return [delta async for delta in turn.astream(params, whole=True)]


@pytest.mark.parametrize(
    ("script", "tools", "changes", "pieces"),
    [
        ("Just snow.", None, {}, 1),
        ("Just snow.", None, {"n": 2, "logprobs": 1}, 2),
        (HERMES, TOOLS, {}, 1),
        (HERMES, TOOLS, {"max_tokens": 30}, 1),
        (f"<think>\nHm.\n</think>\n{HERMES}", TOOLS, {}, 1),
        ("Snow. And rain. And fog.", None, {"stop": ["rain"]}, None),
        ("Snow. And rain. And fog.", TOOLS, {"stop": ["rain"]}, None),
    ],
)
async def test_an_answer_that_nobody_watches_comes_as_one_piece_unless_it_has_stop_strings(
    scripted_llm: Make,
    script: str,
    tools: list[dict[str, Any]] | None,
    changes: dict[str, Any],
    pieces: int | None,
) -> None:
    turn = ChatTurn(scripted_llm(script), ASK, tools, reasoning=True)
    params = PARAMS.replace(**changes)
    streamed = list(turn.stream(params))
    for deltas in (whole(turn, params), await whole_async(turn, params)):
        assert pieces is None or len(deltas) == pieces
        for index in range(params.n):
            last, other = ([delta for delta in each if delta.chunk.index == index][-1] for each in (deltas, streamed))
            for call in (*last.message.tool_calls, *other.message.tool_calls):
                call.id = ""
            assert last.message == other.message
            assert last.chunk.num_generated_tokens == other.chunk.num_generated_tokens
        rows = [[row for delta in each for row in delta.chunk.logprobs or ()] for each in (deltas, streamed)]
        assert len(rows[0]) == len(rows[1])


def test_a_call_cut_off_by_max_tokens_is_invalid(scripted_llm: Make) -> None:
    llm = scripted_llm(HERMES)
    length = len(llm.tokenizer.encode(HERMES[: HERMES.index("rich")]))
    message = run(ChatTurn(llm, ASK, TOOLS), PARAMS.replace(max_tokens=length))
    (call,) = message.tool_calls
    assert (call.name, call.arguments, message.finish_reason) == ("get_weather", '{"city": "Zü', "length")
    assert "raise max_tokens" in (call.error or "")
    assert not call.valid
    assert "ended" in str(call.error)


def test_stop_strings_end_text_but_not_arguments(scripted_llm: Make) -> None:
    llm = scripted_llm('One; two\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "a; b"}}\n</tool_call>')
    within = run(ChatTurn(llm, ASK, TOOLS), PARAMS.replace(stop=["; b"]))
    assert called(within) == [("get_weather", '{"city": "a; b"}')]
    before = run(ChatTurn(llm, ASK, TOOLS), PARAMS.replace(stop=["; two", "; "]))
    assert (before.text, before.tool_calls, before.finish_reason, before.stop_reason) == ("One", [], "stop", "; ")
    kept = run(ChatTurn(llm, ASK, TOOLS), PARAMS.replace(stop=["; "], include_stop_str_in_output=True))
    assert kept.text == "One; "
    later = run(ChatTurn(llm, ASK, TOOLS), PARAMS.replace(stop=["; "], min_tokens=8))
    assert later.finish_reason == "tool_calls"


def test_a_stop_string_frees_the_engine_at_once(scripted_llm: Make) -> None:
    llm = scripted_llm("word. " * 300)
    message = run(ChatTurn(llm, ASK, TOOLS), PARAMS.replace(stop=["."], max_tokens=2000))
    assert message.text == "word"
    assert llm.generate("Hi", SamplingParams(max_tokens=1))
    assert llm.stats().num_running == 0


def test_several_answers_are_read_each_for_itself(scripted_llm: Make) -> None:
    turn = ChatTurn(scripted_llm(HERMES), ASK, TOOLS)
    last = {delta.chunk.index: delta.message for delta in turn.stream(PARAMS.replace(n=3, temperature=1.0))}
    assert [called(last[index]) for index in range(3)] == [[("get_weather", ZURICH)]] * 3


async def test_turns_stream_natively_in_asyncio(scripted_llm: Make) -> None:
    llm = scripted_llm(HERMES)

    async def one() -> ChatMessage:
        async for delta in ChatTurn(llm, ASK, TOOLS).astream(PARAMS):
            message = delta.message
        return message

    messages = await asyncio.gather(*(one() for _ in range(4)))
    assert all(called(message) == [("get_weather", ZURICH)] for message in messages)


class Upload(BaseModel):
    path: Path
    password: SecretStr
    key: UUID4
    content: Base64Bytes
    raw: bytes
    labels: set[str]
    sizes: frozenset[int]
    by_id: dict[uuid.UUID, int]
    timeout: float = math.inf


def one_argument(schema: Any) -> dict[str, Any]:
    parameters = {"properties": {"good": {"type": "string"}, "bad": schema, "other": {}}, "required": ["good", "bad"]}
    return {"type": "function", "function": {"name": "odd", "parameters": parameters}}


def test_what_no_grammar_can_enforce_is_left_to_the_tool(scripted_llm: Make) -> None:
    upload = {"type": "function", "function": {"name": "upload", "parameters": Upload.model_json_schema()}}
    arguments = (
        '{"path": "/tmp/a", "password": "x", "key": "e3b0c442-98fc-4c14-9afb-f4c8996fb924", "content": "YQ==", '
        '"raw": "b", "labels": ["a", "a"], "sizes": [1], "by_id": {}, "timeout": 2.5}'
    )
    llm = scripted_llm(f'<tool_call>\n{{"name": "upload", "arguments": {arguments}}}\n</tool_call>')
    for choice in ("auto", "upload"):
        message = run(ChatTurn(llm, ASK, [*TOOLS, upload], tool_choice=choice))
        assert called(message) == [("upload", arguments)]
        assert Upload.model_validate_json(message.tool_calls[0].arguments).labels == {"a"}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "text"}, "Invalid type: text"),
        ({"$ref": "#/$defs/missing"}, "does not exist"),
        ({"anyOf": [{"$ref": "#/properties/good"}, 5]}, "must be an object or boolean"),
    ],
)
@pytest.mark.parametrize("template", [QWEN_LIKE, LLAMA_LIKE, MISTRAL_NAMED])
def test_a_refused_schema_is_told_by_tool_and_argument(
    scripted_llm: Make, tmp_path: Path, template: str, schema: Any, reason: str
) -> None:
    llm = scripted_llm("Hi.", model=make_model(tmp_path, template))
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        run(ChatTurn(llm, ASK, [*TOOLS, one_argument(schema)]))
    assert str(caught.value).startswith("Tool 'odd': the schema of its argument 'bad' cannot be used: ")
    assert run(ChatTurn(llm, ASK, [*TOOLS, one_argument({"type": "integer"})])).text == "Hi."


def test_of_two_refused_arguments_the_first_is_told_with_its_own_reason(scripted_llm: Make) -> None:
    properties = {"good": {}, "a": {"type": "string", "pattern": "(?=a)b"}, "b": {"type": "text"}}
    with pytest.raises(InvalidRequestError, match=r"its argument 'a' cannot be used: (.|\n)*look-around"):
        run(ChatTurn(scripted_llm("Hi."), ASK, [{"name": "odd", "parameters": {"properties": properties}}]))


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "string"}}, "allOf": [{"$ref": "#/missing"}]},
        {"properties": {f"a{number}": {"type": "text"} for number in range(501)}},
    ],
    ids=["none is at fault", "too many to search"],
)
def test_where_no_argument_can_be_named_the_tool_is(scripted_llm: Make, parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="Tool 'odd': the schema of its arguments cannot be used: "):
        run(ChatTurn(scripted_llm("Hi."), ASK, [*TOOLS, {"name": "odd", "parameters": parameters}]))


def test_what_goes_wrong_later_is_told_of_the_tools_too(scripted_llm: Make) -> None:
    odd = one_argument({"$ref": "#/properties/bad"})
    with pytest.raises(InvalidRequestError, match="The grammar of the tools cannot be followed: "):
        run(ChatTurn(scripted_llm("Hi."), ASK, [*TOOLS, odd], tool_choice="odd"))


@pytest.mark.parametrize("form", [{"json": {"type": "array", "uniqueItems": True}}, {"regex": "[^ab](?=a)"}])
def test_beside_tools_a_form_is_refused_by_its_own_name(scripted_llm: Make, form: dict[str, Any]) -> None:
    turn = ChatTurn(scripted_llm("Hi."), ASK, TOOLS)
    with pytest.raises(InvalidRequestError, match=f"structured_outputs: the {next(iter(form))} cannot be"):
        run(turn, PARAMS.replace(structured_outputs=form))


FORMED = PARAMS.replace(structured_outputs={"json": {"type": "object", "properties": {"sky": {"enum": ["blue"]}}}})


def test_beside_tools_a_form_is_that_of_an_answer_without_calls(scripted_llm: Make) -> None:
    message = run(ChatTurn(scripted_llm('{"sky": "blue"}'), ASK, TOOLS), FORMED)
    assert json.loads(message.text) == {"sky": "blue"}
    message = run(ChatTurn(scripted_llm(NOW), ASK, TOOLS), FORMED)
    assert called(message) == [("now", "{}")]


def test_where_a_call_is_required_a_form_has_nothing_to_hold_for(scripted_llm: Make) -> None:
    message = run(ChatTurn(scripted_llm(NOW), ASK, TOOLS, tool_choice="required"), FORMED)
    assert called(message) == [("now", "{}")]


@pytest.mark.parametrize(
    ("form", "answer"),
    [({"choice": ["yes", "no"]}, "no"), ({"regex": "[0-9]{3}"}, "042"), ({"json_object": True}, "{}")],
)
def test_a_form_holds_for_the_answer_and_not_for_opened_thoughts(
    scripted_llm: Make, tmp_path: Path, form: dict[str, Any], answer: str
) -> None:
    opening = tmp_path / "opening.jinja"
    opening.write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}<think></think>\n<think>\n")
    llm = scripted_llm(f"Hm, hm.</think>{answer}", chat_template=str(opening))
    message = run(ChatTurn(llm, ASK), PARAMS.replace(structured_outputs=form))
    assert message.reasoning.strip() == "Hm, hm."
    assert message.text == answer


def test_without_tools_parameters_are_handed_on_as_they_are(scripted_llm: Make) -> None:
    turn = ChatTurn(scripted_llm("a. b"), ASK)
    params = PARAMS.replace(stop=["."])
    assert turn.sampling_params(params) == params
    assert run(turn, params).text == "a"


def test_an_agent_calls_reads_the_result_and_answers(scripted_llm: Make) -> None:
    llm = scripted_llm({"Weather": HERMES, "Snow, -2°": "It snows in Zürich."})
    messages: list[dict[str, Any]] = list(ASK)
    first = run(ChatTurn(llm, messages, TOOLS))
    (call,) = first.tool_calls
    function = {"name": call.name, "arguments": call.arguments}
    messages.append({"role": "assistant", "content": first.text, "tool_calls": [{"id": call.id, "function": function}]})
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "Snow, -2°"})
    second = run(ChatTurn(llm, messages, TOOLS))
    assert second.text == "It snows in Zürich."
    assert llm.turns[1].prompt.startswith(llm.turns[0].prompt + HERMES + "<|im_end|>")


@pytest.mark.parametrize("template", [None, QWEN_LIKE])
def test_a_ten_step_tool_loop_lives_on_the_prefix_cache(scripted_llm: Make, template: str | None) -> None:
    def answer(turn: Any) -> str:
        return f'Step.\n<tool_call>\n{{"name": "add", "arguments": {{"b": {turn.number}, "a": 7}}}}\n</tool_call>'

    llm = scripted_llm(answer, chat_template=template, block_size=16)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Count. " * 400}]
    prompts = []
    for step in range(10):
        *_, last = ChatTurn(llm, messages, TOOLS).stream(PARAMS)
        prompts.append(last.chunk.num_prompt_tokens)
        if step:
            assert last.chunk.num_cached_tokens / last.chunk.num_prompt_tokens >= 0.95
        (call,) = last.message.tool_calls
        function = {"name": call.name, "arguments": call.arguments}
        made = {
            "role": "assistant",
            "content": last.message.text,
            "tool_calls": [{"id": call.id, "function": function}],
        }
        messages += [made, {"role": "tool", "tool_call_id": call.id, "content": str(7 + step)}]
    assert all(later > earlier for earlier, later in pairwise(prompts))


FAMILIES = {
    "qwen": (QWEN_LIKE, HERMES, ("<tool_call>", "</tool_call>")),
    "llama": (LLAMA_LIKE, f'<|python_tag|>{{"name": "get_weather", "parameters": {ZURICH}}}', ("<|python_tag|>",)),
    "llama, bare": (LLAMA_LIKE, f'{{"name": "get_weather", "parameters": {ZURICH}}}', ("<|python_tag|>",)),
    "mistral": (MISTRAL_LIKE, f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ZURICH}}}]', ("[TOOL_CALLS]",)),
    "mistral, named": (MISTRAL_NAMED, f"[TOOL_CALLS]get_weather[ARGS]{ZURICH}", ("[TOOL_CALLS]", "[ARGS]")),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("choice", ["auto", "required", "get_weather"])
def test_every_family_calls_with_and_without_special_tokens(
    scripted_llm: Make, tmp_path: Path, family: str, special: bool, choice: str
) -> None:
    template, says, specials = FAMILIES[family]
    llm = scripted_llm(says, make_model(tmp_path / "model", template, *(specials if special else ())))
    turn = ChatTurn(llm, [{"role": "system", "content": "Brief."}, *ASK], TOOLS, tool_choice=choice)
    message = run(turn)
    assert called(message) == [("get_weather", ZURICH)]
    assert message.finish_reason == "tool_calls"
    assert message.text in ("", "Let me see.")


THOUGHT = "<think>\nHm, <tool_call> or not?\n</think>\n\n"


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("choice", "says"),
    [("auto", THOUGHT + HERMES), ("auto", THOUGHT + "Snow."), ("required", THOUGHT + NOW), ("now", NOW)],
)
@pytest.mark.parametrize("opened", [True, False])
def test_a_model_may_think_before_it_calls(
    scripted_llm: Make, tmp_path: Path, special: bool, choice: str, says: str, opened: bool
) -> None:
    says = says.removeprefix("<think>\n") if opened else says
    if opened and "</think>" not in says:
        says = "Hm.\n</think>\n" + says
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>") if special else ()
    llm = scripted_llm(says, make_model(tmp_path / "model", QWEN_THINKING, *tags))
    switches = {"always_thinking": True} if opened else None
    turn = ChatTurn(llm, ASK, TOOLS, tool_choice=choice, chat_template_kwargs=switches)
    deltas = list(turn.stream(PARAMS))
    message = deltas[-1].message
    if "</think>" in says:
        assert message.reasoning in ("Hm, <tool_call> or not?", "Hm.")
        assert sum(isinstance(event, ReasoningDelta) for delta in deltas for event in delta.events) >= 2
    assert [call.valid for call in message.tool_calls] == ([] if "Snow" in says else [True])
    assert message.text == ("Snow." if "Snow" in says else "Let me see." if HERMES in says else "")


def test_reasoning_can_be_switched_off_and_on(scripted_llm: Make) -> None:
    plain = scripted_llm("<think>Hm</think>Yes.")
    assert run(ChatTurn(plain, ASK)).text == "<think>Hm</think>Yes."
    thinking = run(ChatTurn(plain, ASK, reasoning=True))
    assert (thinking.reasoning, thinking.text) == ("Hm", "Yes.")


def test_the_default_model_calls_a_tool_when_it_must(smollm2: LLM) -> None:
    """With real weights and dice: always a call that fits the schema."""
    params = SamplingParams(max_tokens=64, temperature=0.8, seed=3, n=2)
    turn = ChatTurn(smollm2, [{"role": "user", "content": "What is 2 + 3?"}], TOOLS[1:], tool_choice="required")
    last = {delta.chunk.index: delta.message for delta in turn.stream(params)}
    complete = [message for message in last.values() if message.finish_reason != "length"]
    assert complete
    for message in complete:
        ((name, arguments),) = called(message)
        values = json.loads(arguments)
        assert list(values) == (["b", "a"] if name == "add" else [])
        assert all(isinstance(value, int) for value in values.values())
