"""Log-probabilities: of the raw distribution, chosen token first, ranks from 1."""

from __future__ import annotations

import pytest
import torch

from pagedlc_engine.request import SamplingParams
from pagedlc_engine.sampling import Sampler, prompt_logprobs

V = 400


def test_logprobs_are_of_the_raw_distribution_with_the_chosen_token_first() -> None:
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0)) * 3
    sampler = Sampler(V, torch.device("cpu"))
    rare = logits[0].argmin().item()
    sampler.add(0, SamplingParams(temperature=0.5, logprobs=2, logit_bias={rare: 100.0}), 0, [1], [], [], [])
    sampler.add(1, SamplingParams(temperature=0.0, logprobs=3), 0, [1], [], [], [])
    sampler.add(2, SamplingParams(temperature=0.0), 0, [1], [], [], [])
    sampled = sampler.sample(logits, [0, 1, 2])
    expected = logits.double().log_softmax(-1)
    order = logits.argsort(descending=True)

    biased, greedy, nothing = sampled.logprobs
    assert nothing is None
    assert biased is not None
    assert list(biased) == [rare, *order[0, :2].tolist()]
    assert [entry.rank for entry in biased.values()] == [V, 1, 2]
    assert greedy is not None
    assert list(greedy) == order[1, :3].tolist()
    assert [entry.rank for entry in greedy.values()] == [1, 2, 3]
    for row, listing in enumerate([biased, greedy]):
        for token, entry in listing.items():
            assert entry.logprob == pytest.approx(expected[row, token].item(), abs=1e-5)


def test_zero_logprobs_lists_the_chosen_token_only() -> None:
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(V, torch.device("cpu"))
    sampler.add(0, SamplingParams(logprobs=0), 0, [1], [], [], [])
    sampled = sampler.sample(logits, [0])
    assert sampled.logprobs[0] is not None
    assert list(sampled.logprobs[0]) == sampled.token_ids.tolist()


def test_tied_tokens_share_a_rank() -> None:
    logits = torch.zeros(1, V)
    logits[0, 3] = 1.0
    logits[0, [50, 60]] = 0.5
    (listing,) = prompt_logprobs(logits, torch.tensor([60]), 3)
    assert {token: entry.rank for token, entry in listing.items()} == {60: 2, 3: 1, 50: 2}


@pytest.mark.parametrize("positions", [0, 1, 64, 130])
def test_prompt_logprobs_list_each_target_and_the_likeliest(positions: int) -> None:
    generator = torch.Generator().manual_seed(positions)
    logits = torch.randn(positions, V, generator=generator) * 4
    targets = torch.randint(V, (positions,), generator=generator)
    listings = prompt_logprobs(logits, targets, 5)
    expected = logits.double().log_softmax(-1)
    assert len(listings) == positions
    for row, listing in enumerate(listings):
        order = logits[row].argsort(descending=True).tolist()
        target = int(targets[row])
        assert list(listing) == [target, *(token for token in order[:5] if token != target)]
        for token, entry in listing.items():
            assert entry.rank == order.index(token) + 1
            assert entry.logprob == pytest.approx(expected[row, token].item(), abs=1e-4)


def test_more_logprobs_than_tokens_lists_them_all() -> None:
    (listing,) = prompt_logprobs(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0]), 50)
    assert list(listing) == [0, 1, 2]
