"""Steps of few tokens may use fewer threads, in the thread that runs the engine and nowhere else."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_llm

from pagedlc import SamplingParams
from pagedlc_engine import threads
from pagedlc_engine.model import Decoder
from pagedlc_engine.threads import FEW_TOKENS, StepThreads, usual_threads


@pytest.fixture
def two_threads() -> object:
    before = usual_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_a_new_thread() -> int:
    """What a thread finds that has not used torch before."""
    found: list[int] = []

    def look() -> None:
        torch.ones(2).sum()
        found.append(torch.get_num_threads())

    new = threading.Thread(target=look)
    new.start()
    new.join()
    return found[0]


class Anywhere:
    device = torch.device("cpu")


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("quickest", [1, 2])
def test_the_quickest_number_is_taken_for_few_tokens_only(monkeypatch: pytest.MonkeyPatch, quickest: int) -> None:
    monkeypatch.setattr(threads, "_seconds", lambda decoder, number: abs(number - quickest))
    chosen = StepThreads(Anywhere())  # type: ignore[arg-type]
    for _ in range(2):
        chosen.use_for(1)
        assert torch.get_num_threads() == quickest
        assert in_a_new_thread() == 2
        chosen.use_for(FEW_TOKENS + 1)
        assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_an_engine_made_during_anothers_small_step_gets_all_threads() -> None:
    seen: list[int] = []

    def make_and_run_another() -> None:
        seen.append(usual_threads())
        StepThreads(None).use_for(FEW_TOKENS + 1)
        seen.append(torch.get_num_threads())

    StepThreads(None).use_for(1)
    assert usual_threads() == 2
    another = threading.Thread(target=make_and_run_another)
    another.start()
    another.join()
    assert seen == [2, 2]


@pytest.mark.usefixtures("two_threads")
def test_an_engine_leaves_the_processs_threads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    born_meanwhile: list[int] = []
    forward = Decoder.forward

    def spy(self: Decoder, *arguments: object) -> object:
        seen.append(torch.get_num_threads())
        born_meanwhile.append(in_a_new_thread())
        return forward(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "forward", spy)
    with tiny_llm(tmp_path) as llm:
        llm.generate([[1, 2]], SamplingParams(max_tokens=3))
    assert seen
    assert set(born_meanwhile) == {2}
    assert torch.get_num_threads() == 2
