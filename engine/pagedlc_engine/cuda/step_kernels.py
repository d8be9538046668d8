"""The two ends of a step on the device: a packet from pinned host memory in, sampled tokens out.

The kernels read and write pinned memory directly, so that a step needs no copy of its own: a ticket, counted on the
device, names the packet whose turn it is, and a captured graph can be launched again and again without arguments.
"""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

__all__ = ["ADMISSION", "admit_kernel", "commit_kernel", "unpack_kernel"]

#: Length of an admission's record.
ADMISSION = 11


@triton.jit
def _copy(packet, control, index, START: tl.constexpr, length):
    value = tl.load(packet + START + index, mask=index < length, other=0)
    tl.store(control + START + index, value, mask=index < length)


@triton.jit(do_not_specialize=["tokens", "samples", "narrow", "shared", "members", "wide", "table_stride"])
def unpack_kernel(
    packets,
    ticket,
    control,
    newest,
    tables,
    temperatures,
    seeds,
    counts,
    filters,
    ids,
    positions,
    cache_slots,
    row_temperatures,
    row_seeds,
    row_counts,
    row_filters,
    table_stride,
    tokens,
    samples,
    narrow,
    shared,
    members,
    wide,
    PACKETS: tl.constexpr,
    PACKET: tl.constexpr,
    SAMPLE_ROWS: tl.constexpr,
    SAMPLE_SLOTS: tl.constexpr,
    NARROW: tl.constexpr,
    SHARED: tl.constexpr,
    MEMBERS: tl.constexpr,
    WIDE: tl.constexpr,
    CODES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Grid (programs,): each takes LANES entries of every region. Regions longer than the step holds are padded:
    tokens that are stored nowhere, samples of no slot. All of the packet is asked for at once, padding included: the
    way to the host's memory and back is most of this kernel's time. Must stay a plain launch without a trigger: later
    kernels read its results before they wait for their predecessors."""
    index = tl.program_id(0) * LANES + tl.arange(0, LANES)
    packet = packets + (tl.load(ticket) % PACKETS) * PACKET
    num_tokens = tl.load(packet)
    num_samples = tl.load(packet + 1)
    _copy(packet, control, index, 0, 16)
    _copy(packet, control, index, NARROW, narrow)
    _copy(packet, control, index, SHARED, shared)
    _copy(packet, control, index, MEMBERS, members)
    _copy(packet, control, index, WIDE, wide)

    stored = index < tokens
    code = tl.load(packet + CODES + index, mask=stored, other=0)
    position = tl.load(packet + CODES + TOKENS + index, mask=stored, other=0)
    cache_slot = tl.load(packet + CODES + 2 * TOKENS + index, mask=stored, other=0)
    owner = tl.load(packet + CODES + 3 * TOKENS + index, mask=stored, other=0)
    slot = tl.load(packet + SAMPLE_SLOTS + index, mask=index < samples, other=0)
    row = tl.load(packet + SAMPLE_ROWS + index, mask=index < samples, other=0)

    real = index < num_tokens
    code = tl.where(real, code, 0)
    position = tl.where(real, position, 0)
    sampled = code < 0
    drawn = tl.load(newest + (-1 - code), mask=sampled, other=0)
    tl.store(ids + index, tl.where(sampled, drawn, code), mask=stored)
    tl.store(positions + index, position, mask=stored)
    tl.store(cache_slots + index, tl.where(real, cache_slot, -1), mask=stored)
    entry = tables + owner.to(tl.int64) * table_stride + position // BLOCK_SIZE
    tl.store(entry, cache_slot // BLOCK_SIZE, mask=real)

    slot = tl.where(index < num_samples, slot, -1)
    row = tl.where(index < num_samples, row, 0)
    tl.store(control + SAMPLE_SLOTS + index, slot, mask=index < samples)
    tl.store(control + SAMPLE_ROWS + index, row, mask=index < samples)
    taken = slot >= 0
    tl.store(row_temperatures + index, tl.load(temperatures + slot, mask=taken, other=0.0), mask=index < samples)
    tl.store(row_seeds + index, tl.load(seeds + slot, mask=taken, other=0), mask=index < samples)
    tl.store(row_counts + index, tl.load(counts + slot, mask=taken, other=0), mask=index < samples)
    for which in tl.static_range(3):
        value = tl.load(filters + slot * 3 + which, mask=taken, other=0.0)
        tl.store(row_filters + index * 3 + which, value, mask=index < samples)


@triton.jit(do_not_specialize=["hidden_stride"])
def commit_kernel(
    ticket,
    control,
    sampled,
    hidden,
    hidden_stride,
    newest,
    counts,
    results,
    SAMPLE_SLOTS: tl.constexpr,
    PACKETS: tl.constexpr,
    RESULT: tl.constexpr,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (samples,): remember a row's token and tell the host; -1 tells it that the model gave no finite numbers."""
    if OVERLAP:
        gdc_wait()
    row = tl.program_id(0)
    at = tl.load(control + 2)
    slot = tl.load(control + SAMPLE_SLOTS + row)
    if slot >= 0:
        token = tl.load(sampled + row).to(tl.int32)
        column = tl.arange(0, PAD)
        value = tl.load(hidden + row.to(tl.int64) * hidden_stride + column, mask=column < SIZE, other=0.0)
        value = value.to(tl.float32)
        broken = tl.sum((tl.abs(value) < float("inf")).to(tl.int32), 0) < PAD
        tl.store(newest + slot, token)
        tl.store(counts + slot, tl.load(counts + slot) + 1)
        tl.store(results + at * RESULT + row, tl.where(broken, -1, token))
    if row == 0:
        tl.store(ticket, (tl.load(ticket) + 1) % PACKETS)


@triton.jit(do_not_specialize=["table_stride"])
def admit_kernel(
    messages,
    ticket,
    temperatures,
    seeds,
    counts,
    filters,
    tables,
    table_stride,
    MESSAGES: tl.constexpr,
    SIZE: tl.constexpr,
    ADMISSION: tl.constexpr,
    LANES: tl.constexpr,
):
    """Grid (programs,): they share the records of the message whose turn it is, out of MESSAGES of SIZE entries. A
    message is the number of its records, the records, and blocks. A record is eleven int32: slot, whether sampling
    state is new, bits of the temperature, low and high half of the seed, tokens generated so far, first entry among the
    blocks, number of blocks, bits of top_k, top_p and min_p, all three as float32."""
    message = messages + (tl.load(ticket) % MESSAGES) * SIZE
    number = tl.load(message)
    blocks = message + 1 + number * ADMISSION
    for row in range(tl.program_id(0), number, tl.num_programs(0)):
        record = message + 1 + row * ADMISSION
        slot = tl.load(record)
        if tl.load(record + 1) != 0:
            tl.store(temperatures + slot, tl.load(record + 2).to(tl.float32, bitcast=True))
            low = tl.load(record + 3).to(tl.uint32, bitcast=True).to(tl.int64)
            tl.store(seeds + slot, (tl.load(record + 4).to(tl.int64) << 32) | low)
            tl.store(counts + slot, tl.load(record + 5).to(tl.int64))
            for which in tl.static_range(3):
                tl.store(filters + slot * 3 + which, tl.load(record + 8 + which).to(tl.float32, bitcast=True))
        first = tl.load(record + 6)
        length = tl.load(record + 7)
        for start in range(0, length, LANES):
            index = start + tl.arange(0, LANES)
            block = tl.load(blocks + first + index, mask=index < length, other=0)
            tl.store(tables + slot.to(tl.int64) * table_stride + index, block, mask=index < length)
