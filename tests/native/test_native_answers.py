"""Answers of the default model repeat: whatever is in the cache, in the batch, and however the prompt is cut."""

from __future__ import annotations

import pytest

from pagedlc import LLM, RequestOutput, SamplingParams

STORY = "It was the last ferry of the evening, and only four passengers had come aboard. " * 6
PROMPTS = [
    STORY + "The first of them",
    STORY + "Outside, the rain",
    "def fibonacci(n):",
    "A letter to a neighbour about a borrowed ladder:\n\nDear Anna,",
    "The capital of France is",
]
PARAMS = [
    SamplingParams(temperature=temperature, seed=11, max_tokens=12, ignore_eos=True, logprobs=2)
    for temperature in (0.0, 1.0, 0.0, 1.0, 0.0)
]


def said(outputs: list[RequestOutput]) -> list[tuple[object, ...]]:
    """Everything that could differ, to the last bit."""
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.usefixtures("library")
def test_answers_repeat_to_the_last_bit(smollm2: LLM) -> None:
    alone, warm = [], []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        smollm2.reset_prefix_cache()
        alone += said(smollm2.generate(prompt, params))
        warm += said(smollm2.generate(prompt, params))
    assert warm == alone
    assert said(smollm2.generate(PROMPTS, PARAMS)) == alone
    smollm2.reset_prefix_cache()
    assert said(smollm2.generate(PROMPTS, PARAMS)) == alone
    with LLM("smollm2", max_num_batched_tokens=40, block_size=32) as chunked:
        assert said(chunked.generate(PROMPTS, PARAMS)) == alone
