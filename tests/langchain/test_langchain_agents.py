"""Agents: LangChain's own, with tools, streaming, memory and a response format, on a scripted model."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import ToolException, tool
from langchain_ways import call_text, check_call_chunks
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel

from langchain_pagedlc import VLLMChat
from scripted_model import ScriptedLLM, Turn

ScriptedFactory = Callable[..., ScriptedLLM]


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    if city == "Atlantis":
        raise ToolException("There is no Atlantis.")
    return f"It is sunny in {city}."


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def by_progress(*answers: str) -> Callable[[Turn], str]:
    """The n-th answer comes after n results of tools."""
    return lambda turn: answers[turn.prompt.count("<tool_response>\n")]


ANSWERS = ("Let me look.\n" + call_text("weather", city="Köln"), call_text("add", a=2, b=3), "Sunny, and 5.")
QUESTION = {"messages": [HumanMessage("How is the weather in Köln, and what is 2 + 3?")]}


@pytest.fixture
def agent(scripted_llm: ScriptedFactory) -> Any:
    return create_agent(VLLMChat(**scripted_llm(by_progress(*ANSWERS)).options, max_tokens=100), [weather, add])


def check_messages(messages: list[Any]) -> None:
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert messages[1].text == "Let me look."
    assert messages[2].content == "It is sunny in Köln."
    assert messages[4].content == "5"
    assert messages[5].text == "Sunny, and 5."


async def test_an_agent_with_two_tools(agent: Any) -> None:
    check_messages(agent.invoke(QUESTION)["messages"])
    check_messages((await agent.ainvoke(QUESTION))["messages"])


async def test_an_agent_streams_text_and_calls(agent: Any) -> None:
    streams = [
        list(agent.stream(QUESTION, stream_mode="messages")),
        [item async for item in agent.astream(QUESTION, stream_mode="messages")],
    ]
    for stream in streams:
        messages = [message for message, _ in stream]
        pieces = [message.text for message in messages if isinstance(message, AIMessageChunk) and message.text]
        assert len(pieces) > 5
        assert "".join(pieces) == "Let me look.Sunny, and 5."
        runs: dict[str, list[AIMessageChunk]] = {}
        for message in messages:
            if isinstance(message, AIMessageChunk):
                runs.setdefault(str(message.id), []).append(message)
        expected = (["weather"], ["add"], [])
        called = [check_call_chunks(run, names) for run, names in zip(runs.values(), expected, strict=True)]
        assert called == [['{"city": "Köln"}'], ['{"a": 2, "b": 3}'], []]
        results = [message.content for message in messages if isinstance(message, ToolMessage)]
        assert results == ["It is sunny in Köln.", "5"]
    *_, last = agent.stream(QUESTION, stream_mode="values")
    check_messages(last["messages"])


async def test_events_of_an_agent_come_in_order(agent: Any) -> None:
    events = [event async for event in agent.astream_events(QUESTION, version="v2")]
    of_model = [event for event in events if event["event"].startswith(("on_chat_model", "on_tool"))]
    kinds = [event["event"] for event in of_model]
    compact = [kind for position, kind in enumerate(kinds) if not position or kinds[position - 1] != kind]
    model = ["on_chat_model_start", "on_chat_model_stream", "on_chat_model_end"]
    a_tool = ["on_tool_start", "on_tool_end"]
    assert compact == [*model, *a_tool, *model, *a_tool, *model]
    metadata = of_model[0]["metadata"]
    expected = {"ls_provider": "pagedlc", "ls_model_type": "chat", "ls_model_name": "smollm2", "ls_max_tokens": 100}
    assert {name: metadata[name] for name in expected} == expected


def test_the_checkpointer_keeps_the_conversation_and_the_cache_its_prefix(scripted_llm: ScriptedFactory) -> None:
    llm = scripted_llm(["Nice to meet you, Ada.", "You are Ada.", "I do not know."])
    agent: Any = create_agent(VLLMChat(**llm.options), [weather, add], checkpointer=InMemorySaver())
    first = {"configurable": {"thread_id": "1"}}
    agent.invoke({"messages": [HumanMessage("I am Ada.")]}, first)
    second_turn = agent.invoke({"messages": [HumanMessage("Who am I?")]}, first)["messages"]
    assert [message.text for message in second_turn][1::2] == ["Nice to meet you, Ada.", "You are Ada."]
    assert llm.turns[1].prompt.startswith(llm.turns[0].prompt + "Nice to meet you, Ada.")
    usage = second_turn[-1].usage_metadata
    before = second_turn[1].usage_metadata
    assert usage["input_token_details"]["cache_read"] >= before["total_tokens"] // 16 * 16 - 16
    other = agent.invoke({"messages": [HumanMessage("Who am I?")]}, {"configurable": {"thread_id": "2"}})["messages"]
    assert len(other) == 2
    assert "Ada" not in llm.turns[2].prompt


def test_an_error_of_a_tool_reaches_the_model(scripted_llm: ScriptedFactory) -> None:
    llm = scripted_llm(by_progress(call_text("weather", city="Atlantis"), "I could not find it."))
    forgiving = weather.model_copy(update={"handle_tool_error": True})
    agent: Any = create_agent(VLLMChat(**llm.options), [forgiving])
    *_, result, last = agent.invoke(QUESTION)["messages"]
    assert result.status == "error"
    assert last.text == "I could not find it."
    assert "Error: There is no Atlantis." in llm.turns[-1].prompt


class Report(BaseModel):
    """A report."""

    city: str
    total: int


REPORT = '{"city": "Köln", "total": 5}'


@pytest.mark.parametrize("strategy", ["provider", "tool"])
@pytest.mark.parametrize("streaming", [False, True])
def test_an_agent_with_a_response_format(scripted_llm: ScriptedFactory, strategy: str, streaming: bool) -> None:
    last = REPORT if strategy == "provider" else call_text("Report", city="Köln", total=5)
    llm = scripted_llm(by_progress(*ANSWERS[:2], last))
    wanted: Any = Report if strategy == "provider" else ToolStrategy(Report)
    agent: Any = create_agent(VLLMChat(**llm.options, temperature=0), [weather, add], response_format=wanted)
    if streaming:
        *_, (_, state) = agent.stream(QUESTION, stream_mode=["messages", "values"])
    else:
        state = agent.invoke(QUESTION)
    assert state["structured_response"] == Report(city="Köln", total=5)
    assert [m.content for m in state["messages"] if m.type == "tool"][:2] == ["It is sunny in Köln.", "5"]


SYSTEM = "You are a careful assistant who takes one step after the other. " * 40


def count(number: int) -> str:
    """Count on from a number."""
    return f"After {number} comes {number + 1}."


def step(turn: Turn) -> str:
    done = turn.prompt.count("<tool_response>\nAfter")
    return f"Step {done}.\n{call_text('count', number=done)}" if done < 10 else "Ten steps are done."


@pytest.mark.parametrize("streaming", [False, True])
def test_ten_steps_of_an_agent_come_from_the_cache(scripted_llm: ScriptedFactory, streaming: bool) -> None:
    llm = scripted_llm(step)
    agent: Any = create_agent(VLLMChat(**llm.options), [count], system_prompt=SYSTEM)
    question = {"messages": [HumanMessage("Count from 0 to 10.")]}
    if streaming:
        *_, (_, state) = agent.stream(question, {"recursion_limit": 50}, stream_mode=["messages", "values"])
    else:
        state = agent.invoke(question, {"recursion_limit": 50})
    steps = [message.usage_metadata for message in state["messages"] if message.type == "ai"]
    assert len(steps) == 11
    prompt = sum(usage["input_tokens"] for usage in steps[1:10])
    cached = sum(usage["input_token_details"]["cache_read"] for usage in steps[1:10])
    assert cached >= 0.95 * prompt
    for before, after in pairwise(steps):
        # All but the part of the last block, and what the result of the tool adds.
        assert after["input_token_details"]["cache_read"] >= before["total_tokens"] - 32


def test_explain_prefix_says_where_the_prompt_differs(scripted_llm: ScriptedFactory) -> None:
    chat = VLLMChat(**scripted_llm("Hello.").options)
    story = "The story goes on and on. " * 20

    def conversation(day: str) -> list[Any]:
        return [SystemMessage(f"Today is {day}. {story}"), HumanMessage("Hi")]

    chat.bind_tools([count]).invoke(conversation("Monday"))
    hit = chat.explain_prefix(conversation("Monday"), tools=[count])
    assert hit.num_cached_tokens >= hit.num_tokens - 16
    miss = chat.explain_prefix(conversation("Friday"), tools=[count])
    assert miss.num_cached_tokens < hit.num_cached_tokens // 2
    assert miss.earlier_text is not None
    assert miss.this_text is not None
    assert "Monday" in miss.earlier_text
    assert "Friday" in miss.this_text
    assert re.search(r"Token \d+ differs", miss.reason)
    assert chat.explain_prefix("Hi").num_cached_tokens < 32
