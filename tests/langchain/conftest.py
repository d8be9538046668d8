"""Fixtures of the LangChain tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from langchain_fakes import FakeRegistry

import langchain_pagedlc._lease
from langchain_pagedlc import VLLMChat


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    """Scripted engines in place of real ones."""
    fake = FakeRegistry()
    monkeypatch.setattr(langchain_pagedlc._lease, "shared_llm", fake.shared_llm)
    return fake


@pytest.fixture(scope="session")
def held_engine() -> Iterator[VLLMChat]:
    """Keeps the default model's engine loaded, so that all tests of a session share it."""
    holder = VLLMChat(model="smollm2").load()
    yield holder
    holder.close()
