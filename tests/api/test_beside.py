"""What an event loop is spared is done in a few threads beside it, whatever the loop's executor is busy with."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from langchain_pagedlc import VLLMChat
from llama_index.llms.pagedlc import Vllm
from pagedlc import LLM, SamplingParams
from pagedlc.beside import MAX_THREADS, Beside

HI = [{"role": "user", "content": "hi"}]
TWO = SamplingParams(max_tokens=2)
OPTIONS: dict[str, Any] = {"model": "smollm2", "max_model_len": 512}


def test_result_error_and_context_come_back() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")

    def fail() -> None:
        raise LookupError("nothing there")

    async def main() -> None:
        beside = Beside()
        name.set("of the caller")
        assert await beside.run(name.get) == "of the caller"
        assert await beside.run(threading.current_thread) is not threading.current_thread()
        with pytest.raises(LookupError, match="nothing there"):
            await beside.run(fail)

    asyncio.run(main())


def test_what_ends_an_iteration_ends_no_wait() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(Beside().run(lambda: next(iter(()))))


def test_a_failed_call_holds_nothing_back() -> None:
    class Held:
        def fail(self) -> None:
            raise LookupError

    async def fail() -> weakref.ref[Held]:
        held, beside = Held(), Beside()
        with pytest.raises(LookupError):
            await beside.run(held.fail)
        return weakref.ref(held)

    gc.disable()
    try:
        held = asyncio.run(fail())
        for thread in threading.enumerate():  # it may have a moment to go
            if thread.name == "pagedlc-beside":
                thread.join(20)
        assert held() is None
    finally:
        gc.enable()


def test_a_cancelled_task_does_not_wait_for_its_thread() -> None:
    release = threading.Event()

    async def main() -> None:
        beside = Beside()
        task = asyncio.create_task(beside.run(lambda: release.wait(20)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not release.is_set()

    asyncio.run(main())
    release.set()


def test_many_calls_share_a_few_threads_and_cancelled_ones_are_left_out() -> None:
    release = threading.Event()
    started: list[int] = []

    def work(number: int) -> tuple[int, threading.Thread]:
        started.append(number)
        release.wait(20)
        return number, threading.current_thread()

    async def main() -> None:
        beside = Beside()
        tasks = [asyncio.create_task(beside.run(partial(work, number))) for number in range(300)]
        await asyncio.sleep(0.01)
        tasks[299].cancel()
        await asyncio.sleep(0.01)
        release.set()
        done = await asyncio.gather(*tasks[:299])
        assert [number for number, _ in done] == list(range(299))
        threads = {thread for _, thread in done}
        assert len(threads) <= MAX_THREADS
        for thread in threads:
            thread.join(20)  # none is kept for later work
        assert await beside.run(lambda: "again") == "again"

    asyncio.run(main())
    assert sorted(started) == list(range(299))


def test_when_the_system_has_no_more_threads_those_there_are_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        beside = Beside()
        first = asyncio.create_task(beside.run(lambda: release.wait(20)))
        await asyncio.sleep(0.01)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            second = asyncio.create_task(beside.run(lambda: "second"))
            await asyncio.sleep(0.01)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await Beside().run(lambda: "of another model")
        release.set()
        assert (await first, await second) == (True, "second")

    asyncio.run(main())


@pytest.mark.loads
def test_many_calls_wait_for_one_engine_in_a_few_threads() -> None:
    llm, most = LLM(**OPTIONS), 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, sum(thread.name == "pagedlc-beside" for thread in threading.enumerate()))
            await asyncio.sleep(0.005)

    async def main() -> list[Any]:
        watcher = asyncio.create_task(watch())
        answers = await asyncio.gather(*(llm.achat(HI, TWO) for _ in range(100)))
        watcher.cancel()
        return answers

    assert all(asyncio.run(main()))
    assert 0 < most <= MAX_THREADS
    llm.close()


@pytest.mark.parametrize("way", ["achat", "VLLMChat.ainvoke", "Vllm.acomplete"])
def test_tools_in_all_of_the_loops_threads_may_wait_for_a_model(way: str) -> None:
    llm, chat, complete = LLM(**OPTIONS), VLLMChat(**OPTIONS, max_tokens=2), Vllm(**OPTIONS, max_new_tokens=2)
    ways: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "achat": lambda: llm.achat(HI, TWO),
        "VLLMChat.ainvoke": lambda: chat.ainvoke("hi"),
        "Vllm.acomplete": lambda: complete.acomplete("hi"),
    }

    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))

        def tool() -> Any:
            return asyncio.run_coroutine_threadsafe(ways[way](), loop).result(60)

        return await asyncio.gather(*(asyncio.to_thread(tool) for _ in range(2)))

    assert all(asyncio.run(main()))
    llm.close()


def test_a_thread_goes_on_when_the_main_thread_has_ended() -> None:
    program = (
        "import asyncio, threading\n"
        "from pagedlc import LLM, SamplingParams\n"
        "llm = LLM('smollm2', max_model_len=512).load()\n"
        "async def later():\n"
        "    await asyncio.sleep(0.3)\n"
        "    answers = await llm.achat([{'role': 'user', 'content': 'hi'}], SamplingParams(max_tokens=2))\n"
        "    print('tokens:', len(answers[0].outputs[0].token_ids))\n"
        "threading.Thread(target=lambda: asyncio.run(later())).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "tokens: 2", done.stderr
