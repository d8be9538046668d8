"""A stand-in for ``pagedlc.LLM`` with scripted answers, so that translation is tested without a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pagedlc import CompletionChunk, CompletionOutput, RequestOutput, SamplingParams
from pagedlc.outputs import Timings
from pagedlc_engine.request import Logprob

PROMPT_TOKENS = list(range(7))
CACHED_TOKENS = 4
TIMINGS = Timings(queue_time=0.1, time_to_first_token=0.2, time_per_output_token=0.3, total_time=0.4)


class FakeTokenizer:
    """One token per character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(char) for char in text]

    def token_text(self, token_id: int) -> str:
        return chr(token_id)


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
        self.chat_template = SimpleNamespace(available=self.has_template)

    def load(self) -> FakeLLM:
        self.loaded = True
        return self

    def generate(self, prompt: str, params: SamplingParams, **options: Any) -> list[RequestOutput]:
        return self._whole("generate", prompt, params, options)

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams, **options: Any) -> list[RequestOutput]:
        return self._whole("chat", messages, params, options)

    async def agenerate(self, prompt: str, params: SamplingParams, **options: Any) -> list[RequestOutput]:
        return self._whole("agenerate", prompt, params, options)

    async def achat(self, messages: Any, params: SamplingParams, **options: Any) -> list[RequestOutput]:
        return self._whole("achat", messages, params, options)

    def generate_stream(self, prompt: str, params: SamplingParams, **options: Any) -> Iterator[CompletionChunk]:
        return self._stream("generate_stream", prompt, params, options)

    def chat_stream(self, messages: Any, params: SamplingParams, **options: Any) -> Iterator[CompletionChunk]:
        return self._stream("chat_stream", messages, params, options)

    def agenerate_stream(self, prompt: str, params: SamplingParams, **options: Any) -> AsyncIterator[CompletionChunk]:
        return self._astream("agenerate_stream", prompt, params, options)

    def achat_stream(self, messages: Any, params: SamplingParams, **options: Any) -> AsyncIterator[CompletionChunk]:
        return self._astream("achat_stream", messages, params, options)

    def _note(self, method: str, prompt: Any, params: SamplingParams, options: dict[str, Any]) -> None:
        options.pop("use_tqdm", None)
        self.calls.append(SimpleNamespace(method=method, prompt=prompt, params=params, options=options))

    def _whole(self, method: str, prompt: Any, params: SamplingParams, options: dict[str, Any]) -> list[RequestOutput]:
        self._note(method, prompt, params, options)
        outputs = [
            CompletionOutput(
                index=index,
                text=self.answer,
                token_ids=[ord(char) for char in self.answer],
                logprobs=None if params.logprobs is None else [_logprobs(char) for char in self.answer],
                cumulative_logprob=None,
                finish_reason="stop",
                stop_reason=None,
            )
            for index in range(params.n)
        ]
        return [
            RequestOutput(
                request_id="r-1",
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=PROMPT_TOKENS,
                prompt_logprobs=None,
                outputs=outputs,
                finished=True,
                num_cached_tokens=CACHED_TOKENS,
                timings=TIMINGS,
            )
        ]

    def _chunks(self, params: SamplingParams) -> Iterator[CompletionChunk]:
        """The first character is held back and comes with the second; the end is a chunk without text."""
        texts = ["", self.answer[:2], *self.answer[2:], ""]
        tokens = [*self.answer, ""]
        for count, (text, token) in enumerate(zip(texts, tokens, strict=True), start=1):
            last = token == ""
            yield CompletionChunk(
                request_id="r-1",
                index=0,
                text=text,
                token_ids=[] if last else [ord(token)],
                logprobs=[_logprobs(token)] if params.logprobs is not None and not last else None,
                finish_reason="stop" if last else None,
                stop_reason=None,
                num_prompt_tokens=len(PROMPT_TOKENS),
                num_cached_tokens=CACHED_TOKENS,
                timings=TIMINGS,
                num_generated_tokens=count - last,
            )

    def _stream(self, method: str, prompt: Any, params: SamplingParams, options: Any) -> Iterator[CompletionChunk]:
        self._note(method, prompt, params, options)
        try:
            yield from self._chunks(params)
        finally:
            self.ended.append(method)

    async def _astream(
        self, method: str, prompt: Any, params: SamplingParams, options: Any
    ) -> AsyncIterator[CompletionChunk]:
        self._note(method, prompt, params, options)
        try:
            for chunk in self._chunks(params):
                yield chunk
        finally:
            self.ended.append(method)


def _logprobs(char: str) -> dict[int, Logprob]:
    return {ord(char): Logprob(-0.5, 1), ord("?"): Logprob(-1.5, 2)}
