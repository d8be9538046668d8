"""Prompts far too long for the model are refused before they are tokenized; long ones do not hold up an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from langchain_pagedlc import VLLM, VLLMChat
from llama_index.llms.pagedlc import Vllm
from pagedlc import LLM, PromptTooLongError
from pagedlc.tokenizer import Tokenizer

HUGE = "All work and no play makes Jack a dull boy. " * 2500  # 110,000 characters
LONG = HUGE[:20_000]
OPTIONS: dict[str, Any] = {"model": "smollm2", "max_model_len": 1024}


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def drained(stream: Any) -> None:
    async for _ in stream:
        pass


BLOCKING: dict[str, Callable[[str], object]] = {
    "generate": lambda text: LLM(**OPTIONS).generate(text),
    "generate, as a dict": lambda text: LLM(**OPTIONS).generate({"prompt": text}),
    "chat": lambda text: LLM(**OPTIONS).chat(ask(text)),
    "generate_stream": lambda text: list(LLM(**OPTIONS).generate_stream(text)),
    "chat_stream": lambda text: list(LLM(**OPTIONS).chat_stream(ask(text))),
    "VLLMChat.invoke": lambda text: VLLMChat(**OPTIONS).invoke(text),
    "VLLM.invoke": lambda text: VLLM(**OPTIONS).invoke(text),
    "Vllm.complete": lambda text: Vllm(**OPTIONS).complete(text),
    "Vllm.complete, as it is": lambda text: Vllm(**OPTIONS).complete(text, formatted=True),
}
ASYNC: dict[str, Callable[[str], Awaitable[object]]] = {
    "agenerate": lambda text: LLM(**OPTIONS).agenerate(text),
    "agenerate, several": lambda text: LLM(**OPTIONS).agenerate([text[:5000]] * (len(text) // 5000)),
    "agenerate, as a dict": lambda text: LLM(**OPTIONS).agenerate([{"prompt": text}]),
    "achat": lambda text: LLM(**OPTIONS).achat(ask(text)),
    "agenerate_stream": lambda text: drained(LLM(**OPTIONS).agenerate_stream(text)),
    "achat_stream": lambda text: drained(LLM(**OPTIONS).achat_stream(ask(text))),
    "VLLMChat.ainvoke": lambda text: VLLMChat(**OPTIONS).ainvoke(text),
    "VLLMChat.astream": lambda text: drained(VLLMChat(**OPTIONS).astream(text)),
    "VLLM.ainvoke": lambda text: VLLM(**OPTIONS).ainvoke(text),
    "VLLM.astream": lambda text: drained(VLLM(**OPTIONS).astream(text)),
    "Vllm.acomplete": lambda text: Vllm(**OPTIONS).acomplete(text),
    "Vllm.acomplete, as it is": lambda text: Vllm(**OPTIONS).acomplete(text, formatted=True),
}


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Length and thread of each text that is tokenized."""
    seen: list[tuple[int, int]] = []
    encode = Tokenizer.encode

    def noting(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        seen.append((len(text), threading.get_ident()))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noting)
    return seen


@pytest.mark.parametrize("way", BLOCKING)
def test_a_prompt_far_too_long_is_refused_before_it_is_tokenized(way: str, tokenized: list[tuple[int, int]]) -> None:
    with pytest.raises(
        PromptTooLongError, match=r"has 110\d{3} characters.*at most 1023 tokens .*max_model_len is 1024.*at most 8192"
    ):
        BLOCKING[way](HUGE)
    assert not tokenized


@pytest.mark.parametrize("way", ASYNC)
def test_long_prompts_are_tokenized_beside_the_event_loop(way: str, tokenized: list[tuple[int, int]]) -> None:
    with pytest.raises(PromptTooLongError):
        asyncio.run(ASYNC[way](LONG))  # type: ignore[arg-type]
    assert tokenized
    assert threading.get_ident() not in {thread for _, thread in tokenized}


def test_of_several_prompts_the_one_far_too_long_is_named() -> None:
    with pytest.raises(PromptTooLongError, match="Prompt 1: The prompt has 110000 characters"):
        LLM(**OPTIONS).generate(["Hello", HUGE])


def test_a_conversation_that_does_not_fit_can_still_be_counted() -> None:
    chat = VLLMChat(**OPTIONS)
    assert chat.get_num_tokens_from_messages([chat._convert_input(HUGE).to_messages()[0]]) > 20_000
    assert len(LLM(**OPTIONS).render_chat(ask(HUGE))) > 20_000
