"""LangChain's own unit suite for chat models."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_pagedlc import VLLMChat


@pytest.fixture(autouse=True)
def listed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite loads what it wrote with ``allowed_objects="all"``, which means: the packages on LangChain's list."""
    loader = import_module("langchain_core.load.load")
    path = tuple(VLLMChat.lc_id())
    monkeypatch.setitem(loader.ALL_SERIALIZABLE_MAPPINGS, path, path)
    monkeypatch.setattr(loader, "_default_class_paths_cache", {})


class TestVLLMChatUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[VLLMChat]:
        return VLLMChat

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2"}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return without_network(super().standard_chat_model_params)


def without_network(params: dict[str, Any]) -> dict[str, Any]:
    """The standard parameters, less those of a service on a network."""
    return {name: value for name, value in params.items() if name not in ("api_key", "timeout")}
