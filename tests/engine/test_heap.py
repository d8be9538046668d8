"""An engine for many streams keeps the garbage collector away from what lives on, and only from that."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_llm

from pagedlc_engine import heap, loop


class Knot:
    """Garbage that only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _nothing_set_aside() -> Iterator[None]:
    yield
    heap._users.clear()
    gc.unfreeze()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    describe = loop.describe

    def on_a_gpu(engine: Any) -> Any:
        return replace(describe(engine), device="cuda")

    monkeypatch.setattr(loop, "describe", on_a_gpu)


def test_garbage_is_freed_first() -> None:
    user, before, kept = Knot(), weakref.ref(Knot()), Knot()
    heap.set_aside(user)
    assert before() is None
    assert gc.get_freeze_count() > 0
    later = weakref.ref(kept)
    del kept
    heap.take_back(user)
    gc.collect()
    assert later() is None


def test_what_a_later_import_brings_is_added_if_anything_is_set_aside() -> None:
    heap.set_aside_too()
    assert gc.get_freeze_count() == 0
    user = Knot()
    heap.set_aside(user)
    before = gc.get_freeze_count()
    brought = [Knot() for _ in range(100)]
    heap.set_aside_too()
    assert gc.get_freeze_count() >= before + len(brought)


def test_a_gpu_engine_sets_aside_and_close_takes_back(tmp_path: Path, as_on_a_gpu: None) -> None:
    with tiny_llm(tmp_path).load() as llm:
        assert gc.get_freeze_count() > 0
        assert llm.chat([{"role": "user", "content": "Hi"}])[0].finished
    assert gc.get_freeze_count() == 0


def test_closing_one_of_two_takes_nothing_back_from_the_other(tmp_path: Path, as_on_a_gpu: None) -> None:
    first, second = tiny_llm(tmp_path).load(), tiny_llm(tmp_path).load()
    first.close()
    assert gc.get_freeze_count() > 0
    second.close()
    assert gc.get_freeze_count() == 0


def test_an_llm_that_is_only_dropped_still_ends_its_engine(tmp_path: Path, as_on_a_gpu: None) -> None:
    llm = tiny_llm(tmp_path).load()
    client = weakref.ref(llm._ready())
    del llm
    assert client() is None
    assert gc.get_freeze_count() == 0


def test_a_cpu_engine_leaves_the_collector_alone(tmp_path: Path) -> None:
    with tiny_llm(tmp_path).load():
        assert gc.get_freeze_count() == 0
