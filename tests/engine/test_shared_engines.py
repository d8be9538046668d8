"""Who shares an engine, and what happens to the others when one of them is done."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny_model

from langchain_pagedlc import VLLMChat
from pagedlc import LLM, EngineClosedError, SamplingParams, shared_llm
from pagedlc.registry import Registry

OPTIONS: dict[str, Any] = {"load_format": "dummy", "quantization": None, "num_blocks": 50, "device": "cpu"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(make_tiny_model(tmp_path / "tiny"))


@pytest.mark.parametrize(
    "options",
    [
        {"trust_remote_code": True},
        {"max_num_seqs": 64},
        {"max_num_batched_tokens": 512},
        {"block_size": 16},
        {"dtype": "float32"},
        {"gpu_memory_utilization": 0.5, "enforce_eager": True},
    ],
    ids=str,
)
def test_options_that_change_nothing_share_the_engine(
    model: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry()
    held = registry.get(model, **OPTIONS)
    assert registry.get(model, **OPTIONS, **options) is held
    assert not caplog.records


@pytest.mark.parametrize(
    ("gpus", "options", "shares"),
    [
        (1, {"device": "cuda"}, True),
        (1, {"device": "cuda:0"}, True),
        (2, {"device": "cuda:0"}, False),
        (2, {"device": "cuda:1"}, False),
        (1, {"device": "cpu"}, False),
        (1, {"dtype": "bfloat16", "block_size": 64, "max_num_seqs": 256, "attention_backend": "triton"}, True),
        (1, {"quantization": None}, True),
        (1, {"attention_backend": "torch"}, False),
        (1, {"dtype": "float16"}, False),
    ],
    ids=str,
)
def test_engines_on_a_gpu_are_shared_alike(
    model: str, gpus: int, options: dict[str, Any], shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    registry = Registry()
    held = registry.get(model, load_format="dummy", num_blocks=50)
    assert (registry.get(model, load_format="dummy", num_blocks=50, **options) is held) is shares


def test_other_options_take_another_engine_and_the_log_names_them(model: str, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    held = registry.get(model, **OPTIONS)
    other = registry.get(model, **OPTIONS, max_num_batched_tokens=99)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert registry.get(model, **OPTIONS, max_num_seqs=8, seed=3) not in (held, other)
    (record,) = caplog.records
    assert "(max_num_seqs=8, not 64; seed=3, not None)" in record.getMessage()


def test_code_beside_a_tokenizer_runs_only_for_those_who_trust_it(model: str) -> None:
    registry = Registry()
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    Path(model, "tokenizer_config.json").write_text(json.dumps(config))
    held = registry.get(model, **OPTIONS)
    assert registry.get(model, **OPTIONS, trust_remote_code=True) is not held


@pytest.mark.loads
def test_a_with_block_leaves_a_shared_engine_to_the_others() -> None:
    options: dict[str, Any] = {**OPTIONS, "seed": 71}
    chat = VLLMChat(model="smollm2", max_tokens=2, engine_options=options)
    with shared_llm("smollm2", **options) as llm:
        assert llm is chat.llm
    assert chat.invoke("Hi").response_metadata["finish_reason"]
    llm.close()
    with pytest.raises(EngineClosedError, match=r"smollm2 was closed.*Make a new LLM \(or VLLMChat"):
        chat.invoke("Hi")


@pytest.mark.loads
def test_an_engine_that_nobody_shares_ends_with_its_with_block(model: str) -> None:
    with LLM(model, **OPTIONS) as llm:
        llm.generate([[1]], SamplingParams(max_tokens=1))
    assert llm.closed
