"""Models that think before they answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_ways import all_ways, call_text, check_call_chunks, essence

from langchain_pagedlc import VLLMChat
from scripted_model import ScriptedLLM

ScriptedFactory = Callable[..., ScriptedLLM]

#: Writes thoughts of earlier answers back, and has a switch.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
THOUGHTS = "Hm, the user says hi.\nI could say hello."
ANSWER = f"<think>\n{THOUGHTS}\n</think>\n\nHello there, friend."


def thinking_model(scripted_llm: ScriptedFactory, script: Any, **options: Any) -> tuple[ScriptedLLM, VLLMChat]:
    llm = scripted_llm(script, chat_template=TEMPLATE)
    return llm, VLLMChat(**llm.options, max_tokens=200, **options)


async def test_thoughts_are_beside_the_text_in_every_way(scripted_llm: ScriptedFactory) -> None:
    _, chat = thinking_model(scripted_llm, ANSWER)
    for answer in await all_ways(chat, "Hi"):
        assert answer.text == "Hello there, friend."
        assert answer.additional_kwargs["reasoning_content"] == THOUGHTS
        blocks = answer.content_blocks
        assert blocks == [
            {"type": "reasoning", "reasoning": THOUGHTS},
            {"type": "text", "text": "Hello there, friend."},
        ]


def test_thoughts_stream(scripted_llm: ScriptedFactory) -> None:
    _, chat = thinking_model(scripted_llm, ANSWER)
    chunks = list(chat.stream("Hi"))
    thoughts = [chunk.additional_kwargs["reasoning_content"] for chunk in chunks if chunk.additional_kwargs]
    assert len(thoughts) > 4
    assert "".join(thoughts) == THOUGHTS
    assert not any(chunk.text and chunk.additional_kwargs for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == "Hello there, friend."


async def test_standard_content_blocks(scripted_llm: ScriptedFactory) -> None:
    _, chat = thinking_model(scripted_llm, ANSWER + "\n" + call_text("now"), output_version="v1")

    def now() -> str:
        """The time of day."""
        return ""

    for answer in await all_ways(chat.bind_tools([now]), "Hi"):
        assert isinstance(answer.content, list)
        kinds = [block["type"] for block in answer.content if isinstance(block, dict)]
        assert kinds == ["reasoning", "text", "tool_call"]
        reasoning, text, call = answer.content_blocks
        assert reasoning["reasoning"] == THOUGHTS  # type: ignore[typeddict-item]
        assert text["text"] == "Hello there, friend."  # type: ignore[typeddict-item]
        assert (call["name"], call["args"]) == ("now", {})  # type: ignore[typeddict-item]


async def test_thoughts_before_calls(scripted_llm: ScriptedFactory) -> None:
    _, chat = thinking_model(scripted_llm, f"<think>\n{THOUGHTS}\n</think>\n\n{call_text('search', q='x')}")

    def search(q: str) -> str:
        """Look it up."""
        return q

    for choice in ("auto", "any"):
        bound = chat.bind_tools([search], tool_choice=choice)
        first, *others = await all_ways(bound, "Hi")
        assert first.additional_kwargs["reasoning_content"] == THOUGHTS
        assert [(call["name"], call["args"]) for call in first.tool_calls] == [("search", {"q": "x"})]
        assert all(essence(other) == essence(first) for other in others)
        check_call_chunks(list(bound.stream("Hi")), ["search"])  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_thoughts_of_earlier_answers_go_to_the_template(scripted_llm: ScriptedFactory, version: str) -> None:
    llm, chat = thinking_model(scripted_llm, ANSWER, output_version=version)
    first = chat.invoke("Hi")
    chat.invoke([HumanMessage("Hi"), first, HumanMessage("More")])
    assert f"<|im_start|>assistant\n{ANSWER}<|im_end|>" in llm.turns[-1].prompt


def test_the_templates_switch(scripted_llm: ScriptedFactory) -> None:
    llm, chat = thinking_model(scripted_llm, "Hello.")
    answer = chat.invoke("Hi", chat_template_kwargs={"enable_thinking": False})
    assert llm.turns[-1].prompt.endswith("<think>\n\n</think>\n\n")
    assert (answer.text, answer.additional_kwargs) == ("Hello.", {})


def test_looking_for_thoughts_can_be_switched(scripted_llm: ScriptedFactory) -> None:
    _, chat = thinking_model(scripted_llm, ANSWER, reasoning=False)
    assert chat.invoke("Hi").text == ANSWER
    plain = VLLMChat(**scripted_llm(ANSWER).options)
    assert plain.invoke("Hi").text == ANSWER
    answer: AIMessage = plain.invoke("Hi", reasoning=True)
    assert answer.text == "Hello there, friend."
