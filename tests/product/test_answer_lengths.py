"""One limit on an answer's length, wherever nothing else is said; and the same names for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from langchain_pagedlc import VLLM, VLLMChat
from llama_index.llms.pagedlc import Vllm
from pagedlc import LLM, SamplingParams
from pagedlc.cli.app import run
from pagedlc.prompts import pair_params
from tests.engine.tiny_models import make_tiny_model

USUAL = 512


def test_an_answer_ends_after_512_tokens(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "tiny", max_position_embeddings=1024)
    with LLM(str(path), load_format="dummy", quantization=None, seed=1) as llm:
        [output] = llm.generate("Hello", SamplingParams(temperature=0, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == USUAL
    assert output.outputs[0].finish_reason == "length"


def test_no_parameters_are_the_usual_parameters() -> None:
    assert pair_params(None, 2) == [SamplingParams()] * 2


@pytest.mark.parametrize("make", [VLLM, VLLMChat, Vllm])
@pytest.mark.parametrize("name", [None, "max_tokens", "max_new_tokens"])
def test_the_integrations_have_the_same_limit_under_both_names(make: Any, name: str | None) -> None:
    model = make(model="smollm2") if name is None else make(model="smollm2", **{name: 7})
    own = "max_tokens" if make is VLLMChat else "max_new_tokens"
    assert getattr(model, own) == (USUAL if name is None else 7)


def test_the_chat_command_has_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("pagedlc.cli.chat.converse", lambda model, system, sampling, *_, **__: seen.append(sampling))
    assert run(["chat"]) == 0
    assert seen[0]["max_tokens"] == USUAL
