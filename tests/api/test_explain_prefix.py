"""``LLM.explain_prefix`` says what the cache would serve, and what a miss is due to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedlc import LLM, SamplingParams
from pagedlc_engine.device import kv_block_size
from tests.engine.tiny_models import tiny_llm

SHORT = SamplingParams(temperature=0, max_tokens=4)
RULES = "You are a patient librarian. Answer every question in one short sentence, and say where you read it. "


def conversation(opening: str, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": opening + RULES * 3}, {"role": "user", "content": question}]


def test_a_prompt_like_none_before_is_not_served(smollm2: LLM) -> None:
    found = smollm2.explain_prefix("Nobody has ever asked this about seventeen green umbrellas in the rain, so far.")
    assert found.num_cached_tokens == 0
    assert found.num_common_tokens < 16


def test_what_it_promises_is_what_the_request_then_gets(smollm2: LLM) -> None:
    messages = conversation("", "Which shelf holds maps?")
    smollm2.chat(messages, SHORT)
    other = conversation("", "Who wrote the oldest book?")
    found = smollm2.explain_prefix(other)
    assert found.num_cached_tokens > 48
    assert found.num_cached_tokens == smollm2.chat(other, SHORT)[0].num_cached_tokens
    assert found.num_tokens == len(smollm2.render_chat(other))


def test_nothing_is_loaded_or_compiled_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the engine was prepared")

    monkeypatch.setattr("pagedlc_engine.device.load_library", refuse)
    monkeypatch.setattr("pagedlc.served_model.start_host", refuse)
    found = LLM("smollm2").explain_prefix(conversation("", "Which shelf holds maps?"))
    assert found.num_cached_tokens == 0
    assert found.num_tokens > 48


@pytest.mark.parametrize("options", [{}, {"block_size": 32}, {"quantization": None}])
def test_the_block_size_said_before_loading_is_the_engines(tmp_path: Path, options: dict[str, Any]) -> None:
    with tiny_llm(tmp_path, **options) as llm:
        before = kv_block_size(llm.config)
        assert llm.load()._ready().block_size == before


def test_a_date_in_front_is_pointed_out(smollm2: LLM) -> None:
    smollm2.chat(conversation("Today is Monday. ", "Which shelf holds maps?"), SHORT)
    found = smollm2.explain_prefix(conversation("Today is Friday. ", "Which shelf holds maps?"))
    assert found.num_cached_tokens < 16
    assert found.earlier_text is not None
    assert found.this_text is not None
    assert "Monday" in found.earlier_text
    assert "Friday" in found.this_text
    assert "differs" in found.reason
    assert "Monday" in str(found)


def test_the_next_turn_hits_the_answer_too(smollm2: LLM) -> None:
    messages = conversation("", "Name one river.")
    answer = smollm2.chat(messages, SamplingParams(temperature=0, max_tokens=40))[0]
    longer = [
        *messages,
        {"role": "assistant", "content": answer.outputs[0].text},
        {"role": "user", "content": "And another one?"},
    ]
    found = smollm2.explain_prefix(longer)
    known = len(answer.prompt_token_ids) + len(answer.outputs[0].token_ids)
    assert found.num_cached_tokens >= (known - 1) // 16 * 16 - 16


def test_an_emptied_cache_is_named_as_the_reason(smollm2: LLM) -> None:
    messages = conversation("", "Is there a reading room?")
    smollm2.chat(messages, SHORT)
    smollm2.reset_prefix_cache()
    found = smollm2.explain_prefix(messages)
    assert found.num_cached_tokens == 0
    assert "left the cache" in found.reason


def test_another_salt_shares_nothing(smollm2: LLM) -> None:
    messages = conversation("", "Is there a reading room?")
    smollm2.chat(messages, SHORT)
    assert smollm2.explain_prefix(messages).num_cached_tokens > 0
    assert smollm2.explain_prefix(messages, cache_salt="someone else").num_cached_tokens == 0
