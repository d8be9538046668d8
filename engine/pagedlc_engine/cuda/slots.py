"""Sequences and the slots that hold them on the device."""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass

import numpy as np

from pagedlc_engine.kernels.attention_plan import RECORD, Ints
from pagedlc_engine.request import SamplingParams
from pagedlc_engine.sequence import Sequence

__all__ = ["Admissions", "Slot", "SlotTable", "samples_in_graph"]

_LEAST_TEMPERATURE = 1e-5


@dataclass(slots=True)
class Slot:
    """Where a sequence is on the device.

    Args:
        index: Of the slot.
        simple: Its tokens are chosen by the step itself, not by the general sampler.
        table: The block table whose entries the device has; a sequence that was preempted comes back with another.
    """

    index: int
    simple: bool
    table: array[int] | None = None


def samples_in_graph(sequence: Sequence) -> bool:
    """Whether temperature is all that this sequence asks of the sampler."""
    params = sequence.request.params
    return (
        sequence.matcher is None
        and params.top_k in (-1, 0, 1)
        and (params.top_p == 1.0 or params.top_k == 1)
        and params.min_p == 0.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and params.repetition_penalty == 1.0
        and params.min_tokens == 0
        and params.logprobs is None
        and not params.logit_bias
        and not sequence.request.bad_words_token_ids
    )


def _temperature(params: SamplingParams) -> float:
    return 0.0 if params.temperature < _LEAST_TEMPERATURE or params.top_k == 1 else params.temperature


class Admissions:
    """Slots to be set up before a step."""

    def __init__(self) -> None:
        self._records: list[tuple[int, ...]] = []
        self._tables: list[array[int]] = []
        self._num_blocks = 0

    def __bool__(self) -> bool:
        return bool(self._records)

    def state(self, slot: Slot, sequence: Sequence) -> None:
        """A new sequence's sampling parameters."""
        bits = struct.unpack("<i", struct.pack("<f", _temperature(sequence.request.params)))[0]
        low, high = struct.unpack("<ii", struct.pack("<Q", sequence.seed & 0xFFFF_FFFF_FFFF_FFFF))
        self._records.append((slot.index, 1, bits, low, high, sequence.num_output, 0, 0))

    def table(self, slot: Slot, table: array[int]) -> None:
        """A block table that the device does not know."""
        self._records.append((slot.index, 0, 0, 0, 0, 0, self._num_blocks, len(table)))
        self._tables.append(table)
        self._num_blocks += len(table)

    def arrays(self) -> tuple[Ints, Ints]:
        """Records and blocks for :meth:`pagedlc_engine.cuda.state.DeviceState.admit`."""
        records = np.array(self._records, np.int32).reshape(-1, RECORD)
        blocks = np.zeros(self._num_blocks, np.int32)
        at = 0
        for table in self._tables:
            blocks[at : at + len(table)] = np.frombuffer(table, np.int32)
            at += len(table)
        return records, blocks


class SlotTable:
    """Gives sequences slots; numbers are reused, lowest first."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._free: list[int] = []
        self._used = 0

    def __len__(self) -> int:
        """Slots in use or free, that is, the room needed."""
        return self._used

    def get(self, key: int) -> Slot | None:
        """The slot of sequence ``key``."""
        return self._slots.get(key)

    def add(self, sequence: Sequence) -> Slot:
        """A slot for a new sequence."""
        if self._free:
            index = self._free.pop()
        else:
            index = self._used
            self._used += 1
        slot = self._slots[sequence.key] = Slot(index, samples_in_graph(sequence))
        return slot

    def pop(self, key: int) -> Slot | None:
        """Free a sequence's slot."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot.index)
        return slot
