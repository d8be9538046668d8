"""What goes over the channel, and its shape there.

Outputs travel as tuples: to pickle a step's deltas as objects takes the engine's process twelve times as long.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from pagedlc_engine.config import EngineConfig
from pagedlc_engine.errors import PagedLCError, UnsupportedModelError, portable
from pagedlc_engine.grammar import TokenVocabulary
from pagedlc_engine.messages import EngineInfo, Output, join_deltas
from pagedlc_engine.model import ModelSpec
from pagedlc_engine.process.channel import PROTOCOL
from pagedlc_engine.request import RequestTimings, TokenDelta
from pagedlc_engine.stats import EngineStats

__all__ = [
    "LoadFailed",
    "Loading",
    "MakeVocabulary",
    "Ready",
    "Setup",
    "Vocabulary",
    "dump_commands",
    "pack_commands",
    "pack_outputs",
    "unpack_outputs",
]

MakeVocabulary = Callable[[], TokenVocabulary]


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to the engine's process: what to load.

    Args:
        config: The engine's options.
        spec: The model's.
        num_threads: torch's CPU threads.
        log_level: Of the records that the user's process wants.
    """

    config: EngineConfig
    spec: ModelSpec
    num_threads: int
    log_level: int


@dataclass(frozen=True, slots=True)
class Loading:
    """Parts done, of so many."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine waits for requests."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """There will be no engine."""

    error: PagedLCError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What makes the vocabulary, sent before the first grammar; on the way it is bytes.

    It is unpickled only when a grammar is compiled, and not by the thread that receives requests.
    """

    make: MakeVocabulary | bytes

    def unpack(self) -> TokenVocabulary:
        """Make the vocabulary, on the other side.

        Raises:
            UnsupportedModelError: The tokenizer cannot be pickled.
        """
        assert isinstance(self.make, bytes)
        made = pickle.loads(self.make)
        if isinstance(made, PagedLCError):
            raise made
        vocabulary: TokenVocabulary = made()
        return vocabulary


def pack_commands(messages: list[Any]) -> list[Any]:
    """A batch on its way to the engine."""
    return [_packed_vocabulary(item) if isinstance(item, Vocabulary) else item for item in messages]


def dump_commands(batch: list[Any]) -> bytes:
    """Pickle a batch; enums and other classes of the user's program go as the plain values that they are."""
    buffer = io.BytesIO()
    _CommandPickler(buffer, PROTOCOL).dump(batch)
    return buffer.getvalue()


class _CommandPickler(pickle.Pickler):
    """The engine's process does not have the classes of the user's ``__main__``."""

    def reducer_override(self, item: Any) -> Any:
        """Called for what is of none of the basic types."""
        # By the base's own methods: a class may write itself in another way.
        if isinstance(item, str):
            return str, (str.__str__(item),)
        if isinstance(item, int):
            return int, (int.__int__(item),)
        if isinstance(item, float):
            return float, (float.__float__(item),)
        return NotImplemented


def _packed_vocabulary(message: Vocabulary) -> Vocabulary:
    try:
        return Vocabulary(pickle.dumps(message.make))
    except Exception as error:  # a tokenizer with parts written in Python raises plain Exception
        problem = UnsupportedModelError(
            f"The tokenizer cannot be handed to the engine's process ({error}), so structured_outputs do not work "
            "there; use engine_host='thread'."
        )
        return Vocabulary(pickle.dumps(problem))


_TIMINGS = [f"timings.{item.name}" for item in fields(RequestTimings)]
_PLAIN = [item.name for item in fields(TokenDelta) if item.name not in ("timings", "error")]
_delta_values = attrgetter(*_PLAIN, *_TIMINGS)
_stats_values = attrgetter(*(item.name for item in fields(EngineStats)))


def pack_outputs(messages: list[Any]) -> list[Any]:
    """A batch on its way from the engine: other messages first, then all outputs as one tuple."""
    outputs = [item for item in messages if isinstance(item, Output)]
    others = [item for item in messages if not isinstance(item, Output)]
    return [*others, _packed(outputs)] if outputs else others


def _packed(outputs: list[Output]) -> tuple[Any, ...]:
    deltas = [delta for output in outputs for delta in output.deltas]
    if len(outputs) > 1:
        deltas = join_deltas(deltas)
    rows = [_delta_values(delta) for delta in deltas]
    errors = {at: portable(delta.error) for at, delta in enumerate(deltas) if delta.error is not None}
    stats = next((_stats_values(output.stats) for output in reversed(outputs) if output.stats is not None), None)
    replies = {query_id: reply for output in outputs for query_id, reply in output.replies.items()}
    died = outputs[-1].died
    return rows, errors, stats, replies, None if died is None else portable(died)


def unpack_outputs(messages: list[Any]) -> list[Any]:
    """The inverse of :func:`pack_outputs`."""
    return [_unpacked(*item) if isinstance(item, tuple) else item for item in messages]


def _unpacked(
    rows: list[tuple[Any, ...]],
    errors: dict[int, PagedLCError],
    stats: tuple[Any, ...] | None,
    replies: dict[int, int],
    died: Any,
) -> Output:
    plain = len(_PLAIN)
    make: Callable[..., TokenDelta] = TokenDelta
    deltas = [make(*row[:plain], RequestTimings(*row[plain:]), errors.get(at)) for at, row in enumerate(rows)]
    return Output(deltas, None if stats is None else EngineStats(*stats), replies, died)
