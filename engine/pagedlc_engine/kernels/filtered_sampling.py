"""The token of rows with min_p, top_k or top_p, without a sort and without a look from the host.

One program a row. What a row keeps is one cut: tokens below it are dropped, as in
:mod:`pagedlc_engine.sampling.filters`. A cut is searched for between two bounds: how much lies at or above each of a
few evenly spaced values tells which of the gaps holds it, and the gap is searched in turn (a multi-way bisection).

Most of a vocabulary is never looked at. The largest values of the row's blocks, which the reduction before this
kernel leaves behind, are some of its values, so a cut that holds enough of *them* is a bound for the row's own cut;
only blocks that reach the bound are read, and the few values above it are copied to a list that the search goes over.
Where blocks' largest values do not hold a top_p, a bound is guessed and the list's mass tells whether it is one.
Where the list has no room (flat distributions), the search starts over the whole row until it has.

Nothing is allocated by what the data is, and all sums are in a fixed order: a row's token depends on the row alone.
"""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

__all__ = ["BLOCK", "ROOM", "has_filter", "invert", "log2_factor", "pick_filtered_kernel", "uniform_number"]

#: Values a block: what the first bound is found from, and what is read or left.
BLOCK = 256
#: Values of a row that the search goes over at most, once it has left the row itself.
ROOM = 4096


