"""The chat template decides the format, and conversations with calls and results render in every one of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tool_samples import (
    LLAMA_LIKE,
    MISTRAL_LIKE,
    MISTRAL_NAMED,
    NOW,
    QWEN_LIKE,
    QWEN_THINKING,
    TOOLS,
    WEATHER,
)

from pagedlc import LLM
from pagedlc.tools import ChatTurn, choose_format
from pagedlc_engine.errors import InvalidRequestError

TEMPLATES = {"qwen": QWEN_LIKE, "llama": LLAMA_LIKE, "mistral": MISTRAL_LIKE, "smollm2": None}
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "Weather in Zürich and Paris?"}


def call(call_id: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [
        call("call_1", "get_weather", '{"city": "Zürich"}'),
        call("call_2", "get_weather", {"city": "Paris"}),
    ],
}
PARTS = [{"type": "text", "text": "Snow"}, {"type": "text", "text": "-2°"}]
RESULTS: list[dict[str, Any]] = [
    {"role": "tool", "tool_call_id": "call_1", "content": PARTS},
    {"role": "tool", "tool_call_id": "call_2", "content": "no such city", "status": "error"},
]
HISTORY = [SYSTEM, ASK, CALLS, *RESULTS]


def prompt(template: str | None, messages: list[dict[str, Any]], tools: Any = TOOLS, **options: Any) -> str:
    llm = LLM("smollm2", chat_template=template)
    return llm.tokenizer.decode(ChatTurn(llm, messages, tools, **options).prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (QWEN_LIKE, "hermes"),
        (QWEN_THINKING, "hermes"),
        (LLAMA_LIKE, "llama3_json"),
        ("{{ tools }} <|python_tag|>", "llama3_json"),
        (MISTRAL_LIKE, "mistral"),
        (MISTRAL_NAMED, "mistral"),
        ("{{ messages[0].content }}", "generic"),
        ("{{ tools }} {{ '<tool_call><function=' }}", "generic"),
    ],
)
def test_the_template_decides_the_format(template: str, name: str) -> None:
    assert choose_format(template).name == name


def test_the_default_model_takes_the_generic_format() -> None:
    assert ChatTurn(LLM("smollm2"), [ASK], TOOLS).format.name == "generic"


def test_a_format_can_be_named() -> None:
    assert choose_format(QWEN_LIKE, "generic").name == "generic"
    with pytest.raises(InvalidRequestError, match="'xml'; choose one of generic, hermes, llama3_json, mistral"):
        choose_format(QWEN_LIKE, "xml")


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tools", [TOOLS, None])
def test_a_history_with_parallel_calls_and_results_renders(template: str, tools: Any) -> None:
    text = prompt(TEMPLATES[template], HISTORY, tools)
    for part in ["Zürich", "Paris", "Snow", "-2°", "Error: no such city"]:
        assert part in text
    assert "\\u" not in text
    assert text.index("Zürich") < text.rindex("Snow") < text.rindex("Error: no such city")


@pytest.mark.parametrize("template", TEMPLATES)
def test_all_tools_are_in_the_prompt_whatever_the_choice(template: str) -> None:
    texts = [prompt(TEMPLATES[template], [ASK], tool_choice=choice) for choice in ("auto", "none", "any", "now")]
    assert len(set(texts)) == 1
    for name in ("get_weather", "add", "now", "Add two numbers.", "city"):
        assert name in texts[0]


@pytest.mark.parametrize("template", ["qwen", "smollm2"])
def test_an_agents_next_prompt_begins_with_the_last_one_and_the_calls_it_made(template: str) -> None:
    """So that the whole of it is found in the prefix cache."""
    before = prompt(TEMPLATES[template], [SYSTEM, ASK])
    made = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    calls = {**CALLS, "tool_calls": CALLS["tool_calls"][:1]}  # type: ignore[index]
    after = prompt(TEMPLATES[template], [SYSTEM, ASK, calls, RESULTS[0]])
    assert after.startswith(before + "I look.\n" + made + "<|im_end|>\n")


def test_the_generic_format_describes_tools_after_the_system_prompt() -> None:
    assert prompt(None, [SYSTEM, ASK], [NOW]) == (
        "<|im_start|>system\nBe brief.\n\n"
        "You can call these tools:\n"
        '{"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}\n'
        "To call a tool, write:\n"
        '<tool_call>\n{"name": "the tool\'s name", "arguments": {...}}\n</tool_call>\n'
        "The result comes back between <tool_response> and </tool_response>. Use it to answer.<|im_end|>\n"
        "<|im_start|>user\nWeather in Zürich and Paris?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_generic_format_adds_a_system_prompt_where_there_is_none() -> None:
    assert prompt(None, [ASK], [NOW]).startswith("<|im_start|>system\nYou are a helpful assistant.\n\nYou can call")


def test_the_generic_format_writes_calls_and_results_as_text() -> None:
    text = prompt(None, [*HISTORY, {"role": "user", "content": "And Rome?"}], [WEATHER])
    assert text.split("<|im_start|>")[3:] == [
        "assistant\nI look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n',
        "user\n<tool_response>\nSnow\n-2°\n</tool_response>\n"
        "<tool_response>\nError: no such city\n</tool_response>\nAnd Rome?<|im_end|>\n",
        "assistant\n",
    ]


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def test_the_generic_format_suits_templates_without_a_system_role() -> None:
    text = prompt(STRICT, [ASK, CALLS, *RESULTS, {"role": "assistant", "content": "Cold."}, ASK])
    assert text.startswith("[user]You can call these tools:\n")
    assert "\n\nWeather in Zürich and Paris?[assistant]I look." in text


def test_llama_gets_one_call_per_message_each_with_its_result() -> None:
    text = prompt(LLAMA_LIKE, HISTORY)
    turns = [turn.split("<|end_header_id|>\n\n") for turn in text.split("<|start_header_id|>")[3:]]
    assert [(role, body.removesuffix("<|eot_id|>")) for role, body in turns] == [
        ("assistant", '{"name": "get_weather", "parameters": {"city": "Zürich"}}'),
        ("ipython", '"Snow\\n-2°"'),
        ("assistant", '{"name": "get_weather", "parameters": {"city": "Paris"}}'),
        ("ipython", '"Error: no such city"'),
        ("assistant", ""),
    ]


def test_mistral_gets_ids_it_accepts_and_results_find_their_calls() -> None:
    text = prompt(MISTRAL_LIKE, HISTORY)
    made = json.loads(text[text.index("[TOOL_CALLS]") + len("[TOOL_CALLS]") : text.index("}]") + 2])
    assert all(len(each["id"]) == 9 and each["id"].isalnum() for each in made)
    assert text.index(f'"call_id": "{made[0]["id"]}"') < text.index(f'"call_id": "{made[1]["id"]}"')
    assert text == prompt(MISTRAL_LIKE, HISTORY)


def test_results_know_the_name_of_their_tool() -> None:
    template = "{% for m in messages %}{{ m.role }}({{ m.name }}){% endfor %}"
    named = [{"role": "user", "name": "Ann", "content": "Hi"}, CALLS, *RESULTS]
    text = prompt(template, named, None, tool_call_format="hermes")
    assert text == "user(Ann)assistant()tool(get_weather)tool(get_weather)"


def test_an_error_that_says_so_is_not_marked_twice() -> None:
    failed = {**RESULTS[1], "content": "Error: gone"}
    assert "Error: Error" not in prompt(None, [ASK, CALLS, failed])


def test_template_switches_reach_the_template() -> None:
    text = prompt(QWEN_THINKING, [ASK], chat_template_kwargs={"enable_thinking": False})
    assert text.endswith("<think>\n\n</think>\n\n")
