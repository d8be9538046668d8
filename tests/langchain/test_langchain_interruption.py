"""Answers that are cut short: by what they say, by name, by the next turn."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_fakes import eventually
from langchain_ways import all_ways, call_text, whole

from langchain_pagedlc import VLLMChat
from pagedlc import InvalidRequestError, served_model
from pagedlc_engine.client import EngineClient
from scripted_model import ScriptedLLM

ScriptedFactory = Callable[..., ScriptedLLM]

SENTENCES = "One is here. Two is here. Three is here. Four is here."
ENDLESS = "and on " * 2000


def check_interrupted(answer: AIMessage, script: str) -> None:
    assert answer.response_metadata["finish_reason"] == "interrupted"
    assert script.startswith(answer.text)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["timings"]["total_time"] > 0


async def all_free(llm: ScriptedLLM) -> None:
    await eventually(lambda: llm.stats().num_running == 0)
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


async def test_stop_when_ends_an_answer_by_its_text(scripted_llm: ScriptedFactory) -> None:
    llm = scripted_llm(SENTENCES)
    chat = VLLMChat(**llm.options)
    for answer in await all_ways(chat, "Hi", stop_when=lambda text: text.count(".") >= 2):
        check_interrupted(answer, SENTENCES)
        assert answer.text.startswith("One is here. Two is here.")
    await all_free(llm)
    assert chat.invoke("Hi").response_metadata["finish_reason"] == "stop"
    always = VLLMChat(**llm.options, stop_when=lambda text: "Two" in text)
    assert always.invoke("Hi").text.startswith("One is here. Two")


async def test_stop_when_sees_the_answer_only(scripted_llm: ScriptedFactory) -> None:
    def now() -> str:
        """The time of day."""
        return ""

    seen: list[str] = []
    script = f"<think>\nThoughts.\n</think>\n\nOne moment.\n{call_text('now')}"
    chat = VLLMChat(**scripted_llm(script).options, reasoning=True).bind_tools([now])
    answer = chat.invoke("Hi", stop_when=lambda text: bool(seen.append(text)))
    assert [call["name"] for call in answer.tool_calls] == ["now"]
    assert seen[-1] == "One moment."
    assert all("One moment.".startswith(text) for text in seen)


async def test_an_error_in_stop_when_is_the_callers(scripted_llm: ScriptedFactory) -> None:
    llm = scripted_llm(ENDLESS)
    with pytest.raises(ZeroDivisionError):
        VLLMChat(**llm.options).invoke("Hi", stop_when=lambda text: 1 // 0)
    await all_free(llm)


async def test_interrupt_by_the_id_of_the_run(scripted_llm: ScriptedFactory) -> None:
    llm = scripted_llm(ENDLESS)
    chat = VLLMChat(**llm.options, max_tokens=1500)
    run_id = uuid.uuid4()
    for model in (chat, RunnableLambda(lambda question: question) | chat):
        task = asyncio.create_task(model.ainvoke("Hi", config={"run_id": run_id}))
        await eventually(lambda: llm.stats().num_running == 1)
        assert chat.interrupt(run_id) == 1
        check_interrupted(await task, ENDLESS)
        await all_free(llm)
        assert chat.interrupt(run_id) == 0


async def test_interrupt_from_another_thread_ends_a_synchronous_answer(scripted_llm: ScriptedFactory) -> None:
    llm = scripted_llm(ENDLESS)
    chat = VLLMChat(**llm.options, max_tokens=1500, conversation_id="c")
    answers: list[AIMessage] = []
    threads = [
        threading.Thread(target=lambda: answers.append(chat.invoke("Hi"))),
        threading.Thread(target=lambda: answers.append(whole(list(chat.stream("Hi"))))),  # type: ignore[arg-type]
    ]
    for thread in threads:
        thread.start()
    await eventually(lambda: llm.stats().num_running == 2)
    assert VLLMChat(**llm.options).interrupt("c") == 2
    for thread in threads:
        await asyncio.to_thread(thread.join)
    for answer in answers:
        check_interrupted(answer, ENDLESS)
    await all_free(llm)


@pytest.mark.parametrize("way", ["invoke", "stream"])
async def test_interrupt_before_the_engine_has_the_request(
    scripted_llm: ScriptedFactory, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    llm = scripted_llm(ENDLESS)
    chat = VLLMChat(**llm.options, max_tokens=1500, conversation_id="c").load()
    submit_all = EngineClient.submit_all

    def interrupted_first(*arguments: Any) -> Any:
        assert chat.interrupt("c") == 1
        return submit_all(*arguments)

    monkeypatch.setattr(EngineClient, "submit_all", interrupted_first)
    answer = chat.invoke("Hi") if way == "invoke" else whole(list(chat.stream("Hi")))  # type: ignore[arg-type]
    assert answer.response_metadata["finish_reason"] == "interrupted"
    assert ENDLESS.startswith(answer.text)
    assert len(answer.text) < len(ENDLESS) // 2
    await all_free(llm)


def test_interrupt_between_two_pieces_of_a_stream(scripted_llm: ScriptedFactory) -> None:
    chat = VLLMChat(**scripted_llm(ENDLESS).options, max_tokens=1500, conversation_id="c")
    chunks: list[AIMessageChunk] = []
    for chunk in chat.stream("Hi"):
        if len(chunks) == 3:
            chat.interrupt("c")
        chunks.append(chunk)  # type: ignore[arg-type]
    answer = whole(chunks)
    check_interrupted(answer, ENDLESS)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] < 200


async def test_what_was_said_stays_in_the_cache(scripted_llm: ScriptedFactory) -> None:
    llm = scripted_llm(["and on " * 400, "Yes?"])
    chat = VLLMChat(**llm.options)
    first = await chat.ainvoke("Go on.", stop_when=lambda text: text.count("on") >= 100)
    second = await chat.ainvoke([HumanMessage("Go on."), first, HumanMessage("Stop!")])
    assert second.text == "Yes?"
    usage = first.usage_metadata
    assert usage is not None
    assert second.usage_metadata is not None
    assert second.usage_metadata["input_token_details"]["cache_read"] >= usage["total_tokens"] - 20


async def test_a_new_turn_barges_in(scripted_llm: ScriptedFactory) -> None:
    llm = scripted_llm({"Tell": ENDLESS, "Stop": "All right."})
    chat = VLLMChat(**llm.options, max_tokens=1500, barge_in=True)
    other = asyncio.create_task(chat.ainvoke("Tell B", conversation_id="b"))
    stream = chat.astream("Tell A", conversation_id="a")
    said = [await anext(stream)]
    second = asyncio.create_task(chat.ainvoke("Stop", conversation_id="a"))
    said += [chunk async for chunk in stream]
    check_interrupted(whole(said), ENDLESS)  # type: ignore[arg-type]
    assert (await second).text == "All right."
    assert not other.done()
    assert chat.interrupt("b") == 1
    check_interrupted(await other, ENDLESS)


async def test_without_barge_in_turns_run_side_by_side(scripted_llm: ScriptedFactory) -> None:
    llm = scripted_llm({"Tell": SENTENCES, "Stop": "All right."})
    chat = VLLMChat(**llm.options, conversation_id="a")
    answers = await asyncio.gather(chat.ainvoke("Tell"), chat.ainvoke("Stop"))
    assert [answer.response_metadata["finish_reason"] for answer in answers] == ["stop", "stop"]


async def test_closing_and_cancelling_free_everything(scripted_llm: ScriptedFactory) -> None:
    llm = scripted_llm(ENDLESS)
    chat = VLLMChat(**llm.options, max_tokens=1500, conversation_id="c")
    stream = chat.stream("Hi")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    await all_free(llm)
    task = asyncio.create_task(chat.ainvoke("Hi"))
    await eventually(lambda: llm.stats().num_running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await all_free(llm)
    assert chat.interrupt("c") == 0


@pytest.fixture
def cache() -> Iterator[InMemoryCache]:
    """LangChain's cache for all models."""
    cache = InMemoryCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(None)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("synchronous", [False, True])
