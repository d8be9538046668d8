"""What LlamaIndex asks of every LLM class: its ancestry, and that nothing it calls is missing."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import LLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.structured_llm import StructuredLLM

from llama_index.llms.pagedlc import Vllm

#: All that agents, engines and programs call.
METHODS = [
    *("chat", "complete", "stream_chat", "stream_complete", "achat", "acomplete", "astream_chat", "astream_complete"),
    *("predict", "stream", "apredict", "astream", "as_structured_llm"),
    *("structured_predict", "astructured_predict", "stream_structured_predict", "astream_structured_predict"),
    *("chat_with_tools", "achat_with_tools", "stream_chat_with_tools", "astream_chat_with_tools"),
    *("predict_and_call", "apredict_and_call", "get_tool_calls_from_response", "_prepare_chat_with_tools"),
]


def test_llm_class() -> None:
    names_of_base_classes = [base.__name__ for base in Vllm.__mro__]
    assert BaseLLM.__name__ in names_of_base_classes
    assert LLM.__name__ in names_of_base_classes
    assert FunctionCallingLLM.__name__ in names_of_base_classes
    assert not Vllm.__abstractmethods__
    assert Vllm.__module__.startswith("llama_index.llms.")


@pytest.mark.parametrize("name", METHODS[8:])
def test_every_method_takes_what_llama_index_gives_it(name: str) -> None:
    base = inspect.signature(getattr(FunctionCallingLLM, name)).parameters
    own = inspect.signature(getattr(Vllm, name)).parameters
    assert [parameter for parameter in base if parameter not in own] == []
    assert [own[parameter].kind for parameter in base] == [base[parameter].kind for parameter in base]


@pytest.mark.parametrize("name", METHODS[:8])
def test_the_eight_ways_are_its_own(name: str) -> None:
    assert name in vars(Vllm)
    asynchronous = inspect.iscoroutinefunction(getattr(Vllm, name))
    assert asynchronous == name.startswith("a")


def test_a_structured_llm_is_llama_index_s(make: Any) -> None:
    llm, _ = make()
    structured = llm.as_structured_llm(type("Empty", (ChatMessage,), {}))
    assert isinstance(structured, StructuredLLM)
    assert not type(structured).__abstractmethods__
    assert structured.to_dict()["class_name"] == "structured_llm"
