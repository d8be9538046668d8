"""The LangChain models on the default model: what a user gets, from construction to the last token."""

from __future__ import annotations

import ast
import asyncio
import inspect
import pickle
import runpy
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langchain_fakes import eventually

from langchain_pagedlc import VLLM, VLLMChat
from pagedlc import ModelNotFoundError, PromptTooLongError

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTION: list[BaseMessage] = [
    SystemMessage("You are a guide in the mountains. " * 10),
    HumanMessage("Which mountain is the highest?"),
]


@pytest.fixture
def chat(held_engine: VLLMChat) -> VLLMChat:
    return VLLMChat(model="smollm2", temperature=0, max_tokens=12)


def whole(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    return sum(chunks[1:], chunks[0])


async def test_every_way_of_asking_gives_the_same_answer(chat: VLLMChat) -> None:
    answers = [
        chat.invoke(QUESTION),
        await chat.ainvoke(QUESTION),
        whole(list(chat.stream(QUESTION))),
        whole([chunk async for chunk in chat.astream(QUESTION)]),
    ]
    assert answers[0].text
    assert len({answer.text for answer in answers}) == 1
    assert len({answer.response_metadata["finish_reason"] for answer in answers}) == 1
    expected = chat.get_num_tokens_from_messages(QUESTION)
    for answer in answers:
        usage = answer.usage_metadata
        assert usage is not None
        assert usage["input_tokens"] == expected
        assert 0 < usage["output_tokens"] <= 12
    for answer in answers[1:]:
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0  # type: ignore[index,typeddict-item]
        timings = answer.response_metadata["timings"]
        assert 0 <= timings["queue_time"] <= timings["time_to_first_token"] <= timings["total_time"]


def test_the_next_turn_of_a_conversation_is_served_from_the_cache(chat: VLLMChat) -> None:
    first = chat.invoke(QUESTION)
    second = chat.invoke([*QUESTION, first, HumanMessage("And the second highest?")])
    used, cached = second.usage_metadata["input_tokens"], second.usage_metadata["input_token_details"]["cache_read"]  # type: ignore[index,typeddict-item]
    assert cached >= first.usage_metadata["input_tokens"] // 16 * 16  # type: ignore[index]
    assert cached < used


async def test_a_batch_answers_each_prompt(chat: VLLMChat) -> None:
    prompts = [f"Count: {'one ' * length}" for length in range(1, 9)]
    expected = [chat.get_num_tokens_from_messages([HumanMessage(prompt)]) for prompt in prompts]
    for answers in (chat.batch(prompts), await chat.abatch(prompts)):
        assert all(answer.text for answer in answers)
        assert [answer.usage_metadata["input_tokens"] for answer in answers] == expected  # type: ignore[index]


async def test_a_prompt_that_is_too_long_hurts_only_itself(chat: VLLMChat) -> None:
    prompts = ["Hello", "word " * (chat.llm.max_model_len + 1), "Good day"]
    llm = VLLM(model="smollm2", max_new_tokens=4)
    for answers in (
        chat.batch(prompts, return_exceptions=True),
        await chat.abatch(prompts, return_exceptions=True),
        llm.batch(prompts, return_exceptions=True),
        await llm.abatch(prompts, return_exceptions=True),
    ):
        assert [isinstance(answer, PromptTooLongError) for answer in answers] == [False, True, False]


def test_sampling_is_repeatable_with_a_seed(chat: VLLMChat) -> None:
    warm = chat.bind(temperature=1.5, seed=11)
    assert warm.invoke(QUESTION).text == warm.invoke(QUESTION).text
    assert len({chat.invoke(QUESTION, temperature=1.5, seed=seed).text for seed in range(4)}) > 1


def test_a_stop_string_ends_the_answer(chat: VLLMChat) -> None:
    text = chat.invoke(QUESTION).text
    word = text.split()[1]
    answer = chat.invoke(QUESTION, stop=[word])
    assert answer.text == text[: text.index(word)]
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["stop_reason"] == word
    assert whole(list(chat.stream(QUESTION, stop=[word]))).text == answer.text


def test_logprobs_have_readable_tokens(chat: VLLMChat) -> None:
    answer = chat.invoke(QUESTION, logprobs=True, top_logprobs=2)
    content = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content).startswith(answer.text)
    for entry in content:
        assert entry["logprob"] == max(other["logprob"] for other in entry["top_logprobs"])
        assert len(entry["top_logprobs"]) == 2


