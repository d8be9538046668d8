"""Random numbers, the draw, and the filters on their own."""

from __future__ import annotations

import numpy as np
import pytest
import sampling_reference as reference
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pagedlc_engine.request import SamplingParams
from pagedlc_engine.sampling import Sampler
from pagedlc_engine.sampling.draw import draw
from pagedlc_engine.sampling.filters import TopK, top_k_cut, top_p_cut
from pagedlc_engine.sampling.logprobs import measure
from pagedlc_engine.sampling.radix import cut_reaching
from pagedlc_engine.sampling.rng import signed64, uniform
from pagedlc_engine.sampling.rows import largest, row_argmax, row_sums


def test_the_reference_generator_gives_the_published_numbers() -> None:
    # https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    assert reference.splitmix64(1234567, 5) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_uniform_numbers_are_those_of_the_reference() -> None:
    seeds = [0, 1, 2, -1, 2**63, 2**64 - 1, 1234567, 2**70 + 3]
    counters = [0, 1, 2, 3, 1000, 7, 5, 6]
    numbers = uniform(torch.tensor([signed64(seed) for seed in seeds]), torch.tensor(counters))
    assert numbers.tolist() == [reference.uniform(*pair) for pair in zip(seeds, counters, strict=True)]


def test_numbers_of_neighbouring_seeds_and_counters_are_uncorrelated() -> None:
    seeds, counters = torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij")
    numbers = uniform(seeds.flatten(), counters.flatten()).view(200, 200).numpy() - 0.5
    assert abs(numbers.mean()) < 0.01
    assert numbers.var() == pytest.approx(1 / 12, rel=0.03)
    for shift in [(0, 1), (1, 0), (1, 1), (1, -1)]:
        correlation = (numbers * np.roll(numbers, shift, (0, 1))).mean() * 12
        assert abs(correlation) < 0.03


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square divided by its degrees of freedom: near 1 when counts follow the probabilities."""
    expected = probabilities * counts.sum()
    common = expected > 5
    return float(((counts - expected)[common] ** 2 / expected[common]).sum() / (common.sum() - 1))


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"top_k": 30}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.9}],
)
def test_tokens_come_as_often_as_their_probability_says(options: dict[str, float]) -> None:
    vocab, draws = 500, 20_000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3)) * 2
    params = SamplingParams(**options)
    sampler = Sampler(vocab, torch.device("cpu"))
    for slot in range(200):
        sampler.add(slot, params, slot, [0], [], [], [])
    slots = list(range(200))
    tokens = torch.cat([sampler.sample(logits.expand(200, -1), slots).token_ids for _ in range(draws // 200)])
    counts = np.bincount(tokens.numpy(), minlength=vocab)
    probabilities = reference.probabilities(logits[0].tolist(), params)
    assert counts[probabilities == 0].sum() == 0
    assert chi_square(counts, probabilities) < 1.5


@pytest.mark.parametrize("vocab", [1, 5, 128, 129, 300, 1024])
@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_no_token_without_weight_is_drawn_at_the_edges(vocab: int, number: float) -> None:
    weights = torch.rand(64, vocab, generator=torch.Generator().manual_seed(vocab))
    weights[torch.rand(64, vocab, generator=torch.Generator().manual_seed(1)) < 0.9] = 0.0
    weights[:, vocab // 2] = 1e-30
    weights[1::2] *= 1e-6
    tokens = draw(weights, torch.full((64,), number, dtype=torch.float64))
    chosen = weights.gather(1, tokens[:, None])[:, 0]
    assert (chosen > 0).all()
    if number == 0.0:
        assert tokens.tolist() == [row.nonzero()[0].item() for row in weights]
    if number > 0.9:
        assert tokens.tolist() == [(row > row.max() * 1e-20).nonzero()[-1].item() for row in weights]


def test_rows_that_cannot_be_drawn_from_give_an_id_in_range() -> None:
    weights = torch.zeros(3, 300)
    weights[1] = torch.nan
    weights[2, 7] = 1.0
    tokens = draw(weights, torch.tensor([0.3, 0.3, 0.999], dtype=torch.float64))
    assert ((tokens >= 0) & (tokens < 300)).all()
    assert tokens[2] == 7


weight_rows = st.lists(
    st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, 0.25, 0.5, 1.0])), min_size=1, max_size=600
)


@settings(max_examples=80, deadline=None)
@given(values=weight_rows, top_p=st.floats(0.001, 0.999))
@example(values=[1.0] + [0.5] * 599, top_p=0.9)
@example(values=[1e-30] * 400, top_p=0.5)
def test_top_p_keeps_the_smallest_set_of_likeliest_tokens(values: list[float], top_p: float) -> None:
    weights = torch.tensor([[*values, 1.0]])
    cut = top_p_cut(weights, torch.tensor([[top_p]], dtype=torch.float64)).item()
    row = weights[0].double()
    assert cut in row
    assert row.max() >= cut
    assert row[row >= cut].sum() >= top_p * row.sum() * (1 - 1e-12)
    # Without the tokens at the cut itself it would be too little.
    assert row[row > cut].sum() < top_p * row.sum() * (1 + 1e-12)


def test_top_p_stops_where_its_mass_is_reached_exactly() -> None:
    weights = torch.tensor([[0.25, 1.0, 0.25, 0.5]] * 3)
    top_p = torch.tensor([[0.5], [0.75], [0.76]], dtype=torch.float64)
    assert top_p_cut(weights, top_p)[:, 0].tolist() == [1.0, 0.5, 0.25]
    assert cut_reaching(weights, weights, top_p * 2.0)[:, 0].tolist() == [1.0, 0.5, 0.25]


def test_a_search_tells_neighbouring_numbers_apart_and_a_row_of_nan_does_no_harm() -> None:
    one = torch.ones(1).view(torch.int32).item()
    row = torch.arange(one - 1500, one + 1, dtype=torch.int32).view(torch.float32)
    values = row[torch.randperm(len(row), generator=torch.Generator().manual_seed(0))].repeat(len(row) + 1, 1)
    values[-1] = torch.nan
    ranks = torch.arange(1, len(row) + 2)[:, None]
    cuts = cut_reaching(values, torch.ones_like(values), ranks)[:-1, 0]
    assert torch.equal(cuts, row.flip(0))


@settings(max_examples=80, deadline=None)
@given(values=weight_rows, data=st.data())
def test_top_k_keeps_the_k_likeliest_tokens_and_their_ties(values: list[float], data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, len(values)))
    weights = torch.tensor([values])
    expected = sorted(weights[0].tolist(), reverse=True)[top_k - 1]
    wanted = torch.tensor([[top_k]])
    assert top_k_cut(weights, TopK(None, wanted, top_k, None)).item() == expected
    assert cut_reaching(weights, torch.ones_like(weights), wanted).item() == expected


@pytest.mark.parametrize("vocab", [1500, 5000])
@pytest.mark.parametrize("top_p", [None, 0.7, 1.0])
def test_a_large_top_k_matches_a_sort(vocab: int, top_p: float | None) -> None:
    weights = torch.rand(3, vocab, generator=torch.Generator().manual_seed(0))
    top_k = torch.tensor([[1100], [1300], [1499]])
    p = None if top_p is None else torch.full((3, 1), top_p, dtype=torch.float64)
    cuts = top_k_cut(weights, TopK(None, top_k, 1499, p))
    for row, k, cut in zip(weights.double(), top_k[:, 0].tolist(), cuts[:, 0].tolist(), strict=True):
        best = row.sort(descending=True).values[:k]
        before = best.cumsum(0) - best
        assert cut == best[before < (top_p or 1.0) * best.sum()].min().item()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 20), k=st.integers(1, 30), top_p=st.floats(0.01, 0.99))
def test_a_nucleus_counts_the_ties_that_top_k_keeps_whatever_else_is_in_the_batch(
    seed: int, k: int, top_p: float
) -> None:
    logits = torch.randn(1, 1600, generator=torch.Generator().manual_seed(seed)).mul_(2).round_()
    weights = (logits - logits.max()).exp()
    ordered = weights.double().sort(descending=True).values[0]
    kept = ordered[ordered >= ordered[k - 1]]
    before = (kept.cumsum(0) - kept) / kept.sum()
    assume((before - top_p).abs().min() > 1e-9)
    expected = kept[before < top_p].min().item()
    p = torch.tensor([[top_p]], dtype=torch.float64)
    assert top_k_cut(weights, TopK(None, torch.tensor([[k]]), k, p)).item() == expected
    beside = TopK(None, torch.tensor([[k], [1500]]), 1500, p.expand(2, 1))
    assert top_k_cut(weights.repeat(2, 1), beside)[0].item() == expected


def test_a_rows_sums_are_the_same_alone_and_among_others() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for seed in range(20):
            logits = torch.randn(8, 49152, generator=torch.Generator().manual_seed(seed)) * 4
            weights = (logits - logits.amax(-1, keepdim=True)).exp()
            tokens, half = logits.argmin(-1), torch.full((8, 1), 0.5, dtype=torch.float64)
            together = row_sums(weights), measure(logits, tokens, 2), top_p_cut(weights, half)
            for row in range(8):
                one = slice(row, row + 1)
                alone = row_sums(weights[one]), measure(logits[one], tokens[one], 2), top_p_cut(weights[one], half[one])
                for found, expected in zip(alone, together, strict=True):
                    assert torch.equal(found[0], expected[row])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("vocab", [1, 7, 128, 130, 2048, 5001])
def test_row_searches_match_a_sort(vocab: int) -> None:
    values = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)).round(decimals=1)
    maxima, indices = row_argmax(values)
    assert torch.equal(maxima, values.max(-1).values)
    assert torch.equal(indices, torch.tensor([row.tolist().index(max(row.tolist())) for row in values]))
    for k in {1, min(3, vocab), min(40, vocab), vocab}:
        top, where = largest(values, k)
        assert torch.equal(top, values.sort(descending=True).values[:, :k])
        assert torch.equal(values.gather(1, where), top)
        assert all(len(set(row)) == k for row in where.tolist())
