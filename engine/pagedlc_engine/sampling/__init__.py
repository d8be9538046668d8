"""Logits to token ids: one batched call per step, on the device the logits are on."""

from pagedlc_engine.sampling.logprobs import prompt_logprobs
from pagedlc_engine.sampling.masks import Allowed
from pagedlc_engine.sampling.sampler import SampledTokens, Sampler, SamplerKernels

__all__ = ["Allowed", "SampledTokens", "Sampler", "SamplerKernels", "prompt_logprobs"]