async def test_langchains_cache_gets_no_interrupted_answer(
    scripted_llm: ScriptedFactory, cache: InMemoryCache, streaming: bool, synchronous: bool
) -> None:
    llm = scripted_llm([ENDLESS, SENTENCES])
    chat = VLLMChat(**llm.options, max_tokens=1500, conversation_id="c", streaming=streaming)
    task = asyncio.create_task(asyncio.to_thread(chat.invoke, "Hi") if synchronous else chat.ainvoke("Hi"))  # type: ignore[arg-type]
    await eventually(lambda: llm.stats().num_running == 1)
    assert chat.interrupt("c") == 1
    check_interrupted(await task, ENDLESS)
    for answer in (await chat.ainvoke("Hi"), chat.invoke("Hi")):
        assert answer.text == SENTENCES
    assert len(llm.turns) == 2


async def test_stop_when_counts_whatever_langchains_cache_has(
    scripted_llm: ScriptedFactory, cache: InMemoryCache
) -> None:
    llm = scripted_llm(SENTENCES)
    chat, never = VLLMChat(**llm.options), VLLMChat(**llm.options, stop_when=lambda text: False)
    stops = VLLMChat(**llm.options, stop_when=lambda text: "Two" in text)
    assert never.invoke("Hi").text == chat.invoke("Hi").text == SENTENCES
    assert len(llm.turns) == 2
    check_interrupted(stops.invoke("Hi"), SENTENCES)
    check_interrupted(await stops.ainvoke("Hi"), SENTENCES)
    check_interrupted(chat.invoke("Hi", stop_when=lambda text: "Two" in text), SENTENCES)
    assert stops.invoke("Hi", stop_when=None).text == chat.invoke("Hi").text == SENTENCES
    assert len(llm.turns) == 6


