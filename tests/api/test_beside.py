"""What an event loop is spared is done in threads of its own, whatever the loop's executor is busy with."""

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
from typing import Any

import pytest

from langchain_pagedlc import VLLMChat
from llama_index.llms.pagedlc import Vllm
from pagedlc import LLM, SamplingParams
from pagedlc.beside import in_thread

HI = [{"role": "user", "content": "hi"}]
TWO = SamplingParams(max_tokens=2)
OPTIONS: dict[str, Any] = {"model": "smollm2", "max_model_len": 512}


def test_result_error_and_context_come_back() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")

    def fail() -> None:
        raise LookupError("nothing there")

    async def main() -> None:
        name.set("of the caller")
        assert await in_thread(name.get) == "of the caller"
        assert await in_thread(threading.current_thread) is not threading.current_thread()
        with pytest.raises(LookupError, match="nothing there"):
            await in_thread(fail)

    asyncio.run(main())


def test_what_ends_an_iteration_ends_no_wait() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(in_thread(lambda: next(iter(()))))


def test_a_failed_call_holds_nothing_back() -> None:
    class Held:
        def fail(self) -> None:
            raise LookupError

    async def fail() -> weakref.ref[Held]:
        held = Held()
        with pytest.raises(LookupError):
            await in_thread(held.fail)
        return weakref.ref(held)

    gc.disable()
    try:
        assert asyncio.run(fail())() is None
    finally:
        gc.enable()


def test_a_cancelled_task_does_not_wait_for_its_thread() -> None:
    release = threading.Event()

    async def main() -> None:
        task = asyncio.create_task(in_thread(lambda: release.wait(20)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not release.is_set()

    asyncio.run(main())
    release.set()


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
