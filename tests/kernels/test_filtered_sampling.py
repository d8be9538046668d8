"""min_p, top_k and top_p within the kernels draw what the torch sampler draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from pagedlc_engine.kernels.filtered_sampling import ROOM
from pagedlc_engine.kernels.logprobs import measure_tokens
from pagedlc_engine.kernels.sampler_stages import forbid_tokens, penalise_tokens, record_tokens
from pagedlc_engine.kernels.sampling import sample_tokens, sample_tokens_reference
from pagedlc_engine.request import SamplingParams
from pagedlc_engine.sampling import Allowed, Sampler, SamplerKernels
from pagedlc_engine.sampling.logprobs import measure
from pagedlc_engine.sampling.rng import uniform

#: top_k, top_p, min_p
FILTERS = [
    (20.0, 0.95, 0.0),
    (0.0, 0.9, 0.0),
    (0.0, 0.3, 0.0),
    (0.0, 1.0, 0.05),
    (50.0, 1.0, 0.0),
    (50.0, 0.8, 0.1),
    (700.0, 0.9, 0.0),
    (0.0, 0.9, 0.01),
    (100000.0, 0.7, 0.0),
]


def sampled(
    logits: torch.Tensor, filters: torch.Tensor, temperatures: torch.Tensor | float = 0.8
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels draw and what the reference does; one filter serves for all rows."""
    rows, device = len(logits), logits.device
    if not isinstance(temperatures, torch.Tensor):
        temperatures = torch.full((rows,), temperatures, device=device)
    seeds, counters = 7 * torch.arange(rows, device=device) - 3, torch.arange(rows, device=device) % 5
    filters = filters.to(device).expand(rows, 3).contiguous()
    arguments = (logits, temperatures, seeds, counters, filters)
    return sample_tokens(*arguments), sample_tokens_reference(*arguments)


def check(logits: torch.Tensor, *filters: float, temperature: float = 0.8) -> torch.Tensor:
    tokens, reference = sampled(logits, torch.tensor(filters), temperature)
    assert torch.equal(tokens, reference)
    return tokens


@pytest.mark.parametrize("rows", [3, 9])
@pytest.mark.parametrize("filters", FILTERS)
def test_each_filter(device: torch.device, filters: tuple[float, float, float], rows: int) -> None:
    check(torch.randn(rows, 5003, device=device) * 3, *filters)


@pytest.mark.parametrize("filters", [(0.0, 0.5, 0.0), (5000.0, 0.9, 0.0), (0.0, 0.9, 0.3), (0.0, 1.0, 0.3)])
def test_more_is_kept_than_the_search_has_room_for(device: torch.device, filters: tuple[float, float, float]) -> None:
    logits = torch.randn(3, 5 * ROOM + 7, device=device) * 0.2
    kept = (logits - logits.amax(-1, keepdim=True)).exp() >= 0.3
    assert kept.sum(-1).min() > ROOM
    check(logits, *filters, temperature=1.0)


@pytest.mark.parametrize("filters", FILTERS[:6])
def test_equal_logits_are_kept_together(device: torch.device, filters: tuple[float, float, float]) -> None:
    check((torch.randn(3, 3000, device=device) * 2).round(), *filters)


def test_more_equal_logits_than_there_is_room_for(device: torch.device) -> None:
    logits = (torch.randn(2, 4 * ROOM, device=device) > 0).float()
    logits[:, 17] = 2.0
    check(logits, 30.0, 0.9, 0.0)
    check(logits, 0.0, 0.6, 0.0)
    check(torch.zeros_like(logits), 0.0, 0.6, 0.0)
    check(torch.zeros_like(logits), 20.0, 1.0, 0.0)


def test_the_likeliest_token_is_always_kept(device: torch.device) -> None:
    logits = torch.randn(3, 4100, device=device)
    for filters in [(1.0, 1.0, 0.0), (0.0, 1e-6, 0.0), (0.0, 1.0, 1.0), (50.0, 1e-6, 1.0)]:
        assert torch.equal(check(logits, *filters), logits.argmax(-1))
        assert torch.equal(check(logits * 1000, *filters), logits.argmax(-1))