@triton.jit
def log2_factor(temperature):
    """What logits are multiplied by before ``exp2``; the temperature is not 0."""
    return 1.4426950408889634 / temperature


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def uniform_number(seeds, counters, row):
    """The row's number in [0, 1), float64: as :func:`pagedlc_engine.sampling.rng.uniform`."""
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    counter = tl.load(counters + row).to(tl.uint64)
    bits = _mix(_mix(seed + 0x9E3779B97F4A7C15) + (counter + 1) * 0x9E3779B97F4A7C15)
    return (bits >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def has_filter(temperatures, filters, row, vocab_size):
    """Whether a row is drawn from less than the whole vocabulary."""
    top_k = tl.load(filters + row * 3)
    top_p = tl.load(filters + row * 3 + 1)
    min_p = tl.load(filters + row * 3 + 2)
    some = ((top_k > 0.0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0)
    return some & (tl.load(temperatures + row).to(tl.float32) > 0.0)


@triton.jit
def _narrow(
    values, length, factor, highest, low, high, outside, above, wanted, by_mass,
    FINE: tl.constexpr, WAYS: tl.constexpr, TILE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """One step of the search for the greatest cut that keeps ``wanted``, a number of values or a mass of weights.

    Args:
        values: ``length`` values, times ``factor``; a weight is 2 to the power of a value less ``highest``.
        low, high: The cut is from ``low`` on and below ``high``.
        outside: How much is kept that is not among the values.
        above: How much is kept from ``high`` on.
        COUNT: End when no more than ``FINE`` of the values are left between the bounds; with one, it is the cut.

    Returns:
        low, high and above, narrower; whether to go on.
    """
    edge = low + (high - low) * (tl.arange(0, WAYS).to(tl.float32) * (1.0 / WAYS))
    edges = edge[:, None]
    lane = tl.arange(0, TILE)[None, :]
    sums = tl.zeros([WAYS, TILE], tl.float32)
    counts = tl.zeros([WAYS, TILE], tl.int32)
    value = tl.load(values + lane, mask=lane < length, other=float("-inf")).to(tl.float32) * factor
    for start in range(TILE, length + TILE, TILE):
        # Loaded a round ahead: the sums hide the way to memory.
        following = tl.load(values + start + lane, mask=start + lane < length, other=float("-inf"))
        amount = tl.where(by_mass, tl.exp2(value - highest), 1.0)
        sums += tl.where(value >= edges, amount, 0.0)
        if COUNT:
            counts += (value >= edges).to(tl.int32)
        value = following.to(tl.float32) * factor
    kept = tl.sum(sums, 1) + outside
    enough = kept >= wanted
    new_low = tl.max(tl.where(enough, edge, low), 0)
    new_high = tl.min(tl.where(enough, high, edge), 0)
    above = tl.maximum(above, tl.max(tl.where(enough, 0.0, kept), 0))
    # Values closer than this have equal weights in float32.
    moved = ((new_low > low) | (new_high < high)) & (new_high - new_low > 3e-8)
    if COUNT:
        count = tl.sum(counts, 1)
        most = tl.max(tl.where(enough, 0, count), 0)
        least = tl.min(tl.where(enough, count, 2147483647), 0)
        moved = moved & (least - most > FINE)
    return new_low, new_high, above, moved


@triton.jit
def _list_blocks(peak, low, listed, BLOCKS: tl.constexpr):
    """List the blocks that reach ``low``, in order; returns how many. Their largest values ``peak``: [BLOCKS]."""
    reaching = (peak >= low).to(tl.int32)
    place = tl.cumsum(reaching, 0) - 1
    tl.debug_barrier()
    tl.store(listed + place, tl.arange(0, BLOCKS), mask=reaching > 0)
    tl.debug_barrier()
    return tl.sum(reaching, 0)


@triton.jit
def _listed_values(logits, vocab_size, factor, listed, count, start, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Values of listed blocks from ``start`` on, [GROUP, BLOCK]; -inf where there are none."""
    number = start + tl.arange(0, GROUP)
    block = tl.load(listed + number, mask=number < count, other=0)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = (number < count)[:, None] & (column < vocab_size)
    return tl.load(logits + column, mask=live, other=float("-inf")).to(tl.float32) * factor


@triton.jit
def _collect(
    logits, vocab_size, factor, listed, count, highest, low, high, found_values,
    ROOM: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Copy the listed blocks' values from ``low`` on and below ``high``, in order.

    Returns:
        How many there are (as soon as there is no room for all, any number above it), and their mass.
    """
    found = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float32)
    start = tl.full([], 0, tl.int32)
    lane = tl.arange(0, GROUP * BLOCK)
    while (start < count) & (found <= ROOM):
        number = start + lane // BLOCK
        column = tl.load(listed + number, mask=number < count, other=0) * BLOCK + lane % BLOCK
        live = (number < count) & (column < vocab_size)
        value = tl.load(logits + column, mask=live, other=float("-inf")).to(tl.float32) * factor
        inside = (value >= low) & (value < high)
        ones = inside.to(tl.int32)
        place = found + tl.cumsum(ones, 0) - 1
        tl.store(found_values + place, value, mask=inside & (place < ROOM))
        found += tl.sum(ones, 0)
        mass += tl.sum(tl.where(inside, tl.exp2(value - highest), 0.0), 0)
        start += GROUP
    tl.debug_barrier()
    return found, mass


@triton.jit
def _block_weights(
    logits, vocab_size, factor, highest, cut, peak, listed, kept,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Sums of the weights from ``cut`` on, [BLOCKS]: of the n-th listed block at place n."""
    count = _list_blocks(peak, cut, listed, BLOCKS)
    for start in range(0, count, GROUP):
        value = _listed_values(logits, vocab_size, factor, listed, count, start, BLOCK, GROUP)
        sums = tl.sum(tl.where(value >= cut, tl.exp2(value - highest), 0.0), 1)
        number = start + tl.arange(0, GROUP)
        tl.store(kept + number, sums, mask=number < count)
    tl.debug_barrier()
    number = tl.arange(0, BLOCKS)
    return tl.load(kept + number, mask=number < count, other=0.0)


@triton.jit
def invert(weight, wanted, SIZE: tl.constexpr):
    """Where the running sum of ``weight``, [SIZE], exceeds ``wanted``, and what is left of it there."""
    place = tl.arange(0, SIZE)
    last = tl.max(tl.where(weight > 0.0, place, 0), 0)
    chosen = tl.minimum(tl.sum((tl.cumsum(weight, 0) <= wanted).to(tl.int32), 0), last)
    return chosen, wanted - tl.sum(tl.where(place < chosen, weight, 0.0), 0)


@triton.jit
def pick_filtered_kernel(
    logits,
    temperatures,
    seeds,
    counters,
    filters,
    peaks,
    sums,
    block_peaks,
    found_values,
    listed,
    kept,
    out,
    row_stride,
    vocab_size,
    num_parts,
    num_blocks,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    GROUP: tl.constexpr,
    WAYS: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows,). Rows without a filter keep the token that is there."""
    if OVERLAP:
        gdc_wait()
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row).to(tl.float32)
    top_k = tl.load(filters + row * 3)
    top_p = tl.load(filters + row * 3 + 1)
    min_p = tl.load(filters + row * 3 + 2)
    has_top_k = (top_k > 0.0) & (top_k < vocab_size)
    has_top_p = top_p < 1.0
    has_min_p = min_p > 0.0
    if (temperature > 0.0) & (has_top_k | has_top_p | has_min_p):
        number = tl.arange(0, BLOCKS)
        peak = tl.load(block_peaks + row * num_blocks + number, mask=number < num_blocks, other=float("-inf"))
        highest = tl.max(peak, 0)
        # A row of -inf keeps the token that is there, too.
        if (highest > float("-inf")) & (highest < float("inf")):
            logits += row.to(tl.int64) * row_stride
            block_peaks += row * num_blocks
            listed += row * num_blocks
            kept += row * num_blocks
            found_values += row * ROOM
            factor = log2_factor(temperature)
            part = tl.arange(0, PARTS)
            live = part < num_parts
            part_peak = tl.load(peaks + row * num_parts + part, mask=live, other=float("-inf"))
            mass = tl.sum(
                tl.load(sums + row * num_parts + part, mask=live, other=0.0) * tl.exp2(part_peak - highest), 0
            )
            top = highest + (1.0 + tl.abs(highest)) * 1e-6  # above every value
            # Smaller weights are 0 in float32.
            cut = tl.maximum(highest - 126.0, highest + tl.log2(tl.where(has_min_p, min_p, 1e-38)))
            held = tl.full([], ROOM + 1, tl.int32)
            for stage in range(2):
                by_mass = stage == 1
                if (has_top_k & (stage == 0)) | (has_top_p & by_mass):
                    low = cut
                    high = top
                    wanted = top_k
                    if by_mass:
                        if has_top_k | has_min_p:
                            mass = tl.sum(
                                _block_weights(
                                    logits, vocab_size, factor, highest, cut, peak, listed, kept, BLOCKS, BLOCK, GROUP
                                ),
                                0,
                            )
                        # At least something, for a top_p that float32 does not tell from 0: the likeliest weighs 1.
                        wanted = tl.maximum(top_p * mass, 1e-30)
                        # All tokens of less than this together are not what top_p drops.
                        low = tl.maximum(low, highest + tl.log2((1.0 - top_p) * mass / vocab_size) - 0.01)
                    above = 0.0
                    outside = 0.0
                    found = held
                    moved = True
                    if held > ROOM:
                        bound = low
                        lowest = tl.maximum(low, tl.min(tl.where(peak > float("-inf"), peak, highest), 0))
                        reaching = tl.where(by_mass, tl.exp2(peak - highest), 1.0)
                        sure = tl.sum(tl.where(peak >= lowest, reaching, 0.0), 0) >= wanted
                        if sure:
                            bound = lowest
                            end = high
                            while moved:
                                bound, end, above, moved = _narrow(
                                    block_peaks, num_blocks, 1.0, highest, bound, end, 0.0, above, wanted, by_mass,
                                    4, WAYS, FEW, True,
                                )  # fmt: skip
                        elif by_mass:
                            bound = tl.minimum(low + 3.0, highest)
                        else:
                            sure = True
                        low_known = low
                        low = bound
                        found = tl.full([], ROOM + 1, tl.int32)
                        above = 0.0
                        moved = True
                        tries = 0
                        while (found > ROOM) & moved:
                            if tries > 0:
                                low, high, above, moved = _narrow(
                                    logits, vocab_size, factor, highest, low, high, 0.0, above, wanted, by_mass,
                                    1, WAYS, MANY, False,
                                )  # fmt: skip
                            count = _list_blocks(peak, low, listed, BLOCKS)
                            found, inside = _collect(
                                logits, vocab_size, factor, listed, count, highest, low, high, found_values,
                                ROOM, BLOCK, GROUP,
                            )  # fmt: skip
                            if tries == 0:
                                if (found > ROOM) | (inside >= wanted) | sure:
                                    held = found
                                if ((found > ROOM) | (inside < wanted)) & (not sure):
                                    low = low_known
                                    found = tl.full([], ROOM + 1, tl.int32)
                            tries += 1
                        outside = above
                        moved = found <= ROOM
                    while moved:
                        low, high, above, moved = _narrow(
                            found_values, found, 1.0, highest, low, high, outside, above, wanted, by_mass,
                            1, WAYS, FEW, True,
                        )  # fmt: skip
                    cut = low
            weight = _block_weights(logits, vocab_size, factor, highest, cut, peak, listed, kept, BLOCKS, BLOCK, GROUP)
            random = uniform_number(seeds, counters, row)
            chosen, rest = invert(weight, (random * tl.sum(weight, 0).to(tl.float64)).to(tl.float32), BLOCKS)
            first = tl.load(listed + chosen) * BLOCK
            column = first + tl.arange(0, BLOCK)
            value = tl.load(logits + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32) * factor
            inner, _ = invert(tl.where(value >= cut, tl.exp2(value - highest), 0.0), rest, BLOCK)
            tl.store(out + row, (first + inner).to(tl.int64))
