"""Waiting for engines, and finding their processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
