"""Batches: everything in the engine at once, each run with its own callbacks and its own error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_fakes import FakeRegistry

from langchain_pagedlc import VLLM, VLLMChat
from pagedlc_engine.errors import InvalidRequestError

MANY = 80
PROMPTS = [f"prompt {number}" for number in range(MANY)]
Model = type[VLLM] | type[VLLMChat]


class Runs(BaseCallbackHandler):
    """Counts how each run began and ended."""

    def __init__(self) -> None:
        self.started: list[UUID] = []
        self.ended: list[UUID] = []
        self.failed: list[UUID] = []

    def on_llm_start(self, serialized: Any, prompts: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self.started.append(run_id)

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self.started.append(run_id)

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self.ended.append(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self.failed.append(run_id)


def texts(answers: Any) -> list[str]:
    return [answer if isinstance(answer, str) else answer.text for answer in answers]


@pytest.fixture(params=[VLLM, VLLMChat])
def model(request: pytest.FixtureRequest, registry: FakeRegistry) -> Any:
    return request.param()


@pytest.mark.parametrize("return_exceptions", [False, True])
async def test_a_batch_is_in_the_engine_all_at_once(
    model: Any, registry: FakeRegistry, return_exceptions: bool
) -> None:
    registry.engine.company = MANY
    assert texts(model.batch(PROMPTS, return_exceptions=return_exceptions)) == ["Hello"] * MANY
    registry.engine.most_running = 0
    assert texts(await model.abatch(PROMPTS, return_exceptions=return_exceptions)) == ["Hello"] * MANY


async def test_a_batch_taken_as_it_completes_is_in_the_engine_all_at_once(model: Any, registry: FakeRegistry) -> None:
    registry.engine.company = MANY
    assert sorted(index for index, _ in model.batch_as_completed(PROMPTS)) == list(range(MANY))
    registry.engine.most_running = 0
    assert sorted([index async for index, _ in model.abatch_as_completed(PROMPTS)]) == list(range(MANY))


async def test_generate_admits_all_prompts_at_once(registry: FakeRegistry) -> None:
    llm, chat = VLLM(), VLLMChat()
    conversations = [[HumanMessage(prompt)] for prompt in PROMPTS]
    ways: list[Callable[[], Any]] = [lambda: llm.generate(PROMPTS), lambda: chat.generate(conversations)]
    registry.engine.company = MANY
    for way in ways:
        registry.engine.most_running = 0
        assert [generation.text for (generation,) in way().generations] == ["Hello"] * MANY
    registry.engine.most_running = 0
    assert len((await llm.agenerate(PROMPTS)).generations) == MANY
    registry.engine.most_running = 0
    assert len((await chat.agenerate(conversations)).generations) == MANY


async def test_a_users_max_concurrency_is_kept(model: Any, registry: FakeRegistry) -> None:
    registry.engine.company = 3
    config = {"max_concurrency": 3}
    assert texts(model.batch(PROMPTS, config)) == ["Hello"] * MANY
    assert registry.engine.most_running == 3
    assert texts(await model.abatch(PROMPTS, config)) == ["Hello"] * MANY
    assert registry.engine.most_running == 3
    assert len(list(model.batch_as_completed(PROMPTS, config))) == MANY
    assert registry.engine.most_running == 3


async def test_an_error_is_its_own_prompts(model: Any) -> None:
    prompts = ["one", "fail", "three"]
    for answers in (
        model.batch(prompts, return_exceptions=True),
        await model.abatch(prompts, return_exceptions=True),
    ):
        assert texts([answers[0], answers[2]]) == ["Hello", "Hello"]
        assert isinstance(answers[1], InvalidRequestError)
    with pytest.raises(InvalidRequestError, match="bound to fail"):
        model.batch(prompts)
    with pytest.raises(InvalidRequestError, match="bound to fail"):
        await model.abatch(prompts)


async def test_each_prompt_of_a_batch_is_a_run(model: Any) -> None:
    prompts = ["one", "fail", "three"]
    for use_async in (False, True):
        runs = Runs()
        config = {"callbacks": [runs]}
        if use_async:
            await model.abatch(prompts, config, return_exceptions=True)
        else:
            model.batch(prompts, config, return_exceptions=True)
        assert len(set(runs.started)) == 3
        assert len(set(runs.ended)) == 2
        assert len(set(runs.failed)) == 1
        assert {*runs.ended, *runs.failed} == {*runs.started}


def test_callbacks_given_per_prompt_see_only_theirs(model: Any) -> None:
    first, second = Runs(), Runs()
    model.batch(["one", "two"], [{"callbacks": [first]}, {"callbacks": [second]}])
    assert len(first.started) == len(second.started) == 1
    assert first.started != second.started


def test_generate_of_several_conversations_reports_each_run(registry: FakeRegistry) -> None:
    runs = Runs()
    run_id = UUID(int=1)
    conversations = [[HumanMessage("one")], [HumanMessage("two")]]
    result = VLLMChat().generate(conversations, callbacks=[runs], run_id=run_id)
    assert {run.run_id for run in result.run or ()} == set(runs.started) == set(runs.ended)
    assert run_id in runs.started
    with pytest.raises(InvalidRequestError):
        VLLMChat().generate([[HumanMessage("one")], [HumanMessage("fail")]], callbacks=[runs])
    assert len(runs.failed) == 1


async def test_an_empty_batch_is_empty(model: Any) -> None:
    assert model.batch([]) == []
    assert await model.abatch([]) == []
    assert list(model.batch_as_completed([])) == []


def test_a_chain_hands_its_whole_batch_to_the_engine(registry: FakeRegistry) -> None:
    chain = ChatPromptTemplate.from_template("{question}") | VLLMChat().bind(temperature=0) | StrOutputParser()
    registry.engine.company = MANY
    assert chain.batch([{"question": prompt} for prompt in PROMPTS]) == ["Hello"] * MANY


def test_call_options_reach_every_prompt_of_a_batch(model: Any, registry: FakeRegistry) -> None:
    model.batch(["one", "two"], stop=["x"], temperature=0)
    assert {call.params.stop for call in registry.engine.calls} == {("x",)}
    assert {call.params.temperature for call in registry.engine.calls} == {0.0}
