"""The sampler written the slow and obvious way: one row, one token at a time, float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pagedlc_engine.request import SamplingParams

_MASK = (1 << 64) - 1


def splitmix64(state: int, count: int) -> list[int]:
    """The first ``count`` outputs of SplitMix64."""
    outputs = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        outputs.append(z ^ (z >> 31))
    return outputs


def uniform(seed: int, counter: int) -> float:
    """The ``counter``-th number of the seed's stream."""
    state = splitmix64(seed & _MASK, 1)[0]
    return (splitmix64(state, counter + 1)[-1] >> 11) / 2.0**53


def edited_logits(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_token_ids: Sequence[int],
    bad_words: Sequence[Sequence[int]],
) -> list[float]:
    """Logits after bias, bans and penalties."""
    edited = [float(value) for value in logits]
    for token, bias in (params.logit_bias or {}).items():
        edited[token] += bias
    if len(output) < params.min_tokens:
        for token in stop_token_ids:
            edited[token] = -math.inf
    for word in bad_words:
        before = list(word[:-1])
        if not before or list(output[-len(before) :]) == before:
            edited[word[-1]] = -math.inf
    for token in {*prompt, *output}:
        value = edited[token]
        edited[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token in set(output):
        edited[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    return edited


def probabilities(edited: Sequence[float], params: SamplingParams) -> np.ndarray:
    """The distribution that is sampled from, float64 [V]. For distinct logits and a temperature above 0."""
    scaled = np.array(edited) / params.temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < params.min_p] = 0.0
    order = np.argsort(-weights)
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0.0
    if params.top_p < 1.0:
        before = 0.0
        total = weights.sum()
        for token in order:
            if before >= params.top_p * total:
                weights[token] = 0.0
            before += weights[token]
    return weights / weights.sum()
