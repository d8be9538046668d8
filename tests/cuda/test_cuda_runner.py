"""The GPU path gives what the plain one gives: compiled where there is a GPU, interpreted elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from pagedlc_engine.cuda import state
from pagedlc_engine.cuda.fused_decoder import FusedDecoder
from pagedlc_engine.cuda.runner import CudaRunner
from pagedlc_engine.cuda.runtime import NoWait
from pagedlc_engine.device import GPU_MOST_AHEAD
from pagedlc_engine.engine import Engine
from pagedlc_engine.kernels.streamed_rows import prefers_streaming
from pagedlc_engine.request import SamplingParams, TokenDelta
from pagedlc_engine.sampling import Sampler
from tests.cuda.cuda_engines import answers, make_engine

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}


def greedy(tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **options)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{seed}/{length}")
    return [rng.randint(0, 255) for _ in range(length)]


def check(
    folder: Path, device: torch.device, prompts: list[list[int]], params: list[SamplingParams], **options: Any
) -> None:
    expected = answers(make_engine(folder, device, plain=True, **options), prompts, params)
    assert answers(make_engine(folder, device, run_ahead=2, **options), prompts, params) == expected


def test_prompts_in_chunks_beside_answers(tmp_path: Path, device: torch.device) -> None:
    options = {"max_num_batched_tokens": 16, "num_hidden_layers": 2}
    check(tmp_path, device, [prompt(n) for n in (1, 5, 20)], [greedy(3)] * 3, **options)


@pytest.mark.parametrize("count", [3, 20, 70])
def test_products_of_many_rows_that_stream(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """As in 16-bit models where launches overlap; the type, and with it the answers' precision, is float32 here."""
    streamed: set[int] = set()

    def streams(self: FusedDecoder, x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> bool:
        streamed.add(len(x))
        return prefers_streaming(len(x), len(weight) // (2 if gated else 1), weight.shape[1], gated)

    monkeypatch.setattr(FusedDecoder, "_streams", streams)
    prompts = [prompt(1 + row % 5, row) for row in range(count)]
    check(tmp_path, device, prompts, [greedy(3)] * count, max_num_seqs=96, max_num_batched_tokens=256)
    assert max(streamed) >= count


@pytest.mark.parametrize("length", [1, 32])
def test_a_new_request_that_only_decodes(tmp_path: Path, device: torch.device, length: int) -> None:
    """One token, or of whole blocks that are all cached the last one: alone, and beside a running request."""
    engine = make_engine(tmp_path, device)
    expected = answers(make_engine(tmp_path, device, plain=True), [prompt(length), prompt(3)], [greedy(4)] * 2)
    assert answers(engine, [prompt(length)], [greedy(4)]) == {"r0/0": expected["r0/0"]}
    kept: list[TokenDelta] = []
    assert answers(engine, [prompt(length)], [greedy(4)], keep=kept) == {"r0/0": expected["r0/0"]}
    assert kept[-1].num_cached_tokens == length - 1
    assert answers(engine, [prompt(length), prompt(3)], [greedy(4)] * 2) == expected


@pytest.mark.slow
def test_heads_with_a_norm(tmp_path: Path, device: torch.device) -> None:
    check(tmp_path, device, [prompt(7)], [greedy(2)], **QWEN3)


def test_seeds_parameters_and_forks_in_one_batch(tmp_path: Path, device: torch.device) -> None:
    params = [
        SamplingParams(temperature=0.8, seed=5, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=5, repetition_penalty=1.3, seed=9, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=1.2, n=2, seed=3, max_tokens=4, ignore_eos=True),
    ]
    check(tmp_path, device, [prompt(6), prompt(6), prompt(6, 1)], params)


FILTERED = [
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=5, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.5, min_p=0.02, seed=9, n=2, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=1.5, min_p=0.3, top_k=10**50, seed=7, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=1.5, top_k=1, top_p=0.5, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=3, max_tokens=5, ignore_eos=True),
    greedy(5, top_k=3),
]


def test_top_k_top_p_and_min_p_are_part_of_the_step(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(6, number % 2) for number in range(len(FILTERED))]
    expected = answers(make_engine(tmp_path, device, plain=True), prompts, FILTERED)
    monkeypatch.delattr(Sampler, "sample")
    assert answers(make_engine(tmp_path, device, run_ahead=2), prompts, FILTERED) == expected


@pytest.mark.slow
def test_log_probabilities(tmp_path: Path, device: torch.device) -> None:
    wanted = greedy(3, logprobs=2, prompt_logprobs=1)
    listings = []
    for plain in (True, False):
        engine = make_engine(tmp_path, device, plain=plain)
        found = answers(engine, [prompt(9)], [wanted], keep=(kept := []))
        assert found["r0/0"]
        prompt_rows = next(delta.prompt_logprobs for delta in kept if delta.prompt_logprobs)
        rows = [row for delta in kept for row in delta.logprobs or []]
        listings.append([row for row in [*prompt_rows[1:], *rows] if row is not None])
    assert [list(row) for row in listings[0]] == [list(row) for row in listings[1]]
    for expected, row in zip(*listings, strict=True):
        assert [item.logprob for item in row.values()] == pytest.approx(
            [item.logprob for item in expected.values()], abs=1e-3
        )


def test_more_requests_than_planned_for(tmp_path: Path, device: torch.device) -> None:
    prompts = [prompt(3, seed) for seed in range(4)]
    expected = answers(make_engine(tmp_path, device, plain=True), prompts, [greedy(3)] * 4)
    engine = make_engine(tmp_path, device, max_num_seqs=1)
    engine.scheduler.max_num_seqs = 4
    assert answers(engine, prompts, [greedy(3)] * 4) == expected


def test_more_about_new_requests_than_a_message_holds(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_MESSAGE_SIZE", 32)
    check(tmp_path, device, [prompt(3, seed) for seed in range(3)], [greedy(3, seed=1)] * 3)


def engine_that_captures_late(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, run_ahead: int = 1
) -> Engine:
    """Each shape is captured when a step first has it; a graph is what launches it."""

    def recorded(_: CudaRunner, launch: Callable[[], None]) -> Any:
        return SimpleNamespace(launch=lambda _: launch())

    engine = make_engine(tmp_path, device, max_num_batched_tokens=16, run_ahead=run_ahead)
    runner = engine.runner
    assert isinstance(runner, CudaRunner)
    monkeypatch.setattr(CudaRunner, "_record", recorded)
    monkeypatch.setattr(runner, "_use_graphs", True)
    runner.attach(runner._kv, runner.cache)
    return engine


def test_a_step_of_a_size_that_is_captured_only_when_it_comes(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(n) for n in (3, 9)]
    expected = answers(make_engine(tmp_path, device, plain=True), prompts, [greedy(3)] * 2)
    engine = engine_that_captures_late(tmp_path, device, monkeypatch)
    assert answers(engine, prompts, [greedy(3)] * 2) == expected


@pytest.mark.slow
def test_a_late_capture_leaves_tokens_that_nobody_has_looked_at_yet(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = [prompt(3), prompt(9)], [greedy(20), greedy(16)]
    expected = answers(make_engine(tmp_path, device, plain=True), prompts, params)
    engine = engine_that_captures_late(tmp_path, device, monkeypatch, GPU_MOST_AHEAD)
    answers(engine, prompts, [greedy(2)] * 2)
    assert answers(engine, prompts, params) == expected  # one of them alone, at the end, is a new shape


def test_a_request_that_was_preempted_comes_back_alone(tmp_path: Path, device: torch.device) -> None:
    prompts, params = [prompt(16), prompt(14, 1)], [greedy(2), greedy(6)]
    expected = answers(make_engine(tmp_path, device, plain=True), prompts, params)
    # The first one's last token is still in flight when the second, decoding alone by then, finds no block.
    engine = make_engine(tmp_path, device, num_blocks=4, max_num_batched_tokens=32, run_ahead=2)
    assert answers(engine, prompts, params) == expected
    assert engine.stats().num_preemptions == 1


@pytest.mark.slow
@pytest.mark.parametrize("params", [[greedy(6)] * 2, FILTERED[:3:2]])
def test_blocks_taken_away_and_given_back(tmp_path: Path, device: torch.device, params: list[SamplingParams]) -> None:
    prompts = [prompt(15, seed) for seed in range(2)]
    expected = answers(make_engine(tmp_path, device, plain=True), prompts, params)
    engine = make_engine(tmp_path, device, num_blocks=4, max_num_batched_tokens=32)
    assert answers(engine, prompts, params) == expected
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_an_error_of_a_step_leaves_the_next_ones_right(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(make_engine(tmp_path, device, plain=True), [prompt(3)], [greedy(2)])
    engine = make_engine(tmp_path, device)
    state = engine.runner._state  # type: ignore[attr-defined]

    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(state, "commit", broken)
        failed = answers(engine, [prompt(2)], [greedy(2)], fails=True)
    assert failed == {}
    assert answers(engine, [prompt(3)], [greedy(2)]) == expected


def test_a_packet_is_written_again_when_what_was_launched_of_a_failed_step_has_read_it(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noted(NoWait):
        def record(self, stream: Any) -> None:
            events.append("record")

        def wait(self) -> None:
            events.append("wait")

    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    events: list[str] = []
    engine = make_engine(tmp_path, device)
    runner: Any = engine.runner
    runner._events[runner._number % state.PACKETS] = Noted()
    with monkeypatch.context() as patch:
        patch.setattr(runner._state, "commit", broken)
        answers(engine, [prompt(2)], [greedy(2)], fails=True)
    answers(engine, [prompt(2)], [greedy(1)])
    assert events[:3] == ["wait", "record", "wait"]
