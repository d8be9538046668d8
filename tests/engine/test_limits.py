"""What an engine refuses before it loads anything, and what a request is told it cannot have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny_model, tiny_llm

from pagedlc import (
    LLM,
    ConfigError,
    InvalidRequestError,
    ModelNotFoundError,
    OutOfMemoryError,
    PromptTooLongError,
    SamplingParams,
    UnsupportedModelError,
)
from pagedlc_engine import engine as engine_module


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Every test here fails when weights are read, unless it says that it needs them."""
    if "loads" not in request.keywords:

        def refuse(*_args: Any, **_kwargs: Any) -> None:
            raise AssertionError("weights were loaded")

        monkeypatch.setattr(engine_module, "load_model", refuse)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seq": 4}, "Did you mean 'max_num_seqs'"),
        ({"block_size": 20}, "16, 32 or 64"),
        ({"max_model_len": 1_000_000}, "at most 512"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"dtype": "float8"}, "dtype"),
        ({"max_model_len": 1}, "max_model_len: Input should be greater than or equal to 2"),
        ({"num_blocks": 2**63}, "num_blocks: Input should be less"),
        ({"max_num_batched_tokens": 2**80}, "max_num_batched_tokens: Input should be less"),
        ({"kv_cache_memory_bytes": 2**70}, "kv_cache_memory_bytes: Input should be less"),
    ],
)
def test_impossible_options_are_refused_at_once(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_llm(tmp_path, **options)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))


def test_an_architecture_that_is_not_supported_names_those_that_are(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "tiny", architectures=["GPT2LMHeadModel"], model_type="gpt2")
    with pytest.raises(UnsupportedModelError, match="Qwen3ForCausalLM"):
        LLM(str(path), load_format="dummy")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda llm: llm.agenerate(""), "empty"),
        (lambda llm: llm.agenerate(["", "Hi"]), "Prompt 0: The prompt is empty"),
        (lambda llm: llm.agenerate_stream(""), "empty"),
        (lambda llm: llm.agenerate([5.0]), "token ids"),
        (lambda llm: llm.achat([]), "empty"),
        (lambda llm: llm.achat_stream([]), "empty"),
        (lambda llm: llm.achat([{"role": "usr", "content": "Hi"}]), "did you mean 'user'"),
        (lambda llm: llm.achat([{"role": "user"}]), "no content"),
    ],
)
def test_what_is_wrong_with_a_request_of_asyncio_is_said_before_anything_is_loaded(
    tmp_path: Path, wrong: Callable[[LLM], Any], words: str
) -> None:
    async def ask() -> None:
        asked = wrong(tiny_llm(tmp_path))
        await (anext(asked) if isinstance(asked, AsyncGenerator) else asked)

    with pytest.raises(InvalidRequestError, match=words):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda llm: llm.generate(""), "empty"),
        (lambda llm: llm.generate_stream(""), "empty"),
        (lambda llm: llm.chat([]), "empty"),
        (lambda llm: llm.chat_stream([{"role": "human", "content": "Hi"}]), "did you mean 'user'"),
    ],
)
def test_what_is_wrong_with_a_request_is_said_before_anything_is_loaded(
    tmp_path: Path, wrong: Callable[[LLM], Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        wrong(tiny_llm(tmp_path))


def test_a_prompt_that_cannot_fit_is_refused_with_the_sizes(tmp_path: Path) -> None:
    llm = tiny_llm(tmp_path)
    with pytest.raises(PromptTooLongError, match=r"600 tokens.*511.*Shorten it: the model was made for no more\.$"):
        llm.generate([[1] * 600], SamplingParams(max_tokens=2))


def test_what_the_model_allows_is_advised(tmp_path: Path) -> None:
    llm = tiny_llm(tmp_path, max_model_len=100)
    with pytest.raises(PromptTooLongError, match=r"max_model_len is 100.*raise max_model_len \(to at most 512\)"):
        llm.generate([[1] * 600], SamplingParams(max_tokens=2))


@pytest.mark.loads
def test_the_longest_prompt_that_fits_gets_its_one_token(tmp_path: Path) -> None:
    with tiny_llm(tmp_path) as llm:
        [output] = llm.generate([[1] * 511], SamplingParams(max_tokens=50, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 1
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.loads
def test_a_small_cache_shortens_the_context_and_says_so(tmp_path: Path) -> None:
    with tiny_llm(tmp_path, num_blocks=5) as llm:
        llm.load()
        assert llm.max_model_len == 64
        with pytest.raises(PromptTooLongError, match="max_model_len is 64"):
            llm.generate([[1] * 100], SamplingParams(max_tokens=2))
        [output] = llm.generate([[1] * 30], SamplingParams(max_tokens=100, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 34


@pytest.mark.parametrize("cache", [{"num_blocks": 5}, {"num_blocks": None, "kv_cache_memory_bytes": 5 * 4096}])
def test_a_context_that_was_asked_for_must_fit_the_cache(tmp_path: Path, cache: dict[str, Any]) -> None:
    decides = "num_blocks" if cache["num_blocks"] else "kv_cache_memory_bytes"
    with pytest.raises(
        ConfigError, match=rf"max_model_len is 200 tokens.*64\. Lower max_model_len, or raise {decides}\."
    ):
        tiny_llm(tmp_path, max_model_len=200, **cache).load()


def test_a_cache_without_room_for_anything_is_refused_with_the_bytes_it_needs(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemoryError, match=r"of 4,096 bytes each\. Raise kv_cache_memory_bytes, or use a smaller"):
        tiny_llm(tmp_path, num_blocks=None, kv_cache_memory_bytes=8191).load()


@pytest.mark.loads
@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({"max_model_len": 2}, 1),
        ({"max_num_batched_tokens": 1, "max_num_seqs": 1}, 6),
        ({"max_num_batched_tokens_while_streaming": 1}, 6),
        ({"block_size": 64, "max_model_len": 5}, 4),
        ({"num_blocks": 2, "enable_prefix_caching": False}, 6),
        ({"num_blocks": None, "kv_cache_memory_bytes": 8192}, 6),
        ({"gpu_memory_utilization": 1e-9}, 6),
        ({"max_num_seqs": 2**31 - 1, "max_num_batched_tokens": 2**31 - 1}, 6),
    ],
)
def test_an_engine_of_the_narrowest_options_answers_all_the_same(
    tmp_path: Path, options: dict[str, Any], length: int
) -> None:
    with tiny_llm(tmp_path, **options) as llm:
        params = SamplingParams(max_tokens=6, n=3, ignore_eos=True, seed=1)
        outputs = llm.generate([[1], [2]], params)
        assert [len(answer.token_ids) for output in outputs for answer in output.outputs] == [length] * 6
        assert sum(len(chunk.token_ids) for chunk in llm.generate_stream([3], params)) == 3 * length


@pytest.mark.loads
def test_dynamic_rotary_scaling_stretches_the_context_when_asked_for(tmp_path: Path) -> None:
    scaling = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    path = make_tiny_model(tmp_path / "tiny", **scaling)
    options: dict[str, Any] = {"load_format": "dummy", "quantization": None, "num_blocks": 200}
    assert LLM(str(path), **options).max_model_len == 512
    with pytest.raises(ConfigError, match="at most 1024"):
        LLM(str(path), max_model_len=1025, **options)
    with LLM(str(path), max_model_len=1024, **options) as llm:
        [output] = llm.generate([[7] * 800], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 3
