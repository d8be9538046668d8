"""What the engine answers, as LlamaIndex's chat and completion responses.

Every response carries, in ``additional_kwargs``, ``prompt_tokens``, ``completion_tokens``, ``total_tokens``,
``cached_tokens`` (prompt tokens served from the prefix cache), ``finish_reason``, ``stop_reason`` and
``timings`` (seconds); and in ``raw`` the same in the shape of an OpenAI response, with all ``n`` answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LogProb, MessageRole

from pagedlc import CompletionChunk, CompletionOutput, RequestOutput
from pagedlc_engine.request import TokenLogprobs

__all__ = ["Answer", "StreamCollector", "answer_from_output"]

#: Token id to its text.
TokenText = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, or a stream's answer so far, before it becomes a chat or a completion response.

    Args:
        text: The text so far.
        delta: What this chunk added; ``None`` when not streaming.
        logprobs: Per token of the answer (when streaming: of the delta), the chosen token first and then the
            likeliest; ``None`` when not asked for.
        details: For ``additional_kwargs``.
        raw: For ``raw``.
    """

    text: str
    delta: str | None
    logprobs: list[list[LogProb]] | None
    details: dict[str, Any]
    raw: dict[str, Any]

    def as_chat(self) -> ChatResponse:
        """The answer as an assistant message."""
        return ChatResponse(
            message=ChatMessage(role=MessageRole.ASSISTANT, content=self.text),
            delta=self.delta,
            logprobs=self.logprobs,
            additional_kwargs=self.details,
            raw=self.raw,
        )

    def as_completion(self) -> CompletionResponse:
        """The answer as a completion."""
        return CompletionResponse(
            text=self.text,
            delta=self.delta,
            logprobs=self.logprobs,
            additional_kwargs=self.details,
            raw=self.raw,
        )


def answer_from_output(output: RequestOutput, model: str, token_text: TokenText) -> Answer:
    """The first of a finished request's answers; the others are in ``raw["choices"]``."""
    first = output.outputs[0]
    return Answer(
        text=first.text,
        delta=None,
        logprobs=None if first.logprobs is None else _logprobs(first.logprobs, token_text),
        **_report(
            output.request_id,
            model,
            [_choice(each) for each in output.outputs],
            _usage(
                len(output.prompt_token_ids),
                sum(len(each.token_ids) for each in output.outputs),
                output.num_cached_tokens,
            ),
            asdict(output.timings),
        ),
    )


class StreamCollector:
    """Turns a request's chunks into answers so far.

    Args:
        model: Name to report.
        token_text: Token id to its text, for log-probabilities.
    """

    def __init__(self, model: str, token_text: TokenText) -> None:
        self._model = model
        self._token_text = token_text
        self._text = ""
        self._held_logprobs: list[TokenLogprobs] = []

    def add(self, chunk: CompletionChunk) -> Answer | None:
        """The answer with ``chunk``, or ``None`` while the chunk's text is still held back."""
        self._held_logprobs += chunk.logprobs or []
        if not chunk.text and chunk.finish_reason is None:
            return None
        self._text += chunk.text
        logprobs = _logprobs(self._held_logprobs, self._token_text) if self._held_logprobs else None
        self._held_logprobs = []
        choice = {
            "index": chunk.index,
            "text": self._text,
            "finish_reason": chunk.finish_reason,
            "stop_reason": chunk.stop_reason,
        }
        usage = _usage(chunk.num_prompt_tokens, chunk.num_generated_tokens, chunk.num_cached_tokens)
        report = _report(chunk.request_id, self._model, [choice], usage, asdict(chunk.timings))
        return Answer(text=self._text, delta=chunk.text, logprobs=logprobs, **report)


def _choice(output: CompletionOutput) -> dict[str, Any]:
    return {
        "index": output.index,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _report(
    request_id: str,
    model: str,
    choices: list[dict[str, Any]],
    usage: dict[str, Any],
    timings: dict[str, float | None],
) -> dict[str, dict[str, Any]]:
    details = {
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "finish_reason": choices[0]["finish_reason"],
        "stop_reason": choices[0]["stop_reason"],
        "timings": timings,
    }
    raw = {"id": request_id, "model": model, "choices": choices, "usage": usage, "timings": timings}
    return {"details": details, "raw": raw}


def _logprobs(positions: Sequence[TokenLogprobs], token_text: TokenText) -> list[list[LogProb]]:
    return [[_logprob(token_text(token), entry.logprob) for token, entry in each.items()] for each in positions]


def _logprob(text: str, logprob: float) -> LogProb:
    return LogProb(token=text, logprob=logprob, bytes=list(text.encode()))
