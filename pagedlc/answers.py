"""Token deltas to text: the consumer's side of a request."""

from __future__ import annotations

from dataclasses import dataclass

from pagedlc.detokenizer import IncrementalDetokenizer
from pagedlc.outputs import CompletionChunk, CompletionOutput, FinishReason, RequestOutput, Timings
from pagedlc.tokenizer import Tokenizer
from pagedlc_engine.request import Request, TokenDelta, TokenLogprobs

__all__ = ["AnswerReader", "RequestReader"]


class AnswerReader:
    """Reads one answer of a request.

    Args:
        tokenizer: Turns tokens into text.
        request: The request.
        index: Which of its answers.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request, index: int) -> None:
        self._request = request
        self._index = index
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.params, request.prompt_token_ids)
        self._stop_tokens = [[token] for token in (*request.eos_token_ids, *request.params.stop_token_ids)]
        self.finish_reason: FinishReason | None = None

    def read(self, delta: TokenDelta) -> CompletionChunk | None:
        """The chunk a delta makes; ``None`` once the answer is complete.

        A stop string completes the answer here, before the engine knows: the caller then aborts it there.
        """
        if self.finish_reason is not None:
            return None
        before = self._detokenizer.num_tokens
        # A grammar may also be complete with an ordinary token, which belongs to the text.
        ended_by_token = delta.finish_reason == "stop" and delta.token_ids[-1:] in self._stop_tokens
        goes_on = delta.finish_reason in (None, "error")  # nothing finishes the text of an answer that failed
        feed = self._detokenizer.feed if goes_on else self._detokenizer.feed_last
        text = feed(delta.token_ids, stop_token=ended_by_token)
        count = self._detokenizer.num_tokens - before
        stop_reason: int | str | None = None
        if self._detokenizer.stopped:
            self.finish_reason = "stop"
            stop_reason = self._detokenizer.stop_string
        elif delta.finish_reason is not None and delta.finish_reason != "error":
            text += self._detokenizer.finish()
            self.finish_reason = delta.finish_reason
            stop_reason = delta.stop_reason
        return CompletionChunk(
            request_id=delta.request_id,
            index=delta.index,
            text=text,
            token_ids=delta.token_ids[:count],
            logprobs=None if delta.logprobs is None else delta.logprobs[:count],
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_cached_tokens=delta.num_cached_tokens,
            num_generated_tokens=self._detokenizer.num_tokens,
            timings=Timings.of(delta.timings, self._detokenizer.num_tokens, self.finish_reason is not None),
        )


@dataclass(slots=True)
class _Open:
    reader: AnswerReader
    output: CompletionOutput


class RequestReader:
    """Reads all answers of a request and collects them.

    Args:
        tokenizer: Turns tokens into text.
        request: The request.
        prompt: The prompt's text, if it was given as text.
        prompt_token_ids: The prompt's tokens as the result has them.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request, prompt: str | None, prompt_token_ids: list[int]) -> None:
        self.request = request
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._answers = [
            _Open(AnswerReader(tokenizer, request, index), CompletionOutput(index)) for index in range(request.params.n)
        ]
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._num_cached_tokens = 0
        self._timings = Timings()

    @property
    def finished(self) -> bool:
        """True when all answers are complete."""
        return all(answer.reader.finish_reason is not None for answer in self._answers)

    def read(self, delta: TokenDelta) -> CompletionChunk | None:
        """As :meth:`AnswerReader.read`, for the answer the delta belongs to."""
        answer = self._answers[delta.index]
        self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
        chunk = answer.reader.read(delta)
        if chunk is not None:
            _collect(answer.output, chunk)
            if chunk.index == 0:
                self._num_cached_tokens = chunk.num_cached_tokens
                self._timings = chunk.timings
        return chunk

    @property
    def first_answer(self) -> list[int]:
        """Tokens of the first answer so far."""
        return self._answers[0].output.token_ids

    def result(self) -> RequestOutput:
        """What has been read so far."""
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[answer.output for answer in self._answers],
            finished=self.finished,
            num_cached_tokens=self._num_cached_tokens,
            timings=self._timings,
        )


def _collect(output: CompletionOutput, chunk: CompletionChunk) -> None:
    output.text += chunk.text
    output.token_ids += chunk.token_ids
    if chunk.logprobs is not None:
        output.logprobs = [*(output.logprobs or []), *chunk.logprobs]
        total = sum(logprobs[token].logprob for token, logprobs in zip(chunk.token_ids, chunk.logprobs, strict=True))
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + total
    output.finish_reason = chunk.finish_reason
    output.stop_reason = chunk.stop_reason
