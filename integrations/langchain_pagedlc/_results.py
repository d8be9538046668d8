"""The engine's answers as LangChain messages and generations, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeAlias

from langchain_core.messages import AIMessage, AIMessageChunk, ToolCallChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import (
    ChatGeneration,
    ChatGenerationChunk,
    ChatResult,
    Generation,
    GenerationChunk,
    LLMResult,
)

from langchain_pagedlc._tools import cut_off_mark, sort_calls
from pagedlc import CompletionChunk, CompletionOutput, RequestOutput, Timings
from pagedlc.tools import (
    ChatMessage,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolEvent,
    TurnDelta,
)
from pagedlc_engine.request import TokenLogprobs

__all__ = ["ChatAnswer", "Describer", "says_something"]


@dataclass(slots=True)
class ChatAnswer:
    """One answer of a chat request, added up from its stream.

    Args:
        chunk: The engine's side of its last piece.
        message: The answer.
        logprobs: One entry per token when asked for.
    """

    chunk: CompletionChunk
    message: ChatMessage
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @classmethod
    def collect(cls, answers: dict[int, ChatAnswer], delta: TurnDelta) -> None:
        """Take a piece of a stream into the answer it belongs to, by index."""
        chunk = delta.chunk
        answer = answers.setdefault(chunk.index, cls(chunk, delta.message))
        answer.chunk = chunk
        answer.logprobs += chunk.logprobs or ()


_PROVIDER: Final = "pagedlc"


@dataclass(frozen=True, slots=True)
class Describer:
    """Writes answers in LangChain's terms.

    Args:
        model_name: Reported as ``model_name``.
        token_text: Token id to its text, for log-probabilities.
        top_logprobs: How many of the likeliest tokens were asked for; ``None`` when no log-probabilities were.
        stream_usage: Put the usage on the last chunk of a stream.
        in_blocks: Write streamed text and thoughts as content blocks (``output_version="v1"``).
    """

    model_name: str
    token_text: Callable[[int], str]
    top_logprobs: int | None = None
    stream_usage: bool = True
    in_blocks: bool = False

    def chat_result(self, answers: dict[int, ChatAnswer]) -> ChatResult:
        """All answers of a finished chat request, by index."""
        return ChatResult(generations=[self._chat_generation(answers[index]) for index in sorted(answers)])

    def chat_chunks(self, delta: TurnDelta) -> list[ChatGenerationChunk]:
        """A piece of a streamed chat answer: a chunk each for text, thoughts and calls, as far as there are any.

        The last chunk of the answer carries usage and metadata, so that the sum is the whole.
        """
        write = _as_blocks if self.in_blocks else _as_text
        last = delta.message.finish_reason is not None
        if not last and delta.chunk.logprobs is None and (text := _only_text(delta)) is not None:
            return [self._chat_chunk(write(text))]
        info = self._logprobs_info(delta.chunk.logprobs)
        pieces = _pieces(delta, write)
        # LangChain reads the calls of a last chunk as if they were all of the calls.
        if (last and (not pieces or "tool_call_chunks" in pieces[-1])) or (info and not pieces):
            pieces.append({"content": ""})
        chunks = [self._chat_chunk(piece) for piece in pieces]
        if info:
            chunks[0].generation_info = info
        if last:
            chunks[-1] = self._last_chunk(pieces[-1], delta, chunks[-1].generation_info or {})
        return chunks

    def _chat_chunk(self, piece: _Piece) -> ChatGenerationChunk:
        message = AIMessageChunk(**piece, response_metadata={"model_provider": _PROVIDER})
        return ChatGenerationChunk(message=message)

    def _last_chunk(self, piece: _Piece, delta: TurnDelta, info: dict[str, Any]) -> ChatGenerationChunk:
        message = AIMessageChunk(
            **piece,
            response_metadata={"model_provider": _PROVIDER}
            | self._metadata(delta.message.stop_reason, delta.chunk.timings),
            usage_metadata=_chunk_usage(delta.chunk) if self.stream_usage else None,
            chunk_position="last",
        )
        return ChatGenerationChunk(
            message=message, generation_info={**info, "finish_reason": delta.message.finish_reason}
        )

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

    def _chat_generation(self, answer: ChatAnswer) -> ChatGeneration:
        said = answer.message
        valid, invalid = sort_calls(said.tool_calls)
        message = AIMessage(
            content=said.text,
            additional_kwargs={"reasoning_content": said.reasoning} if said.reasoning else {},
            tool_calls=valid,
            invalid_tool_calls=invalid,
            response_metadata={"model_provider": _PROVIDER} | self._metadata(said.stop_reason, answer.chunk.timings),
            usage_metadata=_chunk_usage(answer.chunk),
        )
        info = {"finish_reason": said.finish_reason} | self._logprobs_info(answer.logprobs)
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


#: Keywords of a chunk.
_Piece: TypeAlias = dict[str, Any]


def _pieces(delta: TurnDelta, write: Callable[[TextDelta | ReasoningDelta], _Piece]) -> list[_Piece]:
    """Keywords of the chunks that a delta makes; neighbouring events of the same kind share one."""
    pieces: list[_Piece] = []
    for event in delta.events:
        match event:
            case TextDelta() | ReasoningDelta():
                pieces.append(write(event))
            case ToolCallStart() | ToolCallArguments() | ToolCallEnd():
                if not pieces or "tool_call_chunks" not in pieces[-1]:
                    pieces.append({"content": "", "tool_call_chunks": []})
                _add_call_event(pieces[-1]["tool_call_chunks"], event, delta.message)
    return [piece for piece in pieces if piece.get("tool_call_chunks") != []]


def _only_text(delta: TurnDelta) -> TextDelta | ReasoningDelta | None:
    """What nearly every piece of a stream is; the cost of these is what limits many streams in one interpreter."""
    match delta.events:
        case [TextDelta() | ReasoningDelta() as text]:
            return text
    return None


def _as_text(event: TextDelta | ReasoningDelta) -> _Piece:
    if isinstance(event, TextDelta):
        return {"content": event.text}
    return {"content": "", "additional_kwargs": {"reasoning_content": event.text}}


def _as_blocks(event: TextDelta | ReasoningDelta) -> _Piece:
    # LangChain would number these blocks itself, from 0, and mix them up with the calls, which have numbers, too.
    if isinstance(event, TextDelta):
        return {"content": [{"type": "text", "text": event.text, "index": "lc_txt_0"}]}
    block = {"type": "reasoning", "reasoning": event.text, "index": "lc_rs_0"}
    return {"content": [block], "additional_kwargs": {"reasoning_content": event.text}}


def _add_call_event(chunks: list[ToolCallChunk], event: ToolEvent, message: ChatMessage) -> None:
    match event:
        case ToolCallStart(index, call_id, name):
            chunks.append(ToolCallChunk(name=name, args="", id=call_id, index=index, type="tool_call_chunk"))
        case ToolCallArguments(index, text):
            _add_arguments(chunks, index, text)
        case ToolCallEnd(index):
            _add_arguments(chunks, index, cut_off_mark(message.tool_calls[index]))


def _add_arguments(chunks: list[ToolCallChunk], index: int, text: str) -> None:
    if not text:
        return
    if chunks and chunks[-1]["index"] == index:
        chunks[-1]["args"] = f"{chunks[-1]['args'] or ''}{text}"
    else:
        chunks.append(ToolCallChunk(name=None, args=text, id=None, index=index, type="tool_call_chunk"))


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
