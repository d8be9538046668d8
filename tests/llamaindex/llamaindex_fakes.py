"""A stand-in for ``pagedlc.LLM`` with scripted answers, so that translation is tested without a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pagedlc import CompletionChunk, SamplingParams
from pagedlc.beside import Beside
from pagedlc.interruption import RunningAnswers
from pagedlc.outputs import Timings
from pagedlc_engine.request import Logprob

NUM_PROMPT_TOKENS = 7
CACHED_TOKENS = 4
TIMINGS = Timings(queue_time=0.1, time_to_first_token=0.2, time_per_output_token=0.3, total_time=0.4)


class FakeTokenizer:
    """One token per character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(char) for char in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))

    def token_text(self, token_id: int) -> str:
        return chr(token_id)


class FakeTemplate:
    """A chat template that knows tools."""

    def __init__(self, available: bool) -> None:
        self.available = available

    def source(self, *, with_tools: bool = False) -> str:
        return "{{ messages }} <tool_call> {{ tools }}"


class Rendered(list[int]):
    """Token ids that remember what they were rendered from."""

    def __init__(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
        super().__init__([1])
        self.messages = messages
        self.options = options


@dataclass
class FakeLLM:
    """Answers ``answer``, one character per token, and remembers what it was asked."""

    answer: str = "Hello"
    has_template: bool = True
    model_name: str = "fake"
    max_model_len: int = 4096
    calls: list[SimpleNamespace] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    loaded: bool = False

    def __post_init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.chat_template = FakeTemplate(self.has_template)
        self.running = RunningAnswers()
        self.beside = Beside()

    def load(self) -> FakeLLM:
        self.loaded = True
        return self

    def abort(self, request_id: str) -> None:
        self.ended.append(request_id)

    def render_chat(
        self, messages: list[dict[str, Any]], tools: Any = None, must_fit: bool = False, **options: Any
    ) -> Rendered:
        return Rendered(messages, {name: value for name, value in {"tools": tools, **options}.items() if value})

    def generate_stream(self, prompt: Any, params: SamplingParams, **options: Any) -> Iterator[CompletionChunk]:
        self._note("sync", prompt, params, options)
        try:
            yield from self._chunks(params)
        finally:
            self.ended.append("sync")

    async def agenerate_stream(
        self, prompt: Any, params: SamplingParams, **options: Any
    ) -> AsyncIterator[CompletionChunk]:
        self._note("async", prompt, params, options)
        try:
            for chunk in self._chunks(params):
                yield chunk
        finally:
            self.ended.append("async")

    def _note(self, way: str, prompt: Any, params: SamplingParams, options: dict[str, Any]) -> None:
        """``method`` is ``chat`` for what went through the template; ``template_options`` are the template's then."""
        options = {name: value for name, value in options.items() if name not in ("request_id", "whole")}
        chats = isinstance(prompt, Rendered)
        self.calls.append(
            SimpleNamespace(
                method="chat" if chats else "generate",
                way=way,
                prompt=prompt.messages if chats else prompt,
                params=params,
                options=options,
                template_options=prompt.options if chats else {},
            )
        )

    def _chunks(self, params: SamplingParams) -> Iterator[CompletionChunk]:
        """The first character is held back and comes with the second; the end is a chunk without text."""
        texts = ["", self.answer[:2], *self.answer[2:], ""]
        tokens = [*self.answer, ""]
        for count, (text, token) in enumerate(zip(texts, tokens, strict=True), start=1):
            last = token == ""
            for index in range(params.n):
                yield CompletionChunk(
                    request_id="r-1",
                    index=index,
                    text=text,
                    token_ids=[] if last else [ord(token)],
                    logprobs=[_logprobs(token)] if params.logprobs is not None and not last else None,
                    finish_reason="stop" if last else None,
                    stop_reason=None,
                    num_prompt_tokens=NUM_PROMPT_TOKENS,
                    num_cached_tokens=CACHED_TOKENS,
                    timings=TIMINGS,
                    num_generated_tokens=count - last,
                )


def _logprobs(char: str) -> dict[int, Logprob]:
    return {ord(char): Logprob(-0.5, 1), ord("?"): Logprob(-1.5, 2)}
