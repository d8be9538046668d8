"""What a client and an engine's loop say to each other: plain, picklable messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from pagedlc_engine.errors import EngineDeadError
from pagedlc_engine.request import Request, TokenDelta
from pagedlc_engine.stats import EngineStats

__all__ = [
    "Abort",
    "Command",
    "Configure",
    "CountCached",
    "Deliver",
    "EngineInfo",
    "Output",
    "ResetPrefixCache",
    "Submit",
    "WakeUp",
    "join_deltas",
]


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Give up a request, or one of its answers."""

    request_id: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Configure:
    """Change what may change while the engine runs."""

    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget all cached prefixes."""


@dataclass(frozen=True, slots=True)
class CountCached:
    """Ask how many blocks of a chain are cached; the answer comes in ``Output.replies`` under ``query_id``."""

    query_id: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Look again whether there is something to do."""


Command = Submit | Abort | Configure | ResetPrefixCache | CountCached | WakeUp


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a client must know of its engine.

    Args:
        max_model_len: Longest prompt plus answer in tokens.
        vocab_size: Token ids are below this.
        block_size: Tokens per KV block.
        enable_prefix_caching: Whether prompts' blocks are looked up by their hashes.
        device: Where it computes: ``"cpu"`` or ``"cuda"``.
        stats: Before the first step.
    """

    max_model_len: int
    vocab_size: int
    block_size: int
    enable_prefix_caching: bool
    device: str
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Output:
    """What one turn of the loop has to say.

    Args:
        deltas: New tokens.
        stats: A snapshot taken after the step; ``None`` if there is no newer one.
        replies: Query id to answer.
        died: Set on the last output of an engine that failed.
    """

    deltas: list[TokenDelta]
    stats: EngineStats | None = None
    replies: dict[int, int] = field(default_factory=dict)
    died: EngineDeadError | None = None


#: Takes outputs on the host's thread; returns False when nobody is there any more to take them.
Deliver = Callable[[Output], bool]


def join_deltas(deltas: Iterable[TokenDelta]) -> list[TokenDelta]:
    """Deltas in order of arrival, those of one answer merged into one."""
    answers: dict[tuple[str, int], list[TokenDelta]] = {}
    for delta in deltas:
        answers.setdefault((delta.request_id, delta.index), []).append(delta)
    return [parts[0] if len(parts) == 1 else _join(parts) for parts in answers.values()]


def _join(parts: list[TokenDelta]) -> TokenDelta:
    return replace(
        parts[-1],
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=[entry for part in parts for entry in part.logprobs or ()] or None,
        prompt_logprobs=next((part.prompt_logprobs for part in parts if part.prompt_logprobs), None),
    )
