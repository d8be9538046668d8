"""Token ids may come as any sequence of whole numbers: what tokenizers, NumPy and torch hand out."""

from __future__ import annotations

import asyncio
from array import array
from collections import UserList, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pagedlc import LLM, InvalidRequestError, SamplingParams
from tests.engine.tiny_models import tiny_llm

IDS = [39, 68, 75, 75, 78]  # "Hello" in the tiny model's tokens
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
ONE_PROMPT: dict[str, Any] = {
    "list": IDS,
    "tuple": tuple(IDS),
    "deque": deque(IDS),
    "own sequence": UserList(IDS),
    "array of 4 bytes": array("i", IDS),
    "array of 8 bytes": array("q", IDS),
    "NumPy": np.array(IDS),
    "NumPy, unsigned": np.array(IDS, dtype=np.uint16),
    "NumPy, every second": np.array([number for number in IDS for _ in range(2)])[::2],
    "NumPy numbers": list(np.array(IDS)),
    "tensor": torch.tensor(IDS),
    "tensor of 4 bytes": torch.tensor(IDS, dtype=torch.int32),
    "tensors of one number": list(torch.tensor(IDS)),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with tiny_llm(tmp_path_factory.mktemp("model")) as made:
        yield made


@pytest.fixture(scope="module")
def expected(llm: LLM) -> str:
    return llm.generate("Hello", GREEDY)[0].outputs[0].text


@pytest.mark.parametrize("form", ONE_PROMPT)
def test_every_form_is_the_same_prompt_whichever_way_it_is_asked(llm: LLM, expected: str, form: str) -> None:
    prompt = ONE_PROMPT[form]

    async def asynchronously() -> list[str]:
        chunks = [chunk.text async for chunk in llm.agenerate_stream(prompt, GREEDY)]
        return [(await llm.agenerate(prompt, GREEDY))[0].outputs[0].text, "".join(chunks)]

    outputs = [*llm.generate(prompt, GREEDY), *llm.generate([prompt, "Hello"], GREEDY)]
    outputs += [*llm.generate({"prompt_token_ids": prompt}, GREEDY), *llm.generate({"prompt": prompt}, GREEDY)]
    assert [output.prompt_token_ids for output in outputs] == [IDS] * 5
    assert all(type(token) is int for output in outputs for token in output.prompt_token_ids)
    assert all(output.prompt_token_ids is not prompt for output in outputs)
    assert [output.outputs[0].text for output in outputs] == [expected] * 5
    assert "".join(chunk.text for chunk in llm.generate_stream(prompt, GREEDY)) == expected
    assert asyncio.run(asynchronously()) == [expected] * 2
    assert llm.explain_prefix(prompt).num_tokens == len(IDS)


@pytest.mark.parametrize("make", [np.array, torch.tensor, list])
def test_two_dimensions_are_many_prompts_where_many_may_be_given(llm: LLM, expected: str, make: Any) -> None:
    found = llm.generate(make([IDS, IDS[::-1]]), GREEDY)
    assert [output.prompt_token_ids for output in found] == [IDS, IDS[::-1]]
    assert found[0].outputs[0].text == expected


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (np.array([[72, 101]]), r"ndarray of int64 with shape \(1, 2\)"),
        (torch.tensor([[72, 101]]), r"Tensor of torch.int64 with shape \(1, 2\)"),
        (np.array([1.0, 2.0]), r"ndarray of float64 with shape \(2,\)"),
        (torch.tensor([True, False]), r"Tensor of torch.bool with shape \(2,\)"),
        (torch.tensor(7), r"with shape \(\)"),
        (np.array([]), "empty"),
        ([1.0, 2.0], r"\[1.0, 2.0\]"),
        ([1, 2.5], r"\[1, 2.5\]"),
        ([[1, 2]], r"\[\[1, 2\]\]"),
        ({1, 2}, r"\{1, 2\}"),
        (7, "7"),
        (None, "None"),
    ],
)
def test_what_is_not_one_prompt_is_shown(llm: LLM, prompt: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate_stream(prompt, GREEDY)
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate({"prompt_token_ids": prompt}, GREEDY)
    with pytest.raises(InvalidRequestError, match=words):
        llm.explain_prefix(prompt)


@pytest.mark.parametrize("prompts", [np.array([1.0, 2.0]), torch.tensor([True, False]), np.array(7), [0.5, 1.5], 7])
def test_what_is_no_prompts_at_all_is_shown(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="this is none of them"):
        llm.generate(prompts, GREEDY)


def test_numbers_of_an_array_that_no_vocabulary_has(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="4294967296 has more"):
        llm.generate(np.array([1, 2**32]), GREEDY)
    with pytest.raises(InvalidRequestError, match="token id -100 is not"):
        llm.generate(torch.tensor([1, -100]), GREEDY)
