"""Fixtures of the LlamaIndex tests: a scripted engine, and the default model loaded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llamaindex_fakes import FakeLLM

from llama_index.llms.pagedlc import Vllm
from llama_index.llms.pagedlc import settings as vllm_settings
from scripted_model import ScriptedLLM


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Every engine asked for, as (model, options); all of them are scripted."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def shared(model: str, **options: Any) -> FakeLLM:
        asked.append((model, options))
        return FakeLLM()

    monkeypatch.setattr(vllm_settings, "shared_llm", shared)
    return asked


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Vllm, FakeLLM]]:
    """Make a ``Vllm`` over a scripted engine; ``engine={...}`` sets the engine's fields."""

    def build(engine: dict[str, Any] | None = None, **options: Any) -> tuple[Vllm, FakeLLM]:
        fake = FakeLLM(**(engine or {}))
        monkeypatch.setattr(vllm_settings, "shared_llm", lambda model, **engine_options: fake)
        return Vllm(**options), fake

    return build


@pytest.fixture
def scripted(scripted_llm: Callable[..., ScriptedLLM]) -> Callable[..., tuple[Vllm, ScriptedLLM]]:
    """A ``Vllm`` whose model says what it is told, with the real engine, tokenizer and grammars around it."""

    def build(script: Any, engine: dict[str, Any] | None = None, **options: Any) -> tuple[Vllm, ScriptedLLM]:
        of_engine = {name: options.pop(name) for name in ("chat_template",) if name in options}
        llm = scripted_llm(script, **of_engine, **(engine or {}))
        return Vllm(**{"temperature": 0.0, **llm.options, **options}), llm

    return build


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """LlamaIndex's instrumentation events."""
    seen: list[Any] = []

    class Recorder(BaseEventHandler):
        def handle(self, event: Any, **kwargs: Any) -> None:
            seen.append(event)

    dispatcher = get_dispatcher()
    monkeypatch.setattr(dispatcher, "event_handlers", [*dispatcher.event_handlers, Recorder()])
    return seen


@pytest.fixture(scope="session")
def llm() -> Iterator[Vllm]:
    """The default model, greedy, with short answers, in exact arithmetic so that texts can be compared."""
    with Vllm(temperature=0.0, max_new_tokens=24, quantization=None) as loaded:
        yield loaded.load()