def test_a_top_p_that_float32_does_not_tell_from_0(device: torch.device) -> None:
    logits = torch.zeros(2, 5000, device=device)
    logits[1, 7::400] = 2.0  # the likeliest is one of several, in different blocks
    tokens = check(logits, 0.0, 1e-50, 0.0)
    assert logits[1, tokens[1]] == 2.0


def test_forbidden_tokens(device: torch.device) -> None:
    logits = torch.full((4, 2500), float("-inf"), device=device)
    logits[0, 2499] = -3.0
    logits[1, [5, 1500, 2400]] = torch.tensor([1.0, 1.5, 1.2], device=device)
    logits[2, 1000:] = torch.randn(1500, device=device)
    for filters in FILTERS:
        tokens = sampled(logits, torch.tensor(filters))
        assert torch.equal(tokens[0][:3], tokens[1][:3])
        assert 0 <= tokens[0][3] < 2500  # nothing is allowed: any


def test_rows_of_a_batch_keep_to_their_own(device: torch.device) -> None:
    rows = 12
    logits = torch.randn(rows, 4500, device=device) * 2
    filters = torch.tensor([FILTERS[row % len(FILTERS)] for row in range(rows)])
    filters[::4] = torch.tensor([0.0, 1.0, 0.0])
    temperatures = torch.linspace(0.0, 2.0, rows, device=device)
    temperatures[5] = 0.0
    tokens, reference = sampled(logits, filters, temperatures)
    assert torch.equal(tokens, reference)
    assert tokens[5] == logits[5].argmax()
    seeds, counters = 7 * torch.arange(rows, device=device) - 3, torch.arange(rows, device=device) % 5
    plain = sample_tokens(logits, temperatures, seeds, counters)
    assert torch.equal(tokens[::4], plain[::4])
    for row in (1, 10):  # alone, where parts are smaller
        one = slice(row, row + 1)
        alone = sample_tokens(logits[one], temperatures[one], seeds[one], counters[one], filters[one].to(device))
        assert alone[0] == tokens[row]


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"top_p": 0.9, "logit_bias": {7: 5.0}},
    {"top_k": 50, "top_p": 0.8, "repetition_penalty": 1.2},
    {"min_p": 0.05, "temperature": 1.3, "min_tokens": 3},
    {"top_k": 1, "presence_penalty": 0.5},
    {"temperature": 0.7, "frequency_penalty": 0.3},
    {"top_p": 0.9, "logit_bias": dict.fromkeys(range(1100), float("-inf"))},
    {"top_p": 0.9, "top_k": 10**50},
]


def test_penalties_are_the_same_with_the_kernels(device: torch.device) -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"top_p": 0.9, "frequency_penalty": 0.7, "presence_penalty": -0.4},
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 0.7, "presence_penalty": 1.0, "frequency_penalty": 0.2},
    ]
    logits = torch.randn(4, 40, device=device) * 2
    found = []
    for kernels in (None, SamplerKernels(sample_tokens, forbid_tokens, penalise_tokens, record_tokens, measure_tokens)):
        sampler = Sampler(40, device, kernels)
        for slot, options in enumerate(settings):
            prompt, output = [1, 2, 3, 2] + [5] * (600 * slot), [7, 7, 8][:slot]
            sampler.add(slot, SamplingParams(**options), slot, prompt, output, [], [])
        found.append([sampler.sample(logits, range(4)).on_host().token_ids.tolist() for _ in range(70)])
    assert found[0] == found[1]
    assert len({tuple(step) for step in found[0]}) > 5


