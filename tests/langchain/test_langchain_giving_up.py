"""Batches that nobody waits for any more: Ctrl-C, a generator that is closed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage

from langchain_pagedlc import VLLM, VLLMChat
from pagedlc_engine.errors import PromptTooLongError
from scripted_model import ScriptedLLM

ScriptedFactory = Callable[..., ScriptedLLM]

PROMPTS = ["Long A", "Long B", "Long C", "Long D"]
ANSWERS = {"Long": "and on " * 2000, "Short": "Yes."}
MAX_TOKENS = 1500


class Ends(BaseCallbackHandler):
    """How runs ended."""

    def __init__(self) -> None:
        self.whole: list[UUID] = []
        self.errors: dict[UUID, str] = {}

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self.whole.append(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self.errors[run_id] = type(error).__name__


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def check_nothing_runs(llm: ScriptedLLM) -> None:
    until(lambda: llm.stats().num_running == llm.stats().num_waiting == 0)
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


def press_ctrl_c_when(condition: Callable[[], bool]) -> None:
    main = threading.get_ident()

    def press() -> None:
        until(condition)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "batch": lambda model, config: model.batch(PROMPTS, config),
    "batch-with-exceptions": lambda model, config: model.batch(PROMPTS, config, return_exceptions=True),
    "batch-two-at-a-time": lambda model, config: model.batch(PROMPTS, {**config, "max_concurrency": 2}),
    "batch-as-completed": lambda model, config: list(model.batch_as_completed(PROMPTS, config)),
}


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [VLLM, VLLMChat])
def test_ctrl_c_ends_a_batch(scripted_llm: ScriptedFactory, kind: Any, way: str) -> None:
    llm, ends = scripted_llm(ANSWERS), Ends()
    running = 2 if "two" in way else len(PROMPTS)
    press_ctrl_c_when(lambda: llm.stats().num_running == running)
    with pytest.raises(KeyboardInterrupt):
        WAYS[way](kind(**llm.options, max_tokens=MAX_TOKENS), {"callbacks": [ends]})
    check_nothing_runs(llm)
    until(lambda: len(ends.errors) == running)
    assert not ends.whole
    assert len(llm.turns) == running


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("streaming", [False, True])
def test_ctrl_c_ends_the_generation_of_several_conversations(scripted_llm: ScriptedFactory, streaming: bool) -> None:
    llm, ends = scripted_llm(ANSWERS), Ends()
    chat = VLLMChat(**llm.options, max_tokens=MAX_TOKENS, streaming=streaming)
    press_ctrl_c_when(lambda: llm.stats().num_running == len(PROMPTS))
    with pytest.raises(KeyboardInterrupt):
        chat.generate([[HumanMessage(prompt)] for prompt in PROMPTS], callbacks=[ends])
    check_nothing_runs(llm)
    until(lambda: [*ends.errors.values()] == ["CancelledError"] * len(PROMPTS))
    assert not ends.whole


@pytest.mark.parametrize("kind", [VLLM, VLLMChat])
def test_closing_the_generator_ends_what_is_not_done(scripted_llm: ScriptedFactory, kind: Any) -> None:
    llm, ends = scripted_llm(ANSWERS), Ends()
    model = kind(**llm.options, max_tokens=MAX_TOKENS)
    answers = model.batch_as_completed(["Short", *PROMPTS], {"callbacks": [ends]})
    index, answer = next(answers)
    assert (index, getattr(answer, "text", answer)) == (0, "Yes.")
    answers.close()
    check_nothing_runs(llm)
    until(lambda: len(ends.errors) == len(PROMPTS))
    assert len(ends.whole) == 1


def test_an_error_of_one_input_leaves_the_others_their_answers(scripted_llm: ScriptedFactory) -> None:
    llm, ends = scripted_llm(ANSWERS), Ends()
    with pytest.raises(PromptTooLongError):
        VLLMChat(**llm.options).batch(["Short", "word " * 20_000, "Short"], {"callbacks": [ends]})
    assert len(ends.whole) == 2


@pytest.mark.usefixtures("no_collection")
def test_a_batch_that_was_given_up_leaves_the_model_usable(scripted_llm: ScriptedFactory) -> None:
    llm = scripted_llm(ANSWERS)
    chat = VLLMChat(**llm.options, max_tokens=MAX_TOKENS)
    press_ctrl_c_when(lambda: llm.stats().num_running == len(PROMPTS))
    with pytest.raises(KeyboardInterrupt):
        chat.batch(PROMPTS)
    assert [answer.text for answer in chat.batch(["Short", "Short"])] == ["Yes.", "Yes."]
