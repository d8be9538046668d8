"""Several answers to one prompt are what each alone would be."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import tiny_llm

from pagedlc import SamplingParams


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_answers_begin_where_the_prompt_ends(tmp_path: Path, length: int) -> None:
    """As many answers as the prompt has tokens: the step then samples as many tokens as it computes."""
    prompt = {"prompt_token_ids": [60 + 7 * place for place in range(length)]}
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with tiny_llm(tmp_path) as llm:
        (alone,) = llm.generate(prompt, greedy)[0].outputs
        answers = llm.generate(prompt, greedy.replace(n=length))[0].outputs
    assert [answer.token_ids for answer in answers] == [alone.token_ids] * length
