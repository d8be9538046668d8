"""On a GPU a step's tokens are chosen without a look from the host, and as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedlc import SamplingParams
from pagedlc_engine.sampling import Sampler, SamplerKernels
from pagedlc_engine.sampling.filters import nucleus_by_sort, top_p_cut

V = 5000
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"top_p": 0.9},
    {"top_k": 50, "top_p": 0.8, "logprobs": 0},
    {"min_p": 0.05, "temperature": 1.3},
    {"top_k": 2000, "top_p": 0.7, "temperature": 2.0},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"logit_bias": {7: 5.0}, "min_tokens": 3},
]


def sampler_kernels() -> SamplerKernels:
    pytest.importorskip("triton", reason="Triton is not installed")
    from pagedlc_engine.kernels.logprobs import measure_tokens
    from pagedlc_engine.kernels.sampler_stages import forbid_tokens, penalise_tokens, record_tokens
    from pagedlc_engine.kernels.sampling import sample_tokens

    return SamplerKernels(sample_tokens, forbid_tokens, penalise_tokens, record_tokens, measure_tokens)


def sampler_on(device: str, settings: list[dict[str, Any]], kernels: bool = False) -> Sampler:
    sampler = Sampler(V, torch.device(device), sampler_kernels() if kernels else None)
    for slot, options in enumerate(settings):
        sampler.add(slot, SamplingParams(**options), slot, [1, 2, 3], [], [9], [[4, 5]])
    return sampler


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0])
def test_a_nucleus_is_the_same_by_sorting(top_p: float, scale: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, V) * scale
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    share = torch.full((3, 1), top_p, dtype=torch.float64)
    wanted = share * weights.sum(-1, keepdim=True, dtype=torch.float64)
    kept = [(weights >= cut).sum(-1) for cut in (nucleus_by_sort(weights, wanted), top_p_cut(weights, share))]
    assert (kept[0] - kept[1]).abs().max() <= 1  # sums in another order may differ in the last bit


@pytest.mark.gpu
def test_the_same_tokens_and_log_probabilities_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    logits = torch.randn(len(SETTINGS), V) * 4
    found = []
    for device, kernels in (("cpu", False), ("cuda", False), ("cuda", True)):
        sampler = sampler_on(device, SETTINGS, kernels)
        steps = [sampler.sample(logits.to(device), range(len(SETTINGS))).on_host() for _ in range(5)]
        torch.cuda.synchronize()
        found.append([(step.token_ids.tolist(), step.failures()) for step in steps])
        listed = [row is not None for row in steps[-1].logprobs]
        assert listed == ["logprobs" in options for options in SETTINGS]
    assert found[0] == found[1] == found[2]


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("options", SETTINGS)
def test_a_step_does_not_wait_for_the_device(options: dict[str, Any], kernels: bool) -> None:
    logits = torch.randn(4, V, device="cuda")
    sampler = sampler_on("cuda", [options] * 4, kernels)
    for _ in range(2):
        sampler.sample(logits, range(4)).on_host()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampled = sampler.sample(logits, range(4)).on_host()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert not sampled.failures()
