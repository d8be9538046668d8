"""``VLLMChat``: answers, streams, callbacks, usage and overrides, on scripted engines."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_fakes import CACHED_TOKENS, FakeRegistry, eventually

from langchain_pagedlc import VLLMChat
from pagedlc_engine.errors import InvalidRequestError

PROMPT = "user:Hi\n"
USAGE = {
    "input_tokens": len(PROMPT),
    "output_tokens": 5,
    "total_tokens": len(PROMPT) + 5,
    "input_token_details": {"cache_read": CACHED_TOKENS},
}
TIMINGS = {"queue_time": 0.1, "time_to_first_token": 0.2, "time_per_output_token": 0.3, "total_time": 0.5}


class Recorder(BaseCallbackHandler):
    """Remembers what LangChain reports."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.ends: list[LLMResult] = []
        self.errors: list[BaseException] = []
        self.metadata: list[dict[str, Any]] = []

    def on_chat_model_start(self, *args: Any, metadata: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.metadata.append(metadata or {})

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.ends.append(response)

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.errors.append(error)


class AsyncRecorder(AsyncCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []

    async def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.tokens.append(token)


def check_answer(answer: AIMessage) -> None:
    assert answer.text == "Hello"
    assert answer.usage_metadata == USAGE
    assert answer.response_metadata["model_name"] == "smollm2"
    assert answer.response_metadata["model_provider"] == "pagedlc"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["timings"] == TIMINGS


async def test_an_answer_says_what_it_cost(registry: FakeRegistry) -> None:
    chat = VLLMChat()
    check_answer(chat.invoke("Hi"))
    check_answer(await chat.ainvoke("Hi"))
    assert [call.method for call in registry.engine.calls] == ["generate_stream", "agenerate_stream"]


async def test_the_chunks_of_a_stream_add_up_to_the_answer(registry: FakeRegistry) -> None:
    chat = VLLMChat()
    streams = [list(chat.stream("Hi")), [chunk async for chunk in chat.astream("Hi")]]
    for chunks in streams:
        assert [chunk.text for chunk in chunks] == ["He", "l", "l", "o"]
        assert [chunk.chunk_position for chunk in chunks] == [None, None, None, "last"]
        assert [bool(chunk.usage_metadata) for chunk in chunks] == [False, False, False, True]
        check_answer(sum(chunks[1:], chunks[0]))
    whole = chat.invoke("Hi")
    assert sum(streams[0][1:], streams[0][0]).response_metadata == whole.response_metadata
    assert [call.method for call in registry.engine.calls] == ["generate_stream", "agenerate_stream", "generate_stream"]


async def test_async_runs_on_the_loops_own_thread(registry: FakeRegistry) -> None:
    chat = VLLMChat()
    await chat.ainvoke("Hi")
    async for _ in chat.astream("Hi"):
        pass
    await chat.abatch(["Hi", "Ho"])
    assert registry.engine.threads == {threading.get_ident()}


def test_stream_usage_can_be_switched_off(registry: FakeRegistry) -> None:
    assert all(chunk.usage_metadata is None for chunk in VLLMChat(stream_usage=False).stream("Hi"))
    assert all(chunk.usage_metadata is None for chunk in VLLMChat().stream("Hi", stream_usage=False))


def test_callbacks_see_every_chunk_once(registry: FakeRegistry) -> None:
    recorder = Recorder()
    list(VLLMChat().stream("Hi", config={"callbacks": [recorder]}))
    assert recorder.tokens == ["He", "l", "l", "o"]
    (end,) = recorder.ends
    assert end.generations[0][0].text == "Hello"
    assert end.generations[0][0].message.usage_metadata == USAGE  # type: ignore[union-attr]
    assert recorder.errors == []


async def test_async_callbacks_see_every_chunk_once(registry: FakeRegistry) -> None:
    recorder, async_recorder = Recorder(), AsyncRecorder()
    async for _ in VLLMChat().astream("Hi", config={"callbacks": [recorder, async_recorder]}):
        pass
    assert recorder.tokens == async_recorder.tokens == ["He", "l", "l", "o"]
    assert len(recorder.ends) == 1


def test_invoke_streams_inside_when_asked_to(registry: FakeRegistry) -> None:
    recorder = Recorder()
    answer = VLLMChat(streaming=True).invoke("Hi", config={"callbacks": [recorder]})
    check_answer(answer)
    assert recorder.tokens == ["He", "l", "l", "o"]


async def test_callbacks_see_errors(registry: FakeRegistry) -> None:
    chat, recorder = VLLMChat(), Recorder()
    config = {"callbacks": [recorder]}
    with pytest.raises(InvalidRequestError, match="bound to fail"):
        chat.invoke("fail", config=config)
    with pytest.raises(InvalidRequestError, match="bound to fail"):
        await chat.ainvoke("fail", config=config)
    with pytest.raises(InvalidRequestError, match="bound to fail"):
        list(chat.stream("fail", config=config))
    with pytest.raises(InvalidRequestError, match="bound to fail"):
        [chunk async for chunk in chat.astream("fail", config=config)]
    assert len(recorder.errors) == 4
    assert recorder.ends == []


def test_usage_is_counted_by_langchains_own_counter(registry: FakeRegistry) -> None:
    counter = UsageMetadataCallbackHandler()
    chat = VLLMChat(callbacks=[counter])
    chat.invoke("Hi")
    list(chat.stream("Hi"))
    assert counter.usage_metadata["smollm2"]["total_tokens"] == 2 * USAGE["total_tokens"]  # type: ignore[operator]


def test_sampling_parameters_of_the_model(registry: FakeRegistry) -> None:
    given: dict[str, Any] = {
        "n": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "min_tokens": 2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": 3,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "logit_bias": {4: -1.0},
        "bad_words": ["bad"],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "max_tokens": 9,
        "stop": ["x"],
    }
    VLLMChat(**given).invoke("Hi")
    params = registry.engine.calls[0].params.model_dump()
    expected = {**given, "stop": ("x",), "stop_token_ids": (5,), "bad_words": ("bad",)}
    assert {name: params[name] for name in expected} == expected


@pytest.mark.parametrize("way", ["kwargs", "bind"])
def test_a_call_can_override_every_parameter(registry: FakeRegistry, way: str) -> None:
    chat = VLLMChat(temperature=0.5, stop=["x"], max_tokens=9, seed=1, cache_salt="a", priority=1)
    overrides: dict[str, Any] = {
        "temperature": 0.0,
        "stop": ["y"],
        "max_new_tokens": 3,
        "top_k": 4,
        "min_tokens": 1,
        "cache_salt": "b",
        "priority": -1,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    if way == "kwargs":
        chat.invoke("Hi", **overrides)
        list(chat.stream("Hi", **overrides))
    else:
        chat.bind(**overrides).invoke("Hi")
        list(chat.bind(**overrides).stream("Hi"))
    for call in registry.engine.calls:
        params = call.params
        assert (params.temperature, params.stop, params.max_tokens, params.top_k) == (0.0, ("y",), 3, 4)
        assert (params.min_tokens, params.seed) == (1, 1)
        assert call.options["cache_salt"] == "b"
        assert call.options["priority"] == -1
        assert call.options["chat_template_kwargs"] == {"enable_thinking": False}
    chat.invoke("Hi")
    assert registry.engine.calls[-1].params.stop == ("x",)


async def test_an_unknown_keyword_of_a_call_names_the_nearest(registry: FakeRegistry) -> None:
    chat = VLLMChat()
    with pytest.raises(InvalidRequestError, match=r"'temprature'.*'temperature'"):
        chat.invoke("Hi", temprature=0)
    with pytest.raises(InvalidRequestError, match=r"'max_token'.*'max_tokens'"):
        await chat.bind(max_token=1).ainvoke("Hi")


def test_several_answers(registry: FakeRegistry) -> None:
    result = VLLMChat(n=3).generate([[HumanMessage("Hi")]])
    assert [generation.text for generation in result.generations[0]] == ["Hello"] * 3
    with pytest.raises(InvalidRequestError, match="n=3"):
        list(VLLMChat(n=3).stream("Hi"))


@pytest.mark.parametrize(
    ("asked", "top"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 2}, 2),
        ({"logprobs": 2}, 2),
        ({"top_logprobs": 1}, 1),
    ],
)
def test_logprobs(registry: FakeRegistry, asked: dict[str, Any], top: int) -> None:
    chat = VLLMChat(**asked)
    whole = chat.invoke("Hi").response_metadata["logprobs"]["content"]
    assert registry.engine.calls[0].params.logprobs == top
    assert [entry["token"] for entry in whole] == list("Hello")
    assert whole[0]["logprob"] == -1.5
    likeliest = ["?"] if top == 1 else ["?", "H"] if top == 2 else []
    assert [entry["token"] for entry in whole[0]["top_logprobs"]] == likeliest
    chunks = list(chat.stream("Hi"))
    assert sum(chunks[1:], chunks[0]).response_metadata["logprobs"]["content"] == whole


def test_no_logprobs_unless_asked_for(registry: FakeRegistry) -> None:
    assert "logprobs" not in VLLMChat(logprobs=False).invoke("Hi").response_metadata


def test_closing_a_stream_ends_the_generation(registry: FakeRegistry) -> None:
    chat = VLLMChat()
    registry.engine.endless = True
    stream = chat.stream("Hi")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert registry.engine.aborted == ["generate_stream"]


async def test_closing_an_async_stream_ends_the_generation(registry: FakeRegistry) -> None:
    chat = VLLMChat()
    registry.engine.endless = True
    stream = chat.astream("Hi")
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await eventually(lambda: registry.engine.aborted)
    assert registry.engine.aborted == ["agenerate_stream"]


@pytest.mark.parametrize("streaming", [False, True])
async def test_cancelling_a_task_ends_the_generation(registry: FakeRegistry, streaming: bool) -> None:
    chat = VLLMChat(streaming=streaming)
    registry.engine.endless = True
    task = asyncio.create_task(chat.ainvoke("Hi"))
    await eventually(lambda: registry.engine.calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert registry.engine.aborted == ["agenerate_stream"]


async def test_standard_content_blocks(registry: FakeRegistry) -> None:
    chat = VLLMChat(output_version="v1")
    answer = chat.invoke("Hi")
    assert answer.content == [{"type": "text", "text": "Hello"}]
    chunks = list(chat.stream("Hi"))
    whole: AIMessageChunk = sum(chunks[1:], chunks[0])
    assert [(block["type"], block["text"]) for block in whole.content_blocks] == [("text", "Hello")]  # type: ignore[typeddict-item]
    assert whole.usage_metadata == USAGE
    chat.invoke([HumanMessage("Hi"), answer, HumanMessage("More")])
    assert registry.engine.calls[-1].prompt[0][1] == {"role": "assistant", "content": "Hello"}
    stream = chat.stream_events("Hi", version="v3")
    assert stream.output.text == "Hello"
    assert stream.output.usage_metadata == USAGE


async def test_events_of_a_chain(registry: FakeRegistry) -> None:
    chain = ChatPromptTemplate.from_messages([("system", "Be {tone}."), ("human", "{question}")]) | VLLMChat()
    values = {"tone": "brief", "question": "Hi"}
    events = [event async for event in (chain | StrOutputParser()).astream_events(values, version="v2")]
    names = [event["event"] for event in events if event["event"].startswith("on_chat_model")]
    assert names == ["on_chat_model_start", *["on_chat_model_stream"] * 4, "on_chat_model_end"]
    assert registry.engine.calls[0].prompt == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ]


def test_tracing_metadata(registry: FakeRegistry) -> None:
    recorder = Recorder()
    chat = VLLMChat(temperature=0.5, max_tokens=7, stop=["x"])
    chat.invoke("Hi", config={"callbacks": [recorder]})
    chat.invoke("Hi", config={"callbacks": [recorder]}, temperature=0.25, stop=["y"])
    first, second = recorder.metadata
    assert first["ls_provider"] == "pagedlc"
    assert first["ls_model_name"] == "smollm2"
    assert first["ls_model_type"] == "chat"
    assert (first["ls_temperature"], first["ls_max_tokens"], first["ls_stop"]) == (0.5, 7, ["x"])
    assert (second["ls_temperature"], second["ls_stop"]) == (0.25, ["y"])


def test_tokens_are_counted_by_the_models_tokenizer(registry: FakeRegistry) -> None:
    chat = VLLMChat()
    assert chat.get_token_ids("Hi") == [72, 105]
    assert chat.get_num_tokens("Hi") == 2
    assert chat.get_num_tokens_from_messages([SystemMessage("s"), HumanMessage("Hi")]) == len("system:s\nuser:Hi\n")
    assert chat.get_num_tokens_from_messages([]) == 0

    def search(query: str) -> str:
        """Look something up."""
        return query

    with_tool = chat.get_num_tokens_from_messages([HumanMessage("Hi")], [search])
    chat.bind_tools([search], tool_choice="none").invoke("Hi")
    assert with_tool == len("".join(f"{m['role']}:{m['content']}\n" for m in registry.engine.calls[-1].prompt[0]))
    assert with_tool > len(PROMPT) + len("search")
    assert VLLMChat(custom_get_token_ids=lambda text: [1, 2, 3]).get_num_tokens("Hi") == 3


def test_the_profile_says_what_the_model_can_take(registry: FakeRegistry) -> None:
    assert VLLMChat().profile["max_input_tokens"] == 4096  # type: ignore[index]
    assert VLLMChat(profile={"max_input_tokens": 10}).profile == {"max_input_tokens": 10}
