"""Answers that end before the model is done: by what they say, by name, by the next turn, by the caller going away."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llamaindex_tools import PERSON_JSON, PROMPT, TOOLS, Person, call

from llama_index.llms.pagedlc import IncompleteOutputError
from pagedlc_engine.errors import InvalidRequestError

#: Longer than any answer here may get.
ENDLESS = "And then he said something. " * 400
QUESTION = [ChatMessage(role="user", content="What did he say?")]
LIMIT = 1900


def wait_until(engine: Any, running: bool) -> None:
    deadline = time.monotonic() + 20
    while bool((stats := engine.stats()).num_running or stats.num_waiting) is not running:
        assert time.monotonic() < deadline, f"that did not happen: {stats}"
        time.sleep(0.01)


wait_until_idle = partial(wait_until, running=False)
wait_until_running = partial(wait_until, running=True)


def text_of(response: Any) -> str:
    return response.text if hasattr(response, "text") else response.message.content


def three_sentences(text: str) -> bool:
    return text.count(".") >= 3


async def test_stop_when_ends_all_eight_ways(scripted: Any) -> None:
    llm, engine = scripted(ENDLESS, max_new_tokens=LIMIT)
    options = {"stop_when": three_sentences}
    responses = [
        llm.chat(QUESTION, **options),
        llm.complete("Hi", **options),
        llm.complete("Hi", formatted=True, **options),
        await llm.achat(QUESTION, **options),
        await llm.acomplete("Hi", **options),
        *list(llm.stream_chat(QUESTION, **options))[-1:],
        *list(llm.stream_complete("Hi", **options))[-1:],
        *[part async for part in await llm.astream_chat(QUESTION, **options)][-1:],
        *[part async for part in await llm.astream_complete("Hi", **options)][-1:],
    ]
    for response in responses:
        assert response.additional_kwargs["finish_reason"] == "interrupted"
        assert three_sentences(text_of(response))
        assert response.additional_kwargs["completion_tokens"] < LIMIT
    await asyncio.to_thread(wait_until_idle, engine)


@pytest.mark.parametrize("name", [{"run_id": "r1"}, {"conversation_id": "c1"}], ids=str)
def test_interrupt_from_another_thread_keeps_the_text(scripted: Any, name: dict[str, str]) -> None:
    llm, engine = scripted(ENDLESS, max_new_tokens=LIMIT)
    interrupted: list[int] = []
    parts = []
    for part in llm.stream_chat(QUESTION, **name):
        parts.append(part)
        if len(parts) == 2:
            thread = threading.Thread(target=lambda: interrupted.append(llm.interrupt(*name.values())))
            thread.start()
    thread.join()
    assert interrupted == [1]
    assert parts[-1].additional_kwargs["finish_reason"] == "interrupted"
    assert parts[-1].message.content == "".join(part.delta for part in parts) != ""
    assert llm.interrupt(*name.values()) == 0
    wait_until_idle(engine)


async def test_interrupt_while_waiting_for_the_whole_answer(scripted: Any) -> None:
    llm, _ = scripted(ENDLESS, max_new_tokens=LIMIT)
    task = asyncio.create_task(llm.achat(QUESTION, run_id="r1"))
    await asyncio.to_thread(wait_until_running, llm.llm)
    assert llm.interrupt("r1") == 1
    response = await task
    assert response.additional_kwargs["finish_reason"] == "interrupted"
    assert ENDLESS.startswith(response.message.content)


async def test_a_new_turn_barges_into_its_conversation_only(scripted: Any) -> None:
    llm, _ = scripted(lambda turn: "Right." if "Stop" in turn.prompt else ENDLESS, max_new_tokens=LIMIT)
    barging = llm.model_copy(update={"conversation_id": "c1", "barge_in": True})
    first = await barging.astream_chat(QUESTION)
    other = await llm.astream_chat(QUESTION, conversation_id="c2")
    heard = [await anext(first), await anext(other)]
    answer = await barging.achat([*QUESTION, ChatMessage(role="user", content="Stop")])
    assert answer.message.content == "Right."
    *_, last = [part async for part in first]
    assert last.additional_kwargs["finish_reason"] == "interrupted"
    assert last.message.content.startswith(heard[0].message.content)
    assert (await anext(other)).additional_kwargs["finish_reason"] is None
    await other.aclose()


def test_a_model_that_barges_in_needs_no_conversation(scripted: Any) -> None:
    llm, _ = scripted("Yes.", barge_in=True)
    assert llm.chat(QUESTION).message.content == "Yes."


def test_without_barge_in_turns_of_a_conversation_run_side_by_side(scripted: Any) -> None:
    llm, _ = scripted(["One two three four five six seven eight nine ten.", "Yes."])
    first = llm.stream_chat(QUESTION, conversation_id="c1")
    next(first)
    assert llm.chat(QUESTION, conversation_id="c1").message.content == "Yes."
    assert list(first)[-1].additional_kwargs["finish_reason"] == "stop"


def test_an_interrupted_answer_stays_in_the_prefix_cache(scripted: Any) -> None:
    llm, _ = scripted([ENDLESS, "Go on."], max_new_tokens=LIMIT)
    partial = llm.chat(QUESTION, stop_when=lambda text: text.count(".") >= 12)
    used = partial.additional_kwargs["total_tokens"]
    history = [*QUESTION, partial.message, ChatMessage(role="user", content="Wait!")]
    assert llm.chat(history).additional_kwargs["cached_tokens"] > used - 32


def test_an_interrupted_call_is_no_call(scripted: Any) -> None:
    llm, _ = scripted(f"Let me look.\n{call('get_weather', city='Llanfairpwllgwyngyll' * 20)}", max_new_tokens=LIMIT)
    for part in llm.stream_chat_with_tools(TOOLS, "Weather?", run_id="r1"):
        if llm.get_tool_calls_from_response(part, error_on_no_tool_call=False):
            llm.interrupt("r1")
    assert part.additional_kwargs["finish_reason"] == "interrupted"
    assert part.message.content == "Let me look."
    assert llm.get_tool_calls_from_response(part, error_on_no_tool_call=False) == []
    assert part.additional_kwargs["invalid_tool_calls"][0]["name"] == "get_weather"


def test_an_interrupted_object_is_an_error_that_says_so(scripted: Any) -> None:
    llm, _ = scripted(PERSON_JSON)
    with pytest.raises(IncompleteOutputError, match="interrupted") as error:
        llm.structured_predict(Person, PROMPT, llm_kwargs={"stop_when": lambda text: "age" in text}, text="x")
    assert error.value.finish_reason == "interrupted"


async def test_going_away_ends_the_generation(scripted: Any) -> None:
    llm, engine = scripted(ENDLESS, max_new_tokens=LIMIT)
    stream = llm.stream_chat_with_tools(TOOLS, "Go")
    next(stream)
    stream.close()
    astream = await llm.astream_chat_with_tools(TOOLS, "Go")
    await anext(astream)
    await astream.aclose()
    task = asyncio.create_task(llm.achat_with_tools(TOOLS, "Go"))
    await asyncio.to_thread(wait_until_running, engine)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until_idle, engine)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"barge_in": True}, "conversation_id"),
        ({"stop_when": three_sentences, "n": 2}, "n=1"),
        ({"stop_when": "three"}, "stop_when must be a function"),
    ],
    ids=["no-conversation", "several", "no-function"],
)
def test_what_does_not_go_together(make: Any, options: dict[str, Any], says: str) -> None:
    llm, fake = make()
    with pytest.raises(InvalidRequestError, match=says):
        llm.chat(QUESTION, **options)
    assert fake.calls == []
