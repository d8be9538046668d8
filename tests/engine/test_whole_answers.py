"""Answers that are handed over in one piece say the same as those that come token by token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedlc import LLM, SamplingParams
from pagedlc_engine.client import Mailbox
from pagedlc_engine.request import Request
from tests.engine.tiny_models import tiny_llm


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with tiny_llm(tmp_path_factory.mktemp("whole")) as made:
        yield made.load()


@pytest.mark.parametrize("options", [{}, {"logprobs": 2, "prompt_logprobs": 1}, {"stop": ("e",)}])
def test_generate_equals_the_stream(llm: LLM, options: dict[str, object]) -> None:
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=40, **options)  # type: ignore[arg-type]
    chunks = list(llm.generate_stream("What is in the box?", params))
    (output,) = llm.generate("What is in the box?", params)
    answer = output.outputs[0]
    assert answer.text == "".join(chunk.text for chunk in chunks)
    assert answer.token_ids == [token for chunk in chunks for token in chunk.token_ids]
    assert answer.finish_reason == chunks[-1].finish_reason
    rows = [row for chunk in chunks for row in chunk.logprobs or []]
    assert (answer.logprobs or []) == rows
    assert (output.prompt_logprobs is not None) == ("prompt_logprobs" in options)


def test_a_whole_answer_comes_as_one_delta(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    handle = llm._ready().submit(Request("whole", [1, 2, 3], params, whole=True))
    deltas = list(handle)
    assert [len(delta.token_ids) for delta in deltas] == [20]


def test_giving_up_a_whole_answer_brings_what_there_is(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    client, mailbox = llm._ready(), Mailbox(1)
    handle = client.submit(Request("given up", [1, 2, 3], params, whole=True), mailbox)
    while client.stats().num_running == 0:
        pass
    steps = client.stats().num_steps
    while client.stats().num_steps < steps + 4:
        pass
    handle.abort()
    (delta,) = mailbox.take()
    assert delta.finish_reason in ("abort", "length")
    assert len(delta.token_ids) >= 3
