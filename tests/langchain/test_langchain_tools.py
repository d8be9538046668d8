"""Tools: every kind and choice of them, in all four ways of asking, on a model that says what the test wants."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnableSequence
from langchain_core.tools import tool
from langchain_fakes import eventually
from langchain_ways import all_ways, call_text, check_call_chunks, essence, whole
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from langchain_pagedlc import VLLMChat
from pagedlc import InvalidRequestError
from pagedlc.models import resolve_model
from scripted_model import ScriptedLLM

ScriptedFactory = Callable[..., ScriptedLLM]


def weather(city: str) -> str:
    """The weather in a city."""
    return f"Sunny in {city}."


def now() -> str:
    """The time of day."""
    return "12 o'clock"


TOOLS: list[Any] = [weather, now]


def model(scripted_llm: ScriptedFactory, script: Any, **options: Any) -> VLLMChat:
    return VLLMChat(**scripted_llm(script).options, max_tokens=200, temperature=0, **options)


ANSWERS: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("No tool is needed for that.", "No tool is needed for that.", []),
    ("Let me look.\n" + call_text("weather", city="Oslo"), "Let me look.", [("weather", {"city": "Oslo"})]),
    (call_text("now"), "", [("now", {})]),
    (call_text("weather", city="Köln 東京 🌧"), "", [("weather", {"city": "Köln 東京 🌧"})]),
    (
        "\n".join([call_text("weather", city="Oslo"), call_text("now"), call_text("weather", city="Rome")]),
        "",
        [("weather", {"city": "Oslo"}), ("now", {}), ("weather", {"city": "Rome"})],
    ),
]


@pytest.mark.parametrize(("script", "text", "calls"), ANSWERS)
async def test_every_way_of_asking_gives_the_same_calls(
    scripted_llm: ScriptedFactory, script: str, text: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    chat = model(scripted_llm, script).bind_tools(TOOLS, parallel_tool_calls=True)
    first, *others = await all_ways(chat, "Hi")
    assert first.text == text
    assert [(call["name"], call["args"]) for call in first.tool_calls] == calls
    assert first.invalid_tool_calls == []
    assert first.response_metadata["finish_reason"] == ("tool_calls" if calls else "stop")
    assert all(essence(other) == essence(first) for other in others)
    assert all(call["id"] for answer in (first, *others) for call in answer.tool_calls)


@pytest.mark.parametrize(("script", "text", "calls"), ANSWERS)
async def test_id_name_and_index_of_a_call_stream_once_and_arguments_in_pieces(
    scripted_llm: ScriptedFactory, script: str, text: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    chat = model(scripted_llm, script).bind_tools(TOOLS, parallel_tool_calls=True)
    chunks: list[Any] = list(chat.stream("Hi"))
    arguments = check_call_chunks(chunks, [name for name, _ in calls])
    assert arguments == [json.dumps(args, ensure_ascii=False) for _, args in calls]
    if calls == [("weather", {"city": "Oslo"})]:
        assert sum(bool(chunk.tool_call_chunks) for chunk in chunks) > 2
    spoken = [chunk.text for chunk in chunks if chunk.text]
    assert len(spoken) > 1 or not text
    assert [chunk.chunk_position for chunk in chunks] == [None] * (len(chunks) - 1) + ["last"]


def test_a_call_without_arguments_survives_the_sum_of_its_chunks(scripted_llm: ScriptedFactory) -> None:
    chat = model(scripted_llm, call_text("now")).bind_tools(TOOLS)
    (call,) = whole(list(chat.stream("Hi"))).tool_calls  # type: ignore[arg-type]
    assert (call["name"], call["args"]) == ("now", {})


@pytest.mark.parametrize("choice", ["any", "required", True, "weather"])
async def test_a_call_that_is_required_comes_in_every_way(scripted_llm: ScriptedFactory, choice: str | bool) -> None:
    chat = model(scripted_llm, "I would rather talk about myself, if I may.").bind_tools(TOOLS, tool_choice=choice)
    answers = await all_ways(chat, "Hi", max_tokens=60)
    for answer in answers:
        assert answer.text == ""
        assert len(answer.tool_calls) + len(answer.invalid_tool_calls) == 1
    assert len({json.dumps(essence(answer)) for answer in answers}) == 1


async def test_the_named_tool_is_called(scripted_llm: ScriptedFactory) -> None:
    chat = model(scripted_llm, call_text("weather", city="Oslo")).bind_tools(TOOLS, tool_choice="now")
    for answer in await all_ways(chat, "Hi"):
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("now", {})]
        assert answer.response_metadata["finish_reason"] == "tool_calls"


async def test_tool_choice_none_calls_nothing(scripted_llm: ScriptedFactory) -> None:
    chat = model(scripted_llm, "All quiet.").bind_tools(TOOLS, tool_choice="none")
    for answer in await all_ways(chat, "Hi"):
        assert (answer.text, answer.tool_calls) == ("All quiet.", [])


def test_one_call_only_where_parallel_calls_are_switched_off(scripted_llm: ScriptedFactory) -> None:
    script = "\n".join([call_text("weather", city="Oslo"), call_text("now")])
    chat = model(scripted_llm, script)
    assert len(chat.bind_tools(TOOLS, parallel_tool_calls=False).invoke("Hi").tool_calls) == 1
    assert len(chat.bind_tools(TOOLS, parallel_tool_calls=True).invoke("Hi").tool_calls) == 2


def test_a_choice_or_tool_that_does_not_exist_is_an_error(scripted_llm: ScriptedFactory) -> None:
    chat = model(scripted_llm, "")
    with pytest.raises(InvalidRequestError, match=r"no tool 'wether'.*'weather', 'now'"):
        chat.bind_tools(TOOLS, tool_choice="wether")
    with pytest.raises(InvalidRequestError, match="no tools"):
        chat.bind_tools([], tool_choice="any")
    with pytest.raises(InvalidRequestError, match="web_search"):
        chat.bind_tools([{"type": "web_search"}])
    with pytest.raises(InvalidRequestError, match="cannot be read as a tool"):
        chat.bind_tools([{"surprise": 1}])

    class Unwritable(BaseModel):
        """A class that has no JSON schema."""

        work: Callable[[], None]

    endless = {"anyOf": [{"$ref": "#/$defs/B"}], "$defs": {"B": {"anyOf": [{"$ref": "#/$defs/B"}]}}}
    for unreadable in (Unwritable, {"title": "Endless", **endless}):
        with pytest.raises(InvalidRequestError, match="cannot be read as a tool"):
            chat.bind_tools([unreadable])
    for no_list in (None, 5, "now", {"type": "web_search"}):
        with pytest.raises(InvalidRequestError, match="must be a list of tools"):
            chat.bind_tools(no_list)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="Two tools are named 'now'"):
        chat.bind_tools([now, now]).invoke("Hi")


class Search(BaseModel):
    """Look something up."""

    query: str = Field(description="What to look for")


class Route(TypedDict):
    """Find a way."""

    start: str
    end: str


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


RUNNABLE = RunnableSequence(ChatPromptTemplate.from_template("Translate {text}"), RunnableLambda(str), name="translate")


@pytest.mark.parametrize(
    ("given", "name", "arguments"),
    [
        (weather, "weather", {"city": "Oslo"}),
        (Search, "Search", {"query": "x"}),
        (Route, "Route", {"start": "a", "end": "b"}),
        (add, "add", {"a": 1, "b": 2}),
        ({"type": "function", "function": {"name": "bare"}}, "bare", {}),
        ({"title": "Point", "type": "object", "properties": {"x": {"type": "integer"}}}, "Point", {"x": 3}),
        (
            {"name": "pick", "input_schema": {"type": "object", "properties": {"c": {"type": "string"}}}},
            "pick",
            {"c": "r"},
        ),
        (RUNNABLE, "translate", {"text": "Guten Tag"}),
    ],
)
@pytest.mark.filterwarnings("ignore:This API is in beta")
def test_tools_of_every_kind(scripted_llm: ScriptedFactory, given: Any, name: str, arguments: dict[str, Any]) -> None:
    llm = scripted_llm(call_text(name, **arguments))
    chat = VLLMChat(**llm.options)
    for strict in (None, True):
        (call,) = chat.bind_tools([given, now], strict=strict).invoke("Hi").tool_calls
        assert (call["name"], call["args"]) == (name, arguments)
        assert f'"name": "{name}"' in llm.turns[-1].prompt


@pytest.mark.parametrize(
    "arguments",
    [{"city": 'She said: "Oslo"\\ \n'}, {"p": [["a"], {"c": [1]}]}, {}],
)
async def test_a_call_that_is_cut_off_is_no_call(scripted_llm: ScriptedFactory, arguments: dict[str, Any]) -> None:
    schema = {"title": "go", "type": "object", "additionalProperties": True, "properties": {}}
    llm = scripted_llm(call_text("go", **arguments))
    length = len(llm.tokenizer.encode(call_text("go", **arguments), add_special_tokens=False))
    chat = VLLMChat(**llm.options).bind_tools([schema])
    seen = set()
    for max_tokens in range(length - 15, length + 2):
        answers = [chat.invoke("Hi", max_tokens=max_tokens), whole(list(chat.stream("Hi", max_tokens=max_tokens)))]  # type: ignore[arg-type]
        assert essence(answers[0]) == essence(answers[1])
        answer = answers[0]
        assert answer.response_metadata["finish_reason"] in ("length", "tool_calls")
        assert len(answer.tool_calls) + len(answer.invalid_tool_calls) <= 1
        for call in answer.tool_calls:
            assert call["args"] == arguments
            seen.add("whole")
        for invalid in answer.invalid_tool_calls:
            assert invalid["args"] is not None
            assert invalid["args"] in call_text("go", **arguments)
            assert "raise max_tokens" in (invalid["error"] or "")
            seen.add("cut off")
    assert seen == {"whole", "cut off"}


def test_a_call_that_is_cut_off_before_its_name_leaves_no_markup_in_the_text(scripted_llm: ScriptedFactory) -> None:
    script = f"Let me see. {call_text('weather', city='Oslo')}"
    llm = scripted_llm(script)
    chat = VLLMChat(**llm.options).bind_tools(TOOLS)
    encode = llm.tokenizer.encode
    start = len(encode(script[: script.index("tool_call>") + 4], add_special_tokens=False))
    end = len(encode(script[: script.index("weather")], add_special_tokens=False))
    for max_tokens in range(start, end + 1):
        answers = [chat.invoke("Hi", max_tokens=max_tokens), whole(list(chat.stream("Hi", max_tokens=max_tokens)))]  # type: ignore[arg-type]
        for answer in answers:
            assert answer.text == "Let me see."
            assert answer.tool_calls == []
            (invalid,) = answer.invalid_tool_calls
            assert invalid["name"] == ""
        assert "raise max_tokens" in (answers[0].invalid_tool_calls[0]["error"] or "")


def history(*results: ToolMessage) -> list[BaseMessage]:
    calls = [{"name": "weather", "args": {"city": "Köln"}, "id": result.tool_call_id} for result in results]
    return [HumanMessage("How is the weather?"), AIMessage("", tool_calls=calls), *results]


def test_results_of_tools_reach_the_model(scripted_llm: ScriptedFactory) -> None:
    llm = scripted_llm("Thank you.")
    chat = VLLMChat(**llm.options).bind_tools(TOOLS)
    parts: list[str | dict[Any, Any]] = [{"type": "text", "text": "rain"}, {"type": "text", "text": "and wind"}]
    answer = chat.invoke(
        history(
            ToolMessage("sunny", tool_call_id="1", name="weather"),
            ToolMessage(parts, tool_call_id="2"),
            ToolMessage("no such city", tool_call_id="3", status="error"),
        )
    )
    assert answer.text == "Thank you."
    prompt = llm.turns[-1].prompt
    assert '{"name": "weather", "arguments": {"city": "Köln"}}' in prompt
    for result in ("sunny", "rain\nand wind", "Error: no such city"):
        assert f"<tool_response>\n{result}\n</tool_response>" in prompt


def test_the_answer_itself_is_a_history(scripted_llm: ScriptedFactory) -> None:
    llm = scripted_llm(["Just a moment.\n" + call_text("weather", city="Köln"), "It is sunny."])
    chat = VLLMChat(**llm.options).bind_tools(TOOLS)
    first = chat.invoke("How is it?")
    second = chat.invoke(["How is it?", first, ToolMessage("sunny", tool_call_id=first.tool_calls[0]["id"])])
    assert second.text == "It is sunny."
    said = "Just a moment.\n" + call_text("weather", city="Köln")
    assert said in llm.turns[-1].prompt
    assert llm.turns[-1].prompt.startswith(llm.turns[0].prompt + said)


async def test_asynchronous_answers_need_no_thread_each(scripted_llm: ScriptedFactory) -> None:
    llm = scripted_llm("word " * 400)
    chat: Runnable[Any, Any] = VLLMChat(**llm.options, max_tokens=400).bind_tools(TOOLS)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))

    async def answer(streaming: bool) -> None:
        if not streaming:
            await chat.ainvoke("Hi")
            return
        async for _ in chat.astream("Hi"):
            pass

    tasks = [asyncio.create_task(answer(number % 2 == 0)) for number in range(12)]
    await eventually(lambda: llm.stats().num_running == 12)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await eventually(lambda: llm.stats().num_running == 0)


TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
}


def test_memory_is_free_when_the_model_object_is_gone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    tokenizer = resolve_model("smollm2").path
    chat = VLLMChat(model=tmp_path, tokenizer=tokenizer, load_format="dummy", num_blocks=64, max_tokens=4)
    bound = chat.bind_tools(TOOLS)
    stream = bound.stream("Hi")
    next(stream)
    engine = weakref.ref(chat.llm)
    chat.with_structured_output(Search)
    del chat, bound, stream
    gc.collect()
    assert engine() is None


def test_the_profile_promises_what_the_model_does(scripted_llm: ScriptedFactory) -> None:
    profile = model(scripted_llm, "").profile
    assert profile is not None
    assert profile["tool_calling"]
    assert profile["tool_choice"]
    assert profile["structured_output"]
