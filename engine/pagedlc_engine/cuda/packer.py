"""From a step plan to a packet: numpy over integers, and little Python where the same requests decode on."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagedlc_engine.cuda.layout import PacketLayout, StepShape
from pagedlc_engine.cuda.shapes import MixedNeed, ShapeBook
from pagedlc_engine.cuda.slots import Admissions, SlotTable
from pagedlc_engine.cuda.tiles import (
    PrefixGroup,
    Requests,
    find_prefix_groups,
    longest_first,
    narrow_records,
    prefix_chunk,
    shared_records,
    wide_records,
    wide_tiles,
    wide_wants_splits,
)
from pagedlc_engine.kernels.attention_plan import RECORD, WIDE_ROWS, AttentionGeometry, Ints
from pagedlc_engine.plan import StepPlan
from pagedlc_engine.sequence import Sequence

if TYPE_CHECKING:
    from pagedlc_engine.kv.manager import KVCacheManager

__all__ = ["Packed", "StepPacker"]


@dataclass(frozen=True, slots=True)
class Packed:
    """A step, ready to be written into a packet.

    Args:
        shape: Launch sizes.
        captured: Whether there is (or may be) a graph of this shape.
        samples: Rows that are sampled.
        general: Rows that the general sampler takes over, and their sequences.
        admissions: Slots to set up before.
    """

    shape: StepShape
    captured: bool
    samples: int
    general: list[tuple[int, Sequence]]
    admissions: Admissions


@dataclass(slots=True)
class _Decoding:
    """Requests that decode together, step after step; ``opened`` tells whether one was preempted in between."""

    keys: list[int]
    opened: int
    tables: list[array[int]]
    requests: Requests
    cache_slots: Ints
    groups: list[PrefixGroup]
    prefix: Ints | None
    order: npt.NDArray[np.intp]
    general: list[tuple[int, Sequence]]

    def advance(self, block_size: int) -> None:
        """One token further."""
        starts = self.requests.starts
        starts += 1
        self.cache_slots += 1
        for row in np.flatnonzero(starts % block_size == 0).tolist():
            self.cache_slots[row] = self.tables[row][int(starts[row]) // block_size] * block_size


class StepPacker:
    """Describes steps to the device.

    Args:
        cache: The sequences' block tables.
        slots: Where the sequences are on the device.
        book: The shapes.
        geometry: Of the model and its cache.
        layout: Of a packet.
        share_prefixes: Read a prefix that several decoding requests share once for all of them.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        slots: SlotTable,
        book: ShapeBook,
        geometry: AttentionGeometry,
        layout: PacketLayout,
        share_prefixes: bool = True,
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._book = book
        self._geometry = geometry
        self._layout = layout
        self._share_prefixes = share_prefixes
        self._decoding: _Decoding | None = None

    def pack(self, plan: StepPlan, packet: Ints) -> Packed:
        """Write a step into ``packet`` (int32 [layout.size]), its number excepted."""
        keys = [item.sequence.key for item in plan.scheduled]
        decoding = self._decoding
        opened = self._cache.num_opened
        if decoding is not None and keys == decoding.keys and opened == decoding.opened and not plan.copies:
            decoding.advance(self._geometry.block_size)
            return self._pack_decoding(decoding, -1 - decoding.requests.slots, packet, Admissions())
        self._decoding = None
        return self._pack_anew(plan, keys, packet)

    def forget(self) -> None:
        """Start the next step anew, after one that failed."""
        self._decoding = None

    def _pack_decoding(self, decoding: _Decoding, codes: Ints, packet: Ints, admissions: Admissions) -> Packed:
        requests = decoding.requests
        batch = len(requests)
        shared = bool(decoding.groups)
        split = not shared and self._book.wants_split(requests.starts)
        shape = self._book.decode(batch, split=split, shared=shared)
        captured = shape is not None
        if shape is None:
            shape = StepShape(tokens=batch, samples=batch, narrow=batch, narrow_splits=4, decodes=True)
        layout = self._layout
        packet[0] = packet[1] = batch
        packet[layout.sample_rows : layout.sample_rows + batch] = requests.firsts
        packet[layout.sample_slots : layout.sample_slots + batch] = requests.slots
        self._write_tokens(packet, codes, requests.starts, decoding.cache_slots, requests.slots)
        self._write_narrow(packet, decoding, shape)
        return Packed(shape, captured, batch, decoding.general, admissions)

    def _write_tokens(self, packet: Ints, codes: Ints, positions: Ints, cache_slots: Ints, owners: Ints) -> None:
        count, plane = len(codes), self._layout.plane
        for index, values in enumerate((codes, positions, cache_slots, owners)):
            start = self._layout.codes + index * plane
            packet[start : start + count] = values

    def _write_narrow(self, packet: Ints, decoding: _Decoding, shape: StepShape) -> None:
        layout, geometry = self._layout, self._geometry
        requests, groups, order = decoding.requests, decoding.groups, decoding.order
        records = packet[layout.narrow : layout.narrow + shape.narrow * RECORD].reshape(-1, RECORD)
        chunk = prefix_chunk(groups, shape.shared_splits) if groups else 1
        bases = narrow_records(records, requests, decoding.prefix, chunk, shape, geometry, order)
        if groups:
            shared = packet[layout.shared : layout.shared + shape.shared * RECORD].reshape(-1, RECORD)
            members = packet[layout.members : layout.members + layout.samples * 3].reshape(-1, 3)
            shared_records(shared, members, groups, requests, bases, chunk, shape, geometry)

    def _pack_anew(self, plan: StepPlan, keys: list[int], packet: Ints) -> Packed:
        admissions = Admissions()
        scheduled = plan.scheduled
        count = len(scheduled)
        slots = np.empty(count, np.int32)
        starts = np.empty(count, np.int32)
        counts = np.empty(count, np.int32)
        tables: list[array[int]] = []
        codes = array("i")
        sample_rows: list[int] = []
        sample_slots: list[int] = []
        general: list[tuple[int, Sequence]] = []
        fresh = False
        end = 0
        for row, item in enumerate(scheduled):
            sequence = item.sequence
            slot = self._slots.get(sequence.key)
            if slot is None:
                slot = self._slots.add(sequence)
                admissions.state(slot, sequence)
            table = self._cache.table(sequence.key)
            if slot.table is not table:
                slot.table = table
                admissions.table(slot, table)
                fresh = True
            slots[row], starts[row], counts[row] = slot.index, item.start, item.count
            tables.append(table)
            known = sequence.tokens[item.start : item.start + item.count]
            codes += known
            if len(known) < item.count:
                codes.append(-1 - slot.index)
            end += item.count
            for sampler in item.samplers:
                own = slot if sampler is sequence else self._slots.get(sampler.key)
                if own is None:
                    own = self._slots.add(sampler)
                    admissions.state(own, sampler)
                if not own.simple:
                    general.append((len(sample_rows), sampler))
                sample_rows.append(end - 1)
                sample_slots.append(own.index)
        firsts = (np.cumsum(counts) - counts).astype(np.int32)
        requests = Requests(slots, firsts, counts, starts)
        positions, owners, cache_slots = self._expand(requests, tables)
        decodes = end == count == len(sample_rows) and all(
            len(item.samplers) == 1 and item.samplers[0] is item.sequence for item in scheduled
        )
        # A request that is new may read blocks that another one writes in this step.
        if decodes and (count == 1 or not fresh):
            groups = self._groups(requests, tables)
            prefix = _prefix_lengths(groups, requests) if groups else None
            order = longest_first(requests, prefix)
            opened = self._cache.num_opened
            self._decoding = _Decoding(keys, opened, tables, requests, cache_slots, groups, prefix, order, general)
            return self._pack_decoding(self._decoding, np.frombuffer(codes, np.int32), packet, admissions)
        narrow = counts == 1
        need = self._need(requests, narrow, len(sample_rows))
        shape = self._book.mixed(need)
        captured = shape is not None
        if shape is None:
            shape = self._book.exact(need)
        if any(item.sequence.wants_prompt_logprobs for item in scheduled):
            shape, captured = replace(shape, every_row=True), False
        layout = self._layout
        packet[0], packet[1] = end, len(sample_rows)
        packet[layout.sample_rows : layout.sample_rows + len(sample_rows)] = sample_rows
        packet[layout.sample_slots : layout.sample_slots + len(sample_rows)] = sample_slots
        self._write_tokens(packet, np.frombuffer(codes, np.int32), positions, cache_slots, slots[owners])
        self._write_records(packet, requests, narrow, shape)
        return Packed(shape, captured, len(sample_rows), general, admissions)

    def _need(self, requests: Requests, narrow: npt.NDArray[np.bool_], samples: int) -> MixedNeed:
        chunks = _part(requests, ~narrow)
        tiles = wide_tiles(chunks.counts, WIDE_ROWS, self._geometry)
        split = bool(len(chunks)) and wide_wants_splits(chunks, tiles, self._geometry)
        return MixedNeed(int(requests.counts.sum()), samples, int(narrow.sum()), chunks.counts, split)

    def _expand(self, requests: Requests, tables: list[array[int]]) -> tuple[Ints, Ints, Ints]:
        """Position, request and cache slot of every token."""
        block_size = self._geometry.block_size
        owners = np.repeat(np.arange(len(requests)), requests.counts)
        shifts = np.repeat(requests.starts - requests.firsts, requests.counts)
        positions = np.arange(len(owners), dtype=np.int32) + shifts
        lengths = np.array([len(table) for table in tables])
        every = np.concatenate([np.frombuffer(table, np.int32) for table in tables])
        blocks = every[np.repeat(np.cumsum(lengths) - lengths, requests.counts) + positions // block_size]
        return positions, owners, (blocks * block_size + positions % block_size).astype(np.int32)

    def _groups(self, requests: Requests, tables: list[array[int]]) -> list[PrefixGroup]:
        if not self._share_prefixes or len(tables) < 2:
            return []
        shape = self._book.decode(len(tables), split=False, shared=True)
        if shape is None:
            return []
        views = [np.frombuffer(table, np.int32) for table in tables]
        tile = self._book.shared_tile_tokens(shape)
        return find_prefix_groups(requests, views, self._geometry, shape.shared, tile)

    def _write_records(self, packet: Ints, requests: Requests, narrow: npt.NDArray[np.bool_], shape: StepShape) -> None:
        layout = self._layout
        if shape.narrow:
            few = packet[layout.narrow : layout.narrow + shape.narrow * RECORD].reshape(-1, RECORD)
            few[:] = 0
            if narrow.any():
                narrow_records(few, _part(requests, narrow), None, 1, shape, self._geometry)
        if shape.wide:
            many = packet[layout.wide_records : layout.wide_records + shape.wide * RECORD].reshape(-1, RECORD)
            many[:] = 0
            if not narrow.all():
                wide_records(many, _part(requests, ~narrow), shape, self._geometry)


def _part(requests: Requests, which: npt.NDArray[np.bool_]) -> Requests:
    arrays = requests.slots, requests.firsts, requests.counts, requests.starts
    return Requests(*(values[which] for values in arrays))


def _prefix_lengths(groups: list[PrefixGroup], requests: Requests) -> Ints:
    prefix = np.zeros_like(requests.starts)
    for group in groups:
        prefix[group.rows] = group.tokens
    return prefix
