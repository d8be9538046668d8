"""Crowds of users, waiting for engines, and finding their processes."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedlc import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
#: What a program of its own needs on its module path.
PATHS = [str(ROOT), str(ROOT / "engine"), str(ROOT / "integrations"), str(Path(__file__).parent)]


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def all_blocks_free(llm: LLM) -> bool:
    stats = llm.stats()
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


def params(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)


def engine_processes(parent: int | None = None) -> set[int]:
    """Ids of the engines' processes that a process has started, zombies included."""
    children = Path(f"/proc/{parent or os.getpid()}/task").glob("*/children")
    return {int(pid) for file in children for pid in file.read_text().split()}


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def let_a_crowd_share(llm: LLM, reference: LLM, num_threads: int, num_tasks: int, cancel_every: int) -> None:
    """Threads and tasks, one in ``cancel_every`` of these cancelled midway, ask at once; all get the reference's
    answers, and no block is lost."""
    expected = {
        length: reference.generate([list(range(1, length))], params(12, temperature=0))[0].outputs[0].token_ids
        for length in range(5, 40)
    }
    finished: list[int] = []

    def check(length: int) -> None:
        output = llm.generate([list(range(1, length))], params(12, temperature=0))[0]
        assert output.outputs[0].token_ids == expected[length]
        finished.append(length)

    def thread(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(3):
            check(draw.randint(5, 39))
        stream = llm.generate_stream(list(range(1, draw.randint(5, 39))), params(200))
        next(stream)
        stream.close()

    async def task(seed: int) -> bool:
        length = 5 + seed % 35
        if seed % cancel_every == 0:
            running = asyncio.create_task(llm.agenerate([list(range(1, length))], params(400)))
            await asyncio.sleep(0.001 * (seed % 7))
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            return False
        output = (await llm.agenerate([list(range(1, length))], params(12, temperature=0)))[0]
        return output.outputs[0].token_ids == expected[length]

    async def tasks() -> list[bool]:
        return await asyncio.gather(*(task(seed) for seed in range(num_tasks)))

    threads = [threading.Thread(target=thread, args=(seed,)) for seed in range(num_threads)]
    for item in threads:
        item.start()
    right = asyncio.run(tasks())
    for item in threads:
        item.join(60)
    assert sum(right) == num_tasks - num_tasks // cancel_every
    assert len(finished) == 3 * num_threads
    eventually(lambda: all_blocks_free(llm))
