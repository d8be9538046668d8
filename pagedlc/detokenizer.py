"""Token ids to text while they arrive: whole characters only, and never a piece of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from pagedlc.tokenizer import Tokenizer
from pagedlc_engine.request import SamplingParams

__all__ = ["IncrementalDetokenizer"]

_REPLACEMENT = "\ufffd"


_MANY_TOKENS = 8


class IncrementalDetokenizer:
    """The text of one answer, delta by delta.

    The deltas, joined, are the answer's text up to the stop string, however the tokens were grouped. Text is held
    back while it could still turn out differently: bytes of an unfinished character, and the beginning of what may
    become a stop string.

    Args:
        tokenizer: The model's tokenizer.
        params: ``stop``, ``include_stop_str_in_output``, ``min_tokens`` and ``skip_special_tokens`` are used.
        prompt_token_ids: What the answer continues; it decides whether a leading space is kept.

    Attributes:
        stop_string: The stop string that ended the text, or ``None``.
        num_tokens: Tokens taken in so far; after a stop string, up to the one that completed it.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        self._stream = _CharacterStream(tokenizer, params.skip_special_tokens, prompt_token_ids)
        self._stops = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._held = ""
        self._released: list[str] = []
        self._finished = False
        self.stop_string: str | None = None
        self.num_tokens = 0

    @property
    def text(self) -> str:
        """Everything handed out so far."""
        return "".join(self._released)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text; further tokens are ignored."""
        return self.stop_string is not None

    def feed(self, token_ids: Sequence[int], *, stop_token: bool = False) -> str:
        """Take in the next tokens and return the text that is now certain.

        Args:
            token_ids: Tokens that follow those fed before.
            stop_token: The last of them is the stop token or end-of-sequence that ended the answer: its text is left
                out unless ``include_stop_str_in_output``.
        """
        parts = []
        last = len(token_ids) - 1
        for position, token_id in enumerate(token_ids):
            if self.stopped or self._finished:
                break
            self.num_tokens += 1
            if not (stop_token and position == last and not self._include_stop):
                parts.append(self._append(self._stream.push(token_id)))
        return self._release("".join(parts))

    def feed_last(self, token_ids: Sequence[int], *, stop_token: bool = False) -> str:
        """As :meth:`feed`, for tokens after which only :meth:`finish` comes: many of them are decoded at once."""
        if self._stops or self._finished or len(token_ids) < _MANY_TOKENS:
            return self.feed(token_ids, stop_token=stop_token)
        self.num_tokens += len(token_ids)
        self._stream.extend(token_ids[:-1] if stop_token and not self._include_stop else token_ids)
        return ""

    def finish(self) -> str:
        """The rest of the text, when no token will follow; unfinished bytes become U+FFFD."""
        if self.stopped or self._finished:
            return ""
        self._finished = True
        text = self._append(self._stream.flush())
        rest, self._held = self._held, ""
        return self._release(text + rest)

    def _release(self, text: str) -> str:
        if text:
            self._released.append(text)
        return text

    def _append(self, piece: str) -> str:
        """Add decoded text and return what can no longer be part of a stop string."""
        if not self._stops or not piece:
            return piece
        known = len(self._held)
        text = self._held + piece
        match = self._first_stop(text, known) if self.num_tokens > self._min_tokens else None
        if match is not None:
            start, self.stop_string = match
            self._held = ""
            return text[: start + len(self.stop_string)] if self._include_stop else text[:start]
        keep = max(_overlap(text, stop) for stop in self._stops)
        certain = len(text) - keep
        self._held = text[certain:]
        return text[:certain]

    def _first_stop(self, text: str, known: int) -> tuple[int, str] | None:
        """The stop string completed first after ``known`` characters; of those completed together, the longest."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, known - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[1], best[2])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins, shorter than all of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class _CharacterStream:
    """Decodes token by token into whole characters.

    The ``tokenizers`` library's ``DecodeStream`` does the work. Around it: the tokens since the last text are kept,
    to decode what is left at the end; and a run of byte tokens is handed over as a whole, because the library reads
    a run with one broken character as all broken.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._byte_ids = tokenizer.byte_token_ids
        self._context = _prompt_context(tokenizer, prompt_token_ids)
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=skip_special_tokens)
        self._pending: list[int] = []
        self._run: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        self._run.append(token_id)
        if token_id in self._byte_ids:
            return ""
        run, self._run = self._run, []
        text = self._stream.step(self._tokenizer.backend, run)
        if text is None:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in tokens whose text :meth:`flush` will return."""
        self._pending += [token_id for token_id in token_ids if token_id not in self._skipped]

    def flush(self) -> str:
        before = self._tokenizer.decode(self._context, self._skip)
        after = self._tokenizer.decode([*self._context, *self._pending], self._skip)
        self._pending, self._run = [], []
        return after[len(before) :]


def _prompt_context(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> list[int]:
    """One ordinary token of the prompt to decode after, so that a first space is not taken for padding and dropped."""
    for token_id in reversed(prompt_token_ids):
        if token_id in tokenizer.special_token_ids or token_id in tokenizer.byte_token_ids:
            continue
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if _REPLACEMENT not in text:
            return [token_id]
    return []
