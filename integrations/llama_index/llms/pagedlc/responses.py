"""What the engine answers, as LlamaIndex's chat and completion responses.

Every response carries, in ``additional_kwargs``, ``prompt_tokens``, ``completion_tokens``, ``total_tokens``,
``cached_tokens`` (prompt tokens served from the prefix cache), ``finish_reason``, ``stop_reason`` and
``timings`` (seconds); and in ``raw`` the same in the shape of an OpenAI response, with all ``n`` answers. Tool calls
that cannot be carried out, being cut off, are in ``additional_kwargs["invalid_tool_calls"]`` and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LogProb, MessageRole

from llama_index.llms.pagedlc.blocks import answer_blocks, tool_call_dicts
from pagedlc import CompletionChunk
from pagedlc.tools import AnswerEvent, ReasoningDelta, TextDelta, TurnDelta
from pagedlc.tools import ChatMessage as Message
from pagedlc_engine.request import TokenLogprobs

__all__ = ["Answer", "AnswerCollector"]

#: Token id to its text.
TokenText = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, or a stream's answer so far, before it becomes a chat or a completion response.

    Args:
        message: Text, thoughts and calls so far.
        delta: The text that this piece added; ``None`` when not streaming.
        logprobs: Per token of the answer (when streaming: of the delta), the chosen token first and then the
            likeliest; ``None`` when not asked for.
        details: For ``additional_kwargs``.
        raw: For ``raw``.
    """

    message: Message
    delta: str | None
    logprobs: list[list[LogProb]] | None
    details: dict[str, Any]
    raw: dict[str, Any]

    def as_chat(self) -> ChatResponse:
        """The answer as an assistant message: thoughts, text and tool calls in blocks of their own."""
        calls = tool_call_dicts(self.message)
        return ChatResponse(
            message=ChatMessage(
                role=MessageRole.ASSISTANT,
                blocks=answer_blocks(self.message),
                # Where parts of LlamaIndex that are older than blocks look for calls.
                additional_kwargs={"tool_calls": calls} if calls else {},
            ),
            delta=self.delta,
            logprobs=self.logprobs,
            additional_kwargs=self.details,
            raw=self.raw,
        )

    def as_completion(self) -> CompletionResponse:
        """The answer as a completion; thoughts are in ``additional_kwargs["thinking"]``."""
        thoughts = {"thinking": self.message.reasoning} if self.message.reasoning else {}
        return CompletionResponse(
            text=self.message.text,
            delta=self.delta,
            logprobs=self.logprobs,
            additional_kwargs={**self.details, **thoughts},
            raw=self.raw,
        )


@dataclass(slots=True)
class _Choice:
    """One of a request's ``n`` answers."""

    message: Message
    chunk: CompletionChunk
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class AnswerCollector:
    """Turns what a request streams into answers.

    Args:
        model: Name to report.
        token_text: Token id to its text, for log-probabilities.
    """

    def __init__(self, model: str, token_text: TokenText) -> None:
        self._model = model
        self._token_text = token_text
        self._choices: dict[int, _Choice] = {}

    def add(self, delta: TurnDelta) -> None:
        """Take in the next piece."""
        choice = self._choices.setdefault(delta.chunk.index, _Choice(delta.message, delta.chunk))
        choice.chunk = delta.chunk
        choice.logprobs += delta.chunk.logprobs or []

    def whole(self) -> Answer:
        """The first of the answers; the others are in ``raw["choices"]``."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        return self._answer(choices, None, {})

    def piece(self, delta: TurnDelta) -> Answer | None:
        """The only answer with ``delta``, or ``None`` while what the delta brings is held back."""
        self.add(delta)
        if not delta.events:
            return None
        choice = self._choices[delta.chunk.index]
        thoughts = "".join(event.text for event in delta.events if isinstance(event, ReasoningDelta))
        answer = self._answer([choice], _new_text(delta.events), {"thinking_delta": thoughts} if thoughts else {})
        choice.logprobs = []
        return answer

    def _answer(self, choices: Sequence[_Choice], delta: str | None, extra: dict[str, Any]) -> Answer:
        first = choices[0]
        chunk, message = first.chunk, first.message
        usage = _usage(chunk, sum(choice.chunk.num_generated_tokens for choice in choices))
        timings = asdict(chunk.timings)
        details = {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "finish_reason": message.finish_reason,
            "stop_reason": message.stop_reason,
            "timings": timings,
            **extra,
        }
        invalid = [asdict(call) for call in message.tool_calls if not call.valid]
        if invalid and message.finish_reason is not None:
            details["invalid_tool_calls"] = invalid
        return Answer(
            message=message,
            delta=delta,
            logprobs=_logprobs(first.logprobs, self._token_text) if first.logprobs else None,
            details=details,
            raw={
                "id": chunk.request_id,
                "model": self._model,
                "choices": [_choice(choice) for choice in choices],
                "usage": usage,
                "timings": timings,
            },
        )


def _new_text(events: Iterable[AnswerEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def _choice(choice: _Choice) -> dict[str, Any]:
    message = choice.message
    calls = tool_call_dicts(message)
    return {
        "index": choice.chunk.index,
        "text": message.text,
        "finish_reason": message.finish_reason,
        "stop_reason": message.stop_reason,
        **({"reasoning_content": message.reasoning} if message.reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _usage(chunk: CompletionChunk, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": chunk.num_prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": chunk.num_prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": chunk.num_cached_tokens},
    }


def _logprobs(positions: Sequence[TokenLogprobs], token_text: TokenText) -> list[list[LogProb]]:
    return [[_logprob(token_text(token), entry.logprob) for token, entry in each.items()] for each in positions]


def _logprob(text: str, logprob: float) -> LogProb:
    return LogProb(token=text, logprob=logprob, bytes=list(text.encode()))
