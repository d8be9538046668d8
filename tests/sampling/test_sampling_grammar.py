"""The grammar stage: only allowed tokens, in the rows that have a grammar."""

from __future__ import annotations

import pytest
import torch

from pagedlc import SamplingParams
from pagedlc_engine.sampling import Allowed, Sampler

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def bits_of(allowed: torch.Tensor) -> torch.Tensor:
    """bool [G, V] as int32 [G, W], lowest bit first."""
    rows, columns = allowed.shape
    padded = torch.nn.functional.pad(allowed, (0, -columns % 32)).view(rows, -1, 32)
    words = (padded.long() << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [7, 32, 1000, 49152])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_with_a_grammar_draw_allowed_tokens_and_the_others_what_they_would(
    device: str, vocab_size: int, temperature: float
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, vocab_size, device=device) * 4
    before = logits.clone()
    allowed = torch.rand(3, vocab_size) < 0.2
    allowed[torch.arange(3), torch.randint(vocab_size, (3,))] = True
    samplers = [Sampler(vocab_size, torch.device(device)) for _ in range(2)]
    for sampler in samplers:
        for slot in range(6):
            params = SamplingParams(temperature=temperature, logprobs=3)
            sampler.add(slot, params, slot, [1], [], [], [])
    rows = torch.tensor([1, 2, 5], device=device)
    free, bound = samplers
    for _ in range(5):
        plain = free.sample(logits, range(6))
        drawn = bound.sample(logits, range(6), Allowed(rows, bits_of(allowed).to(device)))
        assert not drawn.failures()
        assert allowed[torch.arange(3), drawn.token_ids[rows].cpu()].all()
        assert torch.equal(drawn.token_ids[[0, 3, 4]], plain.token_ids[[0, 3, 4]])
    if temperature == 0.0:
        masked = logits[rows].cpu().masked_fill(~allowed, -torch.inf)
        assert torch.equal(drawn.token_ids[rows].cpu(), masked.argmax(-1))
    assert torch.equal(logits, before)


def test_a_row_with_nothing_allowed_fails_alone() -> None:
    sampler = Sampler(40, torch.device("cpu"))
    for slot in range(2):
        sampler.add(slot, SamplingParams(), slot, [1], [], [], [])
    none = Allowed(torch.tensor([1]), torch.zeros(1, 2, dtype=torch.int32))
    failures = sampler.sample(torch.randn(2, 40), [0, 1], none).failures()
    assert list(failures) == [1]
    assert "structured_outputs" in failures[1]
