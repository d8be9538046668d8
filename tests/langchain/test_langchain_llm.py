"""``VLLM``: completions, streams, callbacks and what comes with them, on scripted engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult
from langchain_core.prompts import PromptTemplate
from langchain_fakes import CACHED_TOKENS, FakeRegistry, eventually

from langchain_pagedlc import VLLM
from pagedlc_engine.errors import InvalidRequestError

USAGE = {
    "input_tokens": 2,
    "output_tokens": 5,
    "total_tokens": 7,
    "input_token_details": {"cache_read": CACHED_TOKENS},
}


class Recorder(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.ends: list[LLMResult] = []
        self.errors: list[BaseException] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.ends.append(response)

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.errors.append(error)


def check_info(info: dict[str, Any] | None) -> None:
    assert info is not None
    assert info["finish_reason"] == "stop"
    assert info["model_name"] == "smollm2"
    assert info["usage_metadata"] == USAGE
    assert info["timings"]["time_to_first_token"] == 0.2


async def test_completions(registry: FakeRegistry) -> None:
    llm = VLLM()
    assert llm.invoke("Hi") == "Hello"
    assert await llm.ainvoke("Hi") == "Hello"
    assert list(llm.stream("Hi")) == ["He", "l", "l", "o"]
    assert [text async for text in llm.astream("Hi")] == ["He", "l", "l", "o"]
    methods = ["generate", "agenerate", "generate_stream", "agenerate_stream"]
    assert [call.method for call in registry.engine.calls] == methods
    assert (PromptTemplate.from_template("{x}!") | llm).invoke({"x": "Hi"}) == "Hello"
    assert registry.engine.calls[-1].prompt == ["Hi!"]


async def test_generation_info(registry: FakeRegistry) -> None:
    llm = VLLM()
    for result in (llm.generate(["Hi", "Ho"]), await llm.agenerate(["Hi", "Ho"])):
        assert len(result.generations) == 2
        for (generation,) in result.generations:
            check_info(generation.generation_info)
        assert result.llm_output == {
            "model_name": "smollm2",
            "token_usage": {"prompt_tokens": 4, "completion_tokens": 10, "total_tokens": 14},
        }


async def test_callbacks(registry: FakeRegistry) -> None:
    llm, recorder = VLLM(), Recorder()
    config = {"callbacks": [recorder]}
    list(llm.stream("Hi", config=config))
    [text async for text in llm.astream("Hi", config=config)]
    assert recorder.tokens == ["He", "l", "l", "o"] * 2
    for end in recorder.ends:
        assert end.generations[0][0].text == "Hello"
        check_info(end.generations[0][0].generation_info)
    with pytest.raises(InvalidRequestError):
        llm.invoke("fail", config=config)
    with pytest.raises(InvalidRequestError):
        list(llm.stream("fail", config=config))
    with pytest.raises(InvalidRequestError):
        [text async for text in llm.astream("fail", config=config)]
    assert len(recorder.errors) == 3


def test_overrides(registry: FakeRegistry) -> None:
    llm = VLLM(temperature=0.5, stop=["x"])
    llm.invoke("Hi", temperature=0, stop=["y"], max_tokens=3, priority=2)
    llm.bind(max_new_tokens=4, cache_salt="s").invoke("Hi")
    first, second = registry.engine.calls
    assert (first.params.temperature, first.params.stop, first.params.max_tokens) == (0, ("y",), 3)
    assert first.options == {"priority": 2, "cache_salt": None}
    assert (second.params.temperature, second.params.stop, second.params.max_tokens) == (0.5, ("x",), 4)
    assert second.options == {"priority": 0, "cache_salt": "s"}
    with pytest.raises(InvalidRequestError, match=r"'temprature'.*'temperature'"):
        llm.invoke("Hi", temprature=0)


def test_several_answers(registry: FakeRegistry) -> None:
    result = VLLM(n=2).generate(["Hi"])
    assert [generation.text for generation in result.generations[0]] == ["Hello", "Hello"]
    with pytest.raises(InvalidRequestError, match="n=2"):
        list(VLLM(n=2).stream("Hi"))


def test_logprobs(registry: FakeRegistry) -> None:
    (generation,) = VLLM(logprobs=1).generate(["Hi"]).generations[0]
    content = generation.generation_info["logprobs"]["content"]  # type: ignore[index]
    assert [entry["token"] for entry in content] == list("Hello")
    assert [entry["token"] for entry in content[0]["top_logprobs"]] == ["?"]


async def test_ending_a_stream_ends_the_generation(registry: FakeRegistry) -> None:
    llm = VLLM()
    registry.engine.endless = True
    stream = llm.stream("Hi")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert registry.engine.aborted == ["generate_stream"]
    task = asyncio.create_task(llm.ainvoke("Hi"))
    await eventually(lambda: len(registry.engine.calls) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert registry.engine.aborted == ["generate_stream", "agenerate"]


def test_tracing_metadata(registry: FakeRegistry) -> None:
    params = VLLM(temperature=0.5, max_new_tokens=7, stop=["x"])._get_ls_params()
    assert params == {
        "ls_provider": "pagedlc",
        "ls_model_name": "smollm2",
        "ls_model_type": "llm",
        "ls_temperature": 0.5,
        "ls_max_tokens": 7,
        "ls_stop": ["x"],
    }
    assert VLLM()._get_ls_params(max_tokens=3)["ls_max_tokens"] == 3


def test_tokens_are_counted_by_the_models_tokenizer(registry: FakeRegistry) -> None:
    assert VLLM().get_token_ids("Hi") == [72, 105]
    assert VLLM().get_num_tokens("Hi") == 2
