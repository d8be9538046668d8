"""How prompts, messages and keywords become requests, and answers become responses (scripted engine)."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler

from llama_index.llms.pagedlc import Vllm
from pagedlc_engine.errors import InvalidRequestError

USER = ChatMessage(role="user", content="Hi")
USER_DICT = {"role": "user", "content": "Hi"}


# -- completions --


def test_complete_sends_an_instruct_model_one_user_message(make: Any) -> None:
    llm, fake = make()
    assert llm.complete("Hi").text == "Hello"
    assert (fake.calls[0].method, fake.calls[0].prompt) == ("chat", [USER_DICT])


def test_complete_puts_the_system_prompt_first(make: Any) -> None:
    llm, fake = make(system_prompt="Be brief.")
    llm.complete("Hi")
    assert fake.calls[0].prompt == [{"role": "system", "content": "Be brief."}, USER_DICT]


def test_formatted_text_goes_in_as_it_is(make: Any) -> None:
    llm, fake = make(system_prompt="Be brief.", completion_to_prompt=str.upper)
    llm.complete("Hi", formatted=True)
    assert (fake.calls[0].method, fake.calls[0].prompt) == ("generate", "Hi")


def test_completion_to_prompt_replaces_the_chat_template(make: Any) -> None:
    llm, fake = make(completion_to_prompt=lambda prompt: f"<<{prompt}>>")
    llm.complete("Hi")
    assert (fake.calls[0].method, fake.calls[0].prompt) == ("generate", "<<Hi>>")


def test_a_model_without_chat_template_completes_text(make: Any) -> None:
    llm, fake = make(engine={"has_template": False}, system_prompt="Be brief.")
    llm.complete("Hi")
    llm.chat([USER])
    assert [call.method for call in fake.calls] == ["generate", "generate"]
    assert fake.calls[0].prompt == "Be brief.\n\nHi"
    assert fake.calls[1].prompt == "system: Be brief.\nuser: Hi\nassistant: "


# -- chat --


def test_messages_to_prompt_replaces_the_chat_template(make: Any) -> None:
    llm, fake = make(messages_to_prompt=lambda messages: "|".join(str(message) for message in messages))
    llm.chat([USER])
    assert (fake.calls[0].method, fake.calls[0].prompt) == ("generate", "user: Hi")


@pytest.mark.parametrize(
    ("role", "sent"),
    [
        (MessageRole.SYSTEM, "system"),
        (MessageRole.DEVELOPER, "system"),
        (MessageRole.USER, "user"),
        (MessageRole.ASSISTANT, "assistant"),
        (MessageRole.CHATBOT, "assistant"),
        (MessageRole.MODEL, "assistant"),
        (MessageRole.TOOL, "tool"),
        (MessageRole.FUNCTION, "tool"),
    ],
)
def test_every_role_has_a_counterpart(make: Any, role: MessageRole, sent: str) -> None:
    llm, fake = make()
    llm.chat([ChatMessage(role=role, content="x")])
    assert fake.calls[0].prompt == [{"role": sent, "content": "x"}]


def test_a_conversation_s_own_system_message_wins(make: Any) -> None:
    llm, fake = make(system_prompt="Be brief.")
    llm.chat([ChatMessage(role="system", content="Be long."), USER])
    assert fake.calls[0].prompt == [{"role": "system", "content": "Be long."}, USER_DICT]


def test_system_messages_in_a_row_become_one(make: Any) -> None:
    llm, fake = make()
    llm.chat([ChatMessage(role="system", content="A"), ChatMessage(role="system", content="B"), USER])
    assert fake.calls[0].prompt == [{"role": "system", "content": "A\n\nB"}, USER_DICT]


def test_a_tool_conversation_is_carried_over(make: Any) -> None:
    llm, fake = make()
    call = ToolCallBlock(tool_call_id="c1", tool_name="weather", tool_kwargs={"city": "Köln"})
    result = ChatMessage(role="tool", content="Rain", additional_kwargs={"tool_call_id": "c1", "name": "weather"})
    llm.chat([USER, ChatMessage(role="assistant", blocks=[ThinkingBlock(content="hm"), call]), result])
    function = {"name": "weather", "arguments": {"city": "Köln"}}
    assert fake.calls[0].prompt[1:] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "Rain", "tool_call_id": "c1", "name": "weather"},
    ]


def test_text_blocks_are_joined_and_cache_points_skipped(make: Any) -> None:
    llm, fake = make()
    blocks = [TextBlock(text="a"), CachePoint(cache_control={"type": "ephemeral"}), TextBlock(text="b")]
    llm.chat([ChatMessage(role="user", blocks=blocks)])
    assert fake.calls[0].prompt == [{"role": "user", "content": "a\nb"}]


def test_messages_may_be_plain_dicts(make: Any) -> None:
    llm, fake = make()
    llm.chat([USER_DICT])
    assert fake.calls[0].prompt == [USER_DICT]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hi", "messages must be a list of ChatMessage, or of mappings .*, not str"),
        (USER, "messages must be a list .* not ChatMessage"),
        (USER_DICT, "messages must be a list .* not dict"),
        (["hi"], r"messages\[0\] must be a ChatMessage or a mapping, not str"),
        ([USER, {"role": "robot", "content": "x"}], r"Invalid messages\[1\]: role: .*'robot'"),
    ],
    ids=str,
)
async def test_what_is_no_conversation_is_refused(make: Any, messages: Any, words: str) -> None:
    llm, fake = make()
    for way in (llm.chat, llm.stream_chat):
        with pytest.raises(InvalidRequestError, match=words):
            way(messages)
    for away in (llm.achat, llm.astream_chat):
        with pytest.raises(InvalidRequestError, match=words):
            await away(messages=messages)
    assert not fake.calls


@pytest.mark.parametrize("prompt", [[1, 2, 3], None, 7])
def test_a_prompt_that_is_no_text_is_refused_with_advice(make: Any, prompt: Any) -> None:
    llm, fake = make()
    for formatted in (False, True):
        with pytest.raises(InvalidRequestError, match=r"llm\.llm\.generate"):
            llm.complete(prompt, formatted=formatted)
    assert not fake.calls


def test_what_a_text_model_cannot_read_is_refused(make: Any) -> None:
    llm, fake = make()
    with pytest.raises(InvalidRequestError, match="ImageBlock"):
        llm.chat([ChatMessage(role="user", blocks=[ImageBlock(image=b"x")])])
    assert fake.calls == []


# -- sampling --


def test_the_constructor_s_sampling_reaches_the_engine(make: Any) -> None:
    llm, fake = make(temperature=0.5, top_k=3, top_p=0.9, n=2, stop="END", max_new_tokens=7, min_p=0.1, logprobs=1)
    llm.complete("Hi")
    params = fake.calls[0].params
    assert (params.temperature, params.top_k, params.top_p, params.n) == (0.5, 3, 0.9, 2)
    assert (params.stop, params.max_tokens, params.min_p, params.logprobs) == (("END",), 7, 0.1, 1)


def test_a_call_overrides_any_sampling_parameter(make: Any) -> None:
    llm, fake = make(temperature=0.5, stop=["END"], logprobs=1)
    llm.chat([USER], temperature=0.0, stop=["\n"], max_tokens=3, seed=5, logprobs=None, repetition_penalty=1.1)
    params = fake.calls[0].params
    assert (params.temperature, params.stop, params.max_tokens) == (0.0, ("\n",), 3)
    assert (params.seed, params.logprobs, params.repetition_penalty) == (5, None, 1.1)
    llm.chat([USER], max_new_tokens=None)
    assert fake.calls[1].params.max_tokens is None


def test_call_options_are_passed_on(make: Any) -> None:
    llm, fake = make()
    llm.chat([USER], priority=2, cache_salt="tenant", chat_template_kwargs={"enable_thinking": False})
    assert fake.calls[0].options == {"priority": 2, "cache_salt": "tenant"}
    assert fake.calls[0].template_options["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"temprature": 0}, "Did you mean 'temperature'"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 1, "max_new_tokens": 2}, "max_tokens=1 and max_new_tokens=2"),
        ({"best_of": 2}, "best_of"),
    ],
    ids=str,
)
def test_a_call_s_mistakes_are_named(make: Any, kwargs: dict[str, Any], says: str) -> None:
    llm, fake = make()
    with pytest.raises(InvalidRequestError, match=says):
        llm.complete("Hi", **kwargs)
    with pytest.raises(InvalidRequestError, match=says):
        llm.stream_complete("Hi", **kwargs)
    assert fake.calls == []


# -- answers --

DETAILS = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "cached_tokens": 4,
    "finish_reason": "stop",
    "stop_reason": None,
    "timings": {"queue_time": 0.1, "time_to_first_token": 0.2, "time_per_output_token": 0.3, "total_time": 0.4},
}


async def collect(stream: Any) -> list[Any]:
    return [part async for part in stream]


async def ask_every_way(llm: Vllm) -> tuple[list[Any], list[list[Any]]]:
    whole = [llm.complete("Hi"), llm.chat([USER]), await llm.acomplete("Hi"), await llm.achat([USER])]
    streams = [
        list(llm.stream_complete("Hi")),
        list(llm.stream_chat([USER])),
        await collect(await llm.astream_complete("Hi")),
        await collect(await llm.astream_chat([USER])),
    ]
    return whole, streams


def text_of(response: Any) -> str:
    return response.text if hasattr(response, "text") else response.message.content


async def test_all_eight_methods_report_text_and_usage(make: Any) -> None:
    llm, fake = make()
    whole, streams = await ask_every_way(llm)
    for response in [*whole, *(parts[-1] for parts in streams)]:
        assert text_of(response) == "Hello"
        assert response.additional_kwargs == DETAILS
        assert response.raw["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
        assert response.raw["model"] == "fake"
    assert [call.method for call in fake.calls] == ["chat"] * 8
    assert sorted(call.way for call in fake.calls) == ["async"] * 4 + ["sync"] * 4


async def test_formatted_completions_use_the_text_methods(make: Any) -> None:
    llm, fake = make()
    llm.complete("Hi", formatted=True)
    list(llm.stream_complete("Hi", formatted=True))
    await llm.acomplete("Hi", formatted=True)
    await collect(await llm.astream_complete("Hi", formatted=True))
    assert [(call.method, call.way) for call in fake.calls] == [
        ("generate", way) for way in ["sync", "sync", "async", "async"]
    ]


async def test_streams_have_deltas_and_the_text_so_far(make: Any) -> None:
    llm, _ = make()
    for parts in (await ask_every_way(llm))[1]:
        assert [part.delta for part in parts] == ["He", "l", "l", "o", ""]
        assert [text_of(part) for part in parts] == ["He", "Hel", "Hell", "Hello", "Hello"]
        assert [part.additional_kwargs["finish_reason"] for part in parts] == [None] * 4 + ["stop"]


async def test_logprobs_come_per_token_and_when_streaming_per_delta(make: Any) -> None:
    llm, _ = make(logprobs=2)
    whole, streams = await ask_every_way(llm)
    for response in whole:
        assert ["".join(entry.token for entry in each) for each in response.logprobs] == ["H?", "e?", "l?", "l?", "o?"]
        assert [entry.logprob for entry in response.logprobs[0]] == [-0.5, -1.5]
        assert response.logprobs[0][0].bytes == [72]
    for parts in streams:
        assert ["".join(each[0].token for each in part.logprobs or []) for part in parts] == ["He", "l", "l", "o", ""]


def test_all_of_several_answers_are_in_raw(make: Any) -> None:
    llm, _ = make(n=3)
    response = llm.complete("Hi")
    assert [choice["index"] for choice in response.raw["choices"]] == [0, 1, 2]
    assert response.additional_kwargs["completion_tokens"] == 15
    with pytest.raises(InvalidRequestError, match="n is 3"):
        llm.stream_complete("Hi")
    assert list(llm.stream_complete("Hi", n=1))[-1].text == "Hello"


async def test_closing_a_stream_ends_the_request(make: Any) -> None:
    llm, fake = make()
    stream = llm.stream_chat([USER])
    next(stream)
    stream.close()
    assert fake.ended == ["sync"]


# -- callbacks and instrumentation --


async def test_callbacks_see_start_and_end_of_every_method(make: Any) -> None:
    handler = LlamaDebugHandler(print_trace_on_end=False)
    llm, _ = make(callback_manager=CallbackManager([handler]))
    await ask_every_way(llm)
    pairs = handler.get_event_pairs(CBEventType.LLM)
    assert [len(pair) for pair in pairs] == [2] * 8


async def test_token_counting_takes_the_engine_s_numbers(make: Any) -> None:
    counter = TokenCountingHandler(tokenizer=str.split)
    llm, _ = make(callback_manager=CallbackManager([counter]))
    await ask_every_way(llm)
    assert (counter.prompt_llm_token_count, counter.completion_llm_token_count) == (8 * 7, 8 * 5)


async def test_instrumentation_events(make: Any, events: list[Any]) -> None:
    llm, _ = make()
    await ask_every_way(llm)
    names = [event.class_name() for event in events]
    for kind in ("Chat", "Completion"):
        assert names.count(f"LLM{kind}StartEvent") == 4
        assert names.count(f"LLM{kind}EndEvent") == 4
        assert names.count(f"LLM{kind}InProgressEvent") == 10
    start = next(event for event in events if event.class_name() == "LLMChatStartEvent")
    assert start.model_dict["model_name"] == "fake"
    end = next(event for event in events if event.class_name() == "LLMCompletionEndEvent")
    assert end.response.text == "Hello"
