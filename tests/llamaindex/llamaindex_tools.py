"""Tools, classes and prompts of the LlamaIndex tests."""

from __future__ import annotations

import json
from typing import Any

from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, Field


def get_weather(city: str) -> str:
    """Weather in a city."""
    return f"Snow in {city}."


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def now() -> str:
    """The time."""
    return "12:30"


TOOLS = [FunctionTool.from_defaults(function) for function in (get_weather, add, now)]


def call(name: str, /, **arguments: Any) -> str:
    """A tool call as the default model's format writes it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


class Address(BaseModel):
    """Where someone lives."""

    city: str
    code: int


class Person(BaseModel):
    """Someone a text speaks of."""

    name: str = Field(description="First and last name")
    age: int
    homes: list[Address] = []


PERSON = Person(name="Zoë Müller", age=42, homes=[Address(city="Zürich", code=8001)])
PERSON_JSON = PERSON.model_dump_json()
PROMPT = PromptTemplate("Who is it? {text}")

#: Opens the model's thoughts itself, as templates of reasoning models do.
THINKING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if not quiet %}<think>\n{% endif %}"
)
