"""The engine's answers as LangChain messages and generations, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import (
    ChatGeneration,
    ChatGenerationChunk,
    ChatResult,
    Generation,
    GenerationChunk,
    LLMResult,
)

from pagedlc import CompletionChunk, CompletionOutput, RequestOutput, Timings
from pagedlc_engine.request import TokenLogprobs

__all__ = ["Describer", "says_something"]


@dataclass(frozen=True, slots=True)
class Describer:
    """Writes answers in LangChain's terms.

    Args:
        model_name: Reported as ``model_name``.
        token_text: Token id to its text, for log-probabilities.
        top_logprobs: How many of the likeliest tokens were asked for; ``None`` when no log-probabilities were.
        stream_usage: Put the usage on the last chunk of a stream.
    """

    model_name: str
    token_text: Callable[[int], str]
    top_logprobs: int | None = None
    stream_usage: bool = True

    def chat_result(self, output: RequestOutput) -> ChatResult:
        """All answers of a finished chat request."""
        return ChatResult(generations=[self._chat_generation(output, answer) for answer in output.outputs])

    def chat_chunk(self, chunk: CompletionChunk) -> ChatGenerationChunk:
        """One piece of a streamed chat answer; the last carries usage and metadata, so that the sum is the whole."""
        last = chunk.finish_reason is not None
        info = self._logprobs_info(chunk.logprobs)
        metadata: dict[str, Any] = {"model_provider": "pagedlc"}
        if last:
            info["finish_reason"] = chunk.finish_reason
            metadata |= self._metadata(chunk.stop_reason, chunk.timings)
        message = AIMessageChunk(
            content=chunk.text,
            response_metadata=metadata,
            usage_metadata=_chunk_usage(chunk) if last and self.stream_usage else None,
            chunk_position="last" if last else None,
        )
        return ChatGenerationChunk(message=message, generation_info=info or None)

    def llm_result(self, outputs: Sequence[RequestOutput]) -> LLMResult:
        """All answers of finished completion requests, in the order of the prompts."""
        prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        generated = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        return LLMResult(
            generations=[[self._generation(output, answer) for answer in output.outputs] for output in outputs],
            llm_output={
                "model_name": self.model_name,
                "token_usage": {
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": generated,
                    "total_tokens": prompt_tokens + generated,
                },
            },
        )

    def text_chunk(self, chunk: CompletionChunk) -> GenerationChunk:
        """One piece of a streamed completion; the last carries usage and metadata."""
        info = self._logprobs_info(chunk.logprobs)
        if chunk.finish_reason is not None:
            info |= self._metadata(chunk.stop_reason, chunk.timings)
            info |= {"finish_reason": chunk.finish_reason, "usage_metadata": dict(_chunk_usage(chunk))}
        return GenerationChunk(text=chunk.text, generation_info=info or None)

    def _chat_generation(self, output: RequestOutput, answer: CompletionOutput) -> ChatGeneration:
        message = AIMessage(
            content=answer.text,
            response_metadata={"model_provider": "pagedlc"} | self._metadata(answer.stop_reason, output.timings),
            usage_metadata=_output_usage(output, answer),
        )
        info = {"finish_reason": answer.finish_reason} | self._logprobs_info(answer.logprobs)
        return ChatGeneration(message=message, generation_info=info)

    def _generation(self, output: RequestOutput, answer: CompletionOutput) -> Generation:
        info = self._metadata(answer.stop_reason, output.timings) | self._logprobs_info(answer.logprobs)
        info |= {"finish_reason": answer.finish_reason, "usage_metadata": dict(_output_usage(output, answer))}
        return Generation(text=answer.text, generation_info=info)

    def _metadata(self, stop_reason: int | str | None, timings: Timings) -> dict[str, Any]:
        return {
            "model_name": self.model_name,
            "stop_reason": stop_reason,
            "timings": asdict(timings),
        }

    def _logprobs_info(self, logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
        if not logprobs:
            return {}
        return {"logprobs": {"content": [self._token_logprobs(position) for position in logprobs]}}

    def _token_logprobs(self, position: TokenLogprobs) -> dict[str, Any]:
        chosen, *_ = position
        # The chosen token is always there; it counts as one of the likeliest only by its rank.
        likeliest = [token for token, entry in position.items() if entry.rank <= (self.top_logprobs or 0)]
        likeliest.sort(key=lambda token: position[token].rank)
        return {
            **self._token_logprob(chosen, position),
            "top_logprobs": [self._token_logprob(token, position) for token in likeliest],
        }

    def _token_logprob(self, token_id: int, position: TokenLogprobs) -> dict[str, Any]:
        return {
            "token": self.token_text(token_id),
            "token_id": token_id,
            "logprob": position[token_id].logprob,
        }


def says_something(chunk: CompletionChunk) -> bool:
    """Whether a piece of a stream is worth a chunk: it may hold only half a character, or half a stop string."""
    return bool(chunk.text or chunk.logprobs or chunk.finish_reason)


def _output_usage(output: RequestOutput, answer: CompletionOutput) -> UsageMetadata:
    return _usage(len(output.prompt_token_ids), len(answer.token_ids), output.num_cached_tokens)


def _chunk_usage(chunk: CompletionChunk) -> UsageMetadata:
    return _usage(chunk.num_prompt_tokens, chunk.num_generated_tokens, chunk.num_cached_tokens)


def _usage(prompt_tokens: int, generated_tokens: int, cached_tokens: int) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=prompt_tokens,
        output_tokens=generated_tokens,
        total_tokens=prompt_tokens + generated_tokens,
        input_token_details=InputTokenDetails(cache_read=cached_tokens),
    )
