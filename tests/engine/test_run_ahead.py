"""Steps launched before the tokens of earlier steps are known give the same answers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny_model

from pagedlc_engine.config import EngineConfig
from pagedlc_engine.engine import Engine, build_engine
from pagedlc_engine.model import read_spec
from pagedlc_engine.request import Request, SamplingParams
from pagedlc_engine.run_ahead import RunAhead
from pagedlc_engine.runner import PendingResult


def answers(
    folder: Path, run_ahead: int, most_ahead: int | None = None, **options: Any
) -> dict[tuple[str, int], list[int]]:
    path = make_tiny_model(folder / "tiny")
    config = EngineConfig.create(
        model=path, load_format="dummy", quantization=None, seed=1, enable_prefix_caching=False, **options
    )
    built = build_engine(config, read_spec(path, "dummy"))
    engine = Engine(built.scheduler, built.runner, seed=1, run_ahead=run_ahead, most_ahead=most_ahead)
    for number in range(12):
        params = SamplingParams(
            max_tokens=5 + 3 * number,
            temperature=0.0 if number % 2 else 1.0,
            seed=number,
            n=1 + (number % 3 == 0),
            stop_token_ids=[17, 90],
            repetition_penalty=1.2,
        )
        engine.add(Request(str(number), [number + 1] * (3 + 5 * number), params, eos_token_ids=(257,)))
    found: dict[tuple[str, int], list[int]] = {}
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None
            found.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    assert built.scheduler.cache.pool.num_free == built.scheduler.cache.pool.num_usable
    return found


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}, {"num_blocks": 14, "max_num_seqs": 5}])
def test_running_ahead_changes_no_answer(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = answers(tmp_path, 0, num_blocks=200)
    assert len(expected) == 16
    for run_ahead in (1, 3):
        assert answers(tmp_path, run_ahead, **{"num_blocks": 200, **options}) == expected


def test_coming_late_changes_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(tmp_path, 0, num_blocks=200)
    for lateness in (0.1, 0.6):
        draw = random.Random(lateness)
        monkeypatch.setattr(PendingResult, "done", lambda self, draw=draw, lateness=lateness: draw.random() < lateness)
        assert answers(tmp_path, 1, most_ahead=7, num_blocks=200) == expected


def test_who_comes_late_runs_further_ahead_until_it_is_in_time_again() -> None:
    ahead = RunAhead(1, 15)
    ahead.note(late=True)
    assert ahead.steps == 1  # an accident
    steps = []
    for _ in range(5):
        ahead.note(late=False)
        ahead.note(late=True)
        steps.append(ahead.steps)
    assert steps == [3, 7, 15, 15, 15]
    for _ in range(2000):
        ahead.note(late=False)
    assert ahead.steps == 1
    assert not RunAhead(1, 1).adapts
