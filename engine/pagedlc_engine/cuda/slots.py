"""Sequences and the slots that hold them on the device."""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass

import numpy as np

from pagedlc_engine.kernels.attention_plan import Ints
from pagedlc_engine.sampling.plan import draw_filters, draw_temperature
from pagedlc_engine.sequence import Sequence

__all__ = ["Admissions", "Slot", "SlotTable", "samples_in_graph"]


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
    """Whether this sequence asks no more of the sampler than temperature, top_k, top_p and min_p."""
    params = sequence.request.params
    return (
        sequence.matcher is None
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and params.repetition_penalty == 1.0
        and params.min_tokens == 0
        and params.logprobs is None
        and not params.logit_bias
        and not sequence.request.bad_words_token_ids
    )


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
        params = sequence.request.params
        numbers = struct.pack("<4f", draw_temperature(params), *draw_filters(params))
        bits, *filters = struct.unpack("<4i", numbers)
        low, high = struct.unpack("<ii", struct.pack("<Q", sequence.seed & 0xFFFF_FFFF_FFFF_FFFF))
        self._records.append((slot.index, 1, bits, low, high, sequence.num_output, 0, 0, *filters))

    def table(self, slot: Slot, table: array[int]) -> None:
        """A block table that the device does not know."""
        self._records.append((slot.index, 0, 0, 0, 0, 0, self._num_blocks, len(table), 0, 0, 0))
        self._tables.append(table)
        self._num_blocks += len(table)

    def message(self) -> Ints:
        """All of them as :func:`pagedlc_engine.cuda.step_kernels.admit_kernel` reads them, int32."""
        message = array("i", [len(self._records)])
        for record in self._records:
            message.extend(record)
        for table in self._tables:
            message.extend(table)
        return np.frombuffer(message, np.int32)


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
