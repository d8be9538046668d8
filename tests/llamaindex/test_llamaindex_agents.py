"""LlamaIndex's agents: tool loops, streaming events, handing over, the prefix cache (scripted model)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from llama_index.core import Document, SummaryIndex
from llama_index.core.agent.workflow import (
    AgentOutput,
    AgentStream,
    AgentWorkflow,
    FunctionAgent,
    ReActAgent,
    ToolCallResult,
)
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.workflow import Context
from llamaindex_tools import PERSON, PERSON_JSON, THINKING_TEMPLATE, TOOLS, Person, add, call, get_weather, now

QUESTION = "What is the weather in Zürich, and what is 2 and 3?"
TWO_STEPS = [
    f"Let me look.\n{call('get_weather', city='Zürich')}",
    call("add", a=2, b=3),
    "It snows, and the sum is five.",
]


async def run(agent: Any, question: str = QUESTION, **options: Any) -> tuple[str, list[Any]]:
    """The answer and all events."""
    handler = agent.run(question, **options)
    events = [event async for event in handler.stream_events()]
    return str(await handler), events


def results(events: list[Any]) -> list[tuple[str, dict[str, Any], Any]]:
    return [
        (event.tool_name, event.tool_kwargs, event.tool_output.raw_output)
        for event in events
        if isinstance(event, ToolCallResult)
    ]


@pytest.mark.parametrize("streaming", [True, False])
async def test_function_agent(scripted: Any, streaming: bool) -> None:
    llm, engine = scripted(TWO_STEPS)
    agent = FunctionAgent(tools=[get_weather, add], llm=llm, streaming=streaming, system_prompt="Use the tools.")
    answer, events = await run(agent)
    assert answer == TWO_STEPS[-1]
    assert results(events) == [
        ("get_weather", {"city": "Zürich"}, "Snow in Zürich."),
        ("add", {"a": 2, "b": 3}, 5),
    ]
    streamed = [event.delta for event in events if isinstance(event, AgentStream)]
    assert "".join(streamed) == (f"Let me look.{TWO_STEPS[-1]}" if streaming else "")
    assert not streaming or len(streamed) > 3
    outputs = [event for event in events if isinstance(event, AgentOutput)]
    assert [len(output.tool_calls) for output in outputs[:2]] == [1, 1]
    assert outputs[0].raw["choices"][0]["finish_reason"] == "tool_calls"
    assert "Snow in Zürich." in engine.turns[-1].prompt


async def test_parallel_calls_and_a_tool_without_arguments(scripted: Any) -> None:
    llm, engine = scripted([f"{call('now')}\n{call('get_weather', city='Oslo')}", "Half past twelve, and snow."])
    _, events = await run(FunctionAgent(tools=[get_weather, now], llm=llm))
    assert sorted(results(events)) == [("get_weather", {"city": "Oslo"}, "Snow in Oslo."), ("now", {}, "12:30")]
    ids = [event.tool_id for event in events if isinstance(event, ToolCallResult)]
    assert len(set(ids)) == 2
    assert "12:30" in engine.turns[1].prompt


async def test_the_first_tool_can_be_demanded(scripted: Any) -> None:
    llm, _ = scripted(["I would say it rains.", "It snows."])
    agent = FunctionAgent(tools=[get_weather, add], llm=llm, initial_tool_choice="get_weather")
    answer, events = await run(agent)
    assert answer == "It snows."
    assert [name for name, _, _ in results(events)] == ["get_weather"]


async def test_a_tool_that_fails_is_told_to_the_model(scripted: Any) -> None:
    def fails(x: int) -> int:
        """Fail."""
        raise RuntimeError(f"no {x} today")

    llm, engine = scripted([call("fails", x=7), "Sorry."])
    answer, _ = await run(FunctionAgent(tools=[fails, add], llm=llm))
    assert answer == "Sorry."
    assert "no 7 today" in engine.turns[1].prompt


async def test_thoughts_stream_beside_the_answer(scripted: Any) -> None:
    says = [f"I need the time.\n</think>\n\n{call('now')}", "Clear.\n</think>\n\nHalf past twelve."]
    llm, _ = scripted(says, chat_template=THINKING_TEMPLATE)
    answer, events = await run(FunctionAgent(tools=[now, add], llm=llm))
    assert answer == "Half past twelve."
    thoughts = [event.thinking_delta for event in events if isinstance(event, AgentStream) and event.thinking_delta]
    assert "".join(thoughts) == "I need the time.Clear."


async def test_a_call_cut_off_by_max_new_tokens_is_not_carried_out(scripted: Any) -> None:
    llm, _ = scripted(call("get_weather", city="Zürich" * 30), max_new_tokens=40)
    with pytest.raises(Exception, match=r"call of get_weather was cut off after 40 tokens; raise max_new_tokens"):
        await FunctionAgent(tools=[get_weather, add], llm=llm).run(QUESTION)


async def test_an_agent_s_answer_as_an_object(scripted: Any) -> None:
    llm, _ = scripted([call("now"), "She is Zoë.", PERSON_JSON])
    result = await FunctionAgent(tools=[now, add], llm=llm, output_cls=Person).run("Who?")
    assert result.get_pydantic_model(Person) == PERSON


# -- workflows --


async def test_agent_workflow_takes_the_function_agent(scripted: Any) -> None:
    llm, _ = scripted(TWO_STEPS)
    workflow = AgentWorkflow.from_tools_or_functions([get_weather, add], llm=llm)
    assert isinstance(next(iter(workflow.agents.values())), FunctionAgent)
    answer, events = await run(workflow)
    assert answer == TWO_STEPS[-1]
    assert len(results(events)) == 2
    assert any(event.delta for event in events if isinstance(event, AgentStream))


async def test_agents_hand_over(scripted: Any) -> None:
    llm, _ = scripted([call("handoff", to_agent="adder", reason="sums"), call("add", a=2, b=3), "Five."])
    greeter = FunctionAgent(name="greeter", description="Greets", tools=[now], llm=llm, can_handoff_to=["adder"])
    adder = FunctionAgent(name="adder", description="Adds", tools=[add], llm=llm)
    answer, events = await run(AgentWorkflow(agents=[greeter, adder], root_agent="greeter"))
    assert answer == "Five."
    assert [event.current_agent_name for event in events if isinstance(event, AgentOutput)] == [
        "greeter",
        "adder",
        "adder",
    ]


async def test_an_agent_that_calls_by_text_works_as_well(scripted: Any) -> None:
    llm, _ = scripted(
        ['Thought: I add.\nAction: add\nAction Input: {"a": 2, "b": 3}', "Thought: I can answer.\nAnswer: Five."],
        is_function_calling_model=False,
    )
    workflow = AgentWorkflow.from_tools_or_functions([get_weather, add], llm=llm)
    assert isinstance(next(iter(workflow.agents.values())), ReActAgent)
    answer, events = await run(workflow)
    assert answer == "Five."
    assert results(events) == [("add", {"a": 2, "b": 3}, 5)]


# -- the prefix cache --

LONG_PROMPT = "You are the keeper of the Moorby lighthouse, and you add numbers for the ships that pass by. " * 90


async def test_ten_steps_come_from_the_prefix_cache(scripted: Any) -> None:
    llm, _ = scripted(lambda turn: call("add", a=turn.number, b=1) if turn.number < 9 else "Nine.")
    agent = FunctionAgent(tools=[get_weather, add], llm=llm, system_prompt=LONG_PROMPT)
    answer, events = await run(agent, "Count to nine.")
    usages = [event.raw["usage"] for event in events if isinstance(event, AgentOutput)]
    assert (answer, len(usages)) == ("Nine.", 10)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages[1:])
    assert cached >= 0.95 * sum(usage["prompt_tokens"] for usage in usages[1:])
    # All but the new text: a tool's result, the beginning of the answer, and what does not fill a block.
    for before, after in pairwise(usages):
        assert after["prompt_tokens_details"]["cached_tokens"] > before["total_tokens"] - 32


async def test_the_next_question_of_a_session_hits_on_all_that_was(scripted: Any) -> None:
    llm, engine = scripted([*TWO_STEPS, "You are welcome."])
    agent = FunctionAgent(tools=[get_weather, add], llm=llm, system_prompt=LONG_PROMPT)
    context, memory = Context(agent), ChatMemoryBuffer.from_defaults(token_limit=10_000)
    await agent.run(QUESTION, ctx=context, memory=memory)
    before = len(engine.turns[-1].prompt_token_ids)
    _, events = await run(agent, "Thank you.", ctx=context, memory=memory)
    (output,) = [event for event in events if isinstance(event, AgentOutput)]
    assert output.raw["usage"]["prompt_tokens_details"]["cached_tokens"] > before - 32


def test_explain_prefix_says_what_differs(scripted: Any) -> None:
    llm, _ = scripted("Yes.")
    today = f"{LONG_PROMPT} Today is Monday. {LONG_PROMPT}"
    llm.chat_with_tools(TOOLS, today)
    same = llm.explain_prefix(**llm_call(llm, today))
    assert same.num_cached_tokens > same.num_tokens - 32
    other = llm.explain_prefix(**llm_call(llm, today.replace("Monday", "Friday")))
    assert "Monday" in str(other.earlier_text)
    assert "Friday" in str(other.this_text)
    llm.complete("Hello " * 40, formatted=True)
    assert llm.explain_prefix("Hello " * 40, formatted=True).num_cached_tokens > 16


def llm_call(llm: Any, question: str) -> dict[str, Any]:
    arguments = llm._prepare_chat_with_tools(TOOLS, question)
    return {"prompt": arguments.pop("messages"), **arguments}


# -- documents --


def test_query_engine_with_a_structured_llm(scripted: Any) -> None:
    llm, _ = scripted(PERSON_JSON)
    index = SummaryIndex.from_documents([Document(text="Zoë Müller, 42, lives in Zürich.")])
    response = index.as_query_engine(llm=llm.as_structured_llm(Person)).query("Who lives in Zürich?")
    assert response.response == PERSON
