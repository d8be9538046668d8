"""Greedy answers of the default model are transformers' answers, token for token, however the engine computed them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedlc import LLM, RequestOutput, SamplingParams

TOPICS = ["the sea", "a letter home", "prime numbers", "bread", "the moon", "trains", "a red fox", "winter"]
TOPICS += ["tea", "maps"]
OPENINGS = [
    "Write one sentence about {}.",
    "Q: What do people like about {}?\nA:",
    "Once upon a time, someone who knew nothing of {} said:",
    "{}",
    "def describe():\n    # returns a text about {}\n    return",
]
SYSTEM = "You are a patient teacher. Answer in few words, and only what was asked. " * 3
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3, prompt_logprobs=0)
NEAR_TIE = 2e-4


def prompts() -> list[str]:
    """50 prompts: short and long, text and code, some with a common beginning."""
    made = [opening.format(topic) for topic in TOPICS for opening in OPENINGS]
    return [SYSTEM + text if number % 3 == 0 else text for number, text in enumerate(made)]


@pytest.fixture(scope="module")
def reference(smollm2_fp32: LLM) -> list[RequestOutput]:
    """All prompts in one mixed batch."""
    return smollm2_fp32.generate(prompts(), PARAMS)


@torch.inference_mode()
def test_every_token_is_the_one_transformers_finds_likeliest(reference: list[RequestOutput], hf_smollm2: Any) -> None:
    assert len(reference) >= 50
    for output in reference:
        answer = output.outputs[0]
        ids = output.prompt_token_ids + answer.token_ids
        logprobs = hf_smollm2(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        start = len(output.prompt_token_ids)
        assert len(answer.token_ids) == 16
        for offset, token in enumerate(answer.token_ids):
            row = logprobs[start + offset - 1]
            assert row[token] >= row.max() - NEAR_TIE, (output.prompt, offset)
            assert answer.logprobs is not None
            for candidate, given in answer.logprobs[offset].items():
                assert given.logprob == pytest.approx(float(row[candidate]), abs=1e-3)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        for position in range(1, start):
            given = output.prompt_logprobs[position]
            assert given is not None
            token = output.prompt_token_ids[position]
            assert given[token].logprob == pytest.approx(float(logprobs[position - 1][token]), abs=1e-3)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 32},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 8, "block_size": 32},
    ],
    ids=["chunks of 32 tokens", "no prefix cache", "eight at a time"],
)
def test_how_steps_are_cut_changes_nothing(options: dict[str, Any], reference: list[RequestOutput]) -> None:
    with LLM("smollm2", quantization=None, **options) as llm:
        assert tokens(llm.generate(prompts(), GREEDY)) == tokens(reference)


def test_a_warm_prefix_cache_changes_nothing_but_the_work(reference: list[RequestOutput]) -> None:
    with LLM("smollm2", quantization=None) as llm:
        cold = llm.generate(prompts(), GREEDY)
        warm = llm.generate(prompts(), GREEDY)
    assert tokens(cold) == tokens(warm) == tokens(reference)
    lengths = [len(output.prompt_token_ids) for output in warm]
    assert [output.num_cached_tokens for output in warm] == [min(n // 16 * 16, n - 1) for n in lengths]
    assert any(n % 16 == 0 for n in lengths), "no prompt is whole blocks"


def test_preemption_changes_nothing(smollm2_fp32: LLM) -> None:
    chosen = prompts()[1::5]
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM("smollm2", quantization=None, num_blocks=14, max_num_seqs=8, enable_prefix_caching=False) as llm:
        outputs = llm.generate(chosen, long)
        stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_blocks
    assert tokens(outputs) == tokens(smollm2_fp32.generate(chosen, long))