def test_the_sampler_chooses_the_same_tokens_with_the_kernels(device: torch.device) -> None:
    vocab_size = 1100
    logits = torch.randn(len(SETTINGS), vocab_size, device=device) * 3
    logits[-1, 3] = float("nan")
    # Two rows under a grammar: one token, and the tokens from 32 on that are divisible by 32.
    bits = torch.zeros(2, 35, dtype=torch.int32, device=device)
    bits[0, 34] = 1 << 11
    bits[1, 1:] = 1
    allowed = Allowed(torch.tensor([0, 2], device=device), bits)
    found = []
    for kernels in (None, SamplerKernels(sample_tokens, forbid_tokens, penalise_tokens, record_tokens, measure_tokens)):
        sampler = Sampler(vocab_size, device, kernels)
        for slot, options in enumerate(SETTINGS):
            sampler.add(slot, SamplingParams(**options), slot, [1, 2, 3], [], [9], [[4, 5]])
        slots = range(len(SETTINGS))
        steps = [sampler.sample(logits, slots).on_host() for _ in range(4)]
        steps.append(sampler.sample(logits, slots, allowed).on_host())
        assert all(0 <= token < vocab_size for step in steps for token in step.token_ids.tolist())
        found.append(
            [
                (step.token_ids[:-2].tolist(), step.failures(), [list(row) for row in step.logprobs if row is not None])
                for step in steps
            ]
        )
    assert found[0] == found[1]
    assert list(found[0][0][1]) == [6, 7]
    assert found[0][4][0][0] == 34 * 32 + 11
    assert found[0][4][0][2] % 32 == 0 < found[0][4][0][2]


@pytest.mark.parametrize("width", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab_size", [7, 1024, 5003])
def test_log_probabilities_are_the_same_with_the_kernels(device: torch.device, vocab_size: int, width: int) -> None:
    logits = torch.randn(4, vocab_size, device=device) * 3
    logits[1] = logits[1].round()
    logits[2, 3:] = float("-inf")
    logits[3, : vocab_size // 2] = float("-inf")
    token_ids = torch.tensor([3, 5, 1, vocab_size - 1], device=device)
    found, expected = measure_tokens(logits, token_ids, width), measure(logits, token_ids, width)
    assert found.shape == expected.shape
    width = min(width, vocab_size)
    torch.testing.assert_close(found[:, :3], expected[:, :3], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[:, 3 + width :], expected[:, 3 + width :], atol=1e-5, rtol=1e-5)
    listed = found[:, 3 : 3 + width].long()
    assert all(len(set(row)) == width for row in listed.tolist())
    # Which of equal logits are listed is left open.
    assert torch.equal(logits.gather(1, listed), logits.gather(1, expected[:, 3 : 3 + width].long()))


def far_from_every_edge(logits: torch.Tensor, top_k: int, top_p: float, min_p: float, temperature: float) -> bool:
    """Whether rounding decides nothing: neither what is kept nor which token is drawn, in row 0."""
    weights = ((logits[0].double() - logits[0].max()) / temperature).exp()
    distances = [(weights - min_p).abs().min()]
    weights = weights * (weights >= min_p)
    if 0 < top_k < len(weights):
        weights = weights * (weights >= weights.sort(descending=True).values[top_k - 1])
    if top_p < 1.0:
        mass = weights.sort(descending=True).values.cumsum(0)
        distances.append((mass / mass[-1] - top_p).abs().min())
        ordered = weights.sort(descending=True).values
        weights = weights * (weights >= ordered[(mass < top_p * mass[-1]).sum()])
    shares = weights.cumsum(0) / weights.sum()
    number = uniform(torch.tensor([-3]), torch.tensor([0]))
    distances.append((shares - number).abs().min())
    return bool(torch.stack(distances).min() > 1e-5)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    size=st.sampled_from([3, 70, 1025, 2100]),
    scale=st.floats(0.1, 8.0),
    top_k=st.one_of(st.just(0), st.integers(2, 100)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
    temperature=st.floats(0.1, 4.0),
    rounded=st.booleans(),
)
def test_any_filters(
    device: torch.device,
    seed: int,
    size: int,
    scale: float,
    top_k: int,
    top_p: float,
    min_p: float,
    temperature: float,
    rounded: bool,
) -> None:
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) * scale
    logits = logits.round() if rounded else logits
    assume(far_from_every_edge(logits, top_k, top_p, min_p, temperature))
    check(logits.to(device), float(top_k), top_p, min_p, temperature=temperature)
