"""Forked processes of a program that has used an engine make engines of their own."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from engine_helpers import params
from tiny_models import make_tiny_model, tiny_llm

from pagedlc import LLM, ConfigError, EngineDeadError, shared_llm
from pagedlc.documents.embedding import MiniLM
from pagedlc.registry import _registry

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
Made = TypeVar("Made")
PROMPT = list(range(1, 40))


@pytest.fixture
def shared_work() -> Iterator[None]:
    """This thread has shared work with others, as torch does on a machine with several cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(1 << 20).sum()
    yield
    torch.set_num_threads(before)


def in_a_fork(work: Callable[[], Made]) -> Made:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=lambda: there.send(work()))
    child.start()
    there.close()
    try:
        assert here.poll(90), "the child hangs"
        made: Made = here.recv()
        return made
    finally:
        child.kill()
        child.join()


def answer(llm: LLM) -> list[int]:
    return list(llm.generate([PROMPT], params(5, temperature=0))[0].outputs[0].token_ids)


@pytest.mark.parametrize("quantization", ["auto", "none"])
@pytest.mark.usefixtures("shared_work")
def test_what_a_forked_process_is_told_to_do_works(quantization: str) -> None:
    def work() -> list[int]:
        with pytest.raises(EngineDeadError, match="Make a new LLM"):
            answer(llm)
        return answer(LLM("smollm2", quantization=quantization))

    with LLM("smollm2", quantization=quantization) as llm:
        expected = answer(llm)
        assert in_a_fork(work) == expected
        assert answer(llm) == expected


@pytest.mark.usefixtures("shared_work")
def test_a_forked_process_embeds_texts() -> None:
    model = MiniLM()
    texts = ["A library lends books.", "The cat sleeps."] * 40
    expected = model.embed(texts)
    assert np.array_equal(in_a_fork(lambda: model.embed(texts)), expected)
    assert np.array_equal(model.embed(texts), expected)


def test_a_forked_process_waits_for_no_thread_that_was_about_to_make_an_engine(tmp_path: Path) -> None:
    path = str(make_tiny_model(tmp_path / "tiny"))
    options: dict[str, Any] = {"load_format": "dummy", "num_blocks": 400, "seed": 1}
    llm = shared_llm(path, **options)
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with llm._lock, _registry._lock:
            held.set()
            forked.wait()

    other = threading.Thread(target=hold)
    other.start()
    held.wait()
    try:
        made = in_a_fork(lambda: [answer(llm), answer(shared_llm(path, **options))])
    finally:
        forked.set()
        other.join()
    assert made == [answer(llm)] * 2


def test_a_forked_process_that_lost_its_gpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with tiny_llm(tmp_path, device="auto") as llm, pytest.raises(ConfigError, match="'spawn'"):
        llm.load()
    with tiny_llm(tmp_path, device="cpu") as llm:
        assert len(answer(llm)) == 5