@pytest.mark.usefixtures("cache")
def test_beside_langchains_cache_all_calls_of_a_model_share_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    start = served_model.start_host

    def count(*arguments: Any) -> Any:
        started.append(arguments)
        return start(*arguments)

    monkeypatch.setattr(served_model, "start_host", count)
    chat = VLLMChat(model="smollm2", max_model_len=256, max_tokens=1)
    unpickled = pickle.loads(pickle.dumps(chat))
    del chat
    gc.collect()
    changed = unpickled.model_copy(update={"engine_options": {"max_model_len": 128}})
    for model in (unpickled, changed):
        for question in ("Hi", "Ho"):
            assert model.invoke(question).usage_metadata["output_tokens"] == 1
    assert len(started) == 2


async def test_a_call_that_is_interrupted_is_no_call(scripted_llm: ScriptedFactory) -> None:
    def note(text: str) -> str:
        """Write it down."""
        return text

    chat = VLLMChat(**scripted_llm(call_text("note", text=ENDLESS)).options, max_tokens=1500)
    seen: list[Any] = []
    for chunk in chat.bind_tools([note]).stream("Hi", config={"run_id": (run_id := uuid.uuid4())}):
        seen.append(chunk)
        if len(seen) == 10:
            chat.interrupt(run_id)
    answer = whole(seen)
    assert answer.response_metadata["finish_reason"] == "interrupted"
    assert answer.tool_calls == []
    assert [call["name"] for call in answer.invalid_tool_calls] == ["note"]


def test_options_that_do_not_go_together(scripted_llm: ScriptedFactory) -> None:
    chat = VLLMChat(**scripted_llm("").options)
    with pytest.raises(InvalidRequestError, match="n=2"):
        chat.generate([[HumanMessage("Hi")]], stop_when=lambda text: True, n=2)
    with pytest.raises(InvalidRequestError, match="conversation_id"):
        chat.invoke("Hi", barge_in=True)
    with pytest.raises(InvalidRequestError, match=r"stop_when must be a function .* not 'over'"):
        chat.invoke("Hi", stop_when="over")
    with pytest.raises(InvalidRequestError, match="conversation_id must be a string, not UUID"):
        chat.invoke("Hi", conversation_id=uuid.UUID(int=1))