def long_answer(chat: VLLMChat) -> dict[str, Any]:
    return {"max_tokens": chat.llm.max_model_len // 2, "ignore_eos": True}


async def test_a_closed_stream_leaves_the_engine(chat: VLLMChat) -> None:
    stream = chat.stream(QUESTION, **long_answer(chat))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    await eventually(lambda: chat.llm.stats().num_running == 0)
    async_stream = chat.astream(QUESTION, **long_answer(chat))
    await anext(async_stream)
    await async_stream.aclose()  # type: ignore[attr-defined]
    await eventually(lambda: chat.llm.stats().num_running == 0)


async def test_a_cancelled_task_leaves_the_engine(chat: VLLMChat) -> None:
    tasks = [asyncio.create_task(chat.ainvoke(QUESTION, **long_answer(chat))) for _ in range(3)]
    await eventually(lambda: chat.llm.stats().num_running == 3)
    for task in tasks:
        task.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True))
    await eventually(lambda: chat.llm.stats().num_running == 0)


async def test_many_tasks_and_threads_some_of_which_give_up(chat: VLLMChat) -> None:
    batch = asyncio.create_task(asyncio.to_thread(chat.batch, ["Hello"] * 8))
    patient = [asyncio.create_task(chat.ainvoke(f"Say {number}.")) for number in range(12)]
    hasty = [asyncio.create_task(chat.ainvoke(QUESTION, **long_answer(chat))) for _ in range(12)]
    await eventually(lambda: chat.llm.stats().num_running > 8)
    for task in hasty:
        task.cancel()
    answers = [*await asyncio.gather(*patient), *await batch]
    assert all(answer.text for answer in answers)
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*hasty, return_exceptions=True))
    await eventually(lambda: chat.llm.stats().num_running == 0)
    stats = chat.llm.stats()
    assert stats.num_free_blocks == stats.num_blocks


def test_models_share_one_engine(chat: VLLMChat) -> None:
    llm = VLLM(model="smollm2", max_new_tokens=4, temperature=0)
    twin = pickle.loads(pickle.dumps(chat))
    assert llm.llm is chat.llm
    assert twin.llm is chat.llm
    assert len(pickle.dumps(chat)) < 100_000
    assert llm.invoke("One, two, three,").strip()


def test_what_is_wrong_is_said_before_anything_loads(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        VLLMChat(model=str(tmp_path / "nowhere"))
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        VLLM(model=str(tmp_path / "nowhere"))


def code_blocks(documentation: str) -> Iterator[str]:
    block: list[str] = []
    for line in [*inspect.cleandoc(documentation).splitlines(), "end"]:
        if line.startswith("    ") or (block and not line):
            block.append(line)
        elif block:
            yield textwrap.dedent("\n".join(block)).strip()
            block = []


@pytest.mark.parametrize("model_class", [VLLM, VLLMChat])
async def test_the_guide_in_the_docstring_runs(held_engine: VLLMChat, model_class: type[VLLM | VLLMChat]) -> None:
    blocks = [
        block for block in code_blocks(model_class.__doc__ or "") if not block.startswith(("pip ", "ConfigError"))
    ]
    assert len(blocks) >= 3
    names: dict[str, Any] = {}
    for block in blocks:
        code = compile(block, model_class.__name__, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)
        if inspect.iscoroutine(result):
            await result


def test_the_quickstart_runs(held_engine: VLLMChat, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "langchain_quickstart.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("from the cache") == 4
    assert " 0 from the cache" not in printed


def test_the_agent_of_the_documentation_ends_with_its_answer(held_engine: VLLMChat) -> None:
    pytest.importorskip("langchain.agents")
    page = (EXAMPLES.parent / "docs" / "tools.md").read_text()
    names: dict[str, Any] = {}
    exec(page.partition("## Agents of small models")[2].partition("```python\n")[2].partition("```")[0], names)
    first, second = (message for message in names["answer"]["messages"] if message.type == "ai")
    assert [call["name"] for call in first.tool_calls] == ["weather"]
    assert not second.tool_calls
    assert names["answer"]["structured_response"].city == "Oslo"
    assert second.usage_metadata["input_token_details"]["cache_read"] >= first.usage_metadata["input_tokens"] // 16 * 16
