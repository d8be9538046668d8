"""Counter-based random numbers: the same seed and counter always give the same number.

The generator is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014):
the n-th output of a stream is a finalizer applied to ``state + n * GAMMA``, so any element is reached
directly, without a generator object to carry along. The finalizer is David Stafford's variant 13.

The stream of a seed is the one whose state is the first output of SplitMix64 started at the seed: plain seeds
0, 1, 2 … would otherwise be near neighbours on the one long sequence that all streams are cut from.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["signed64", "uniform"]


def signed64(value: int) -> int:
    """The low 64 bits of ``value`` as the two's-complement number that an int64 tensor holds."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    return value - (1 << 64) if value >> 63 else value


_GAMMA = signed64(0x9E37_79B9_7F4A_7C15)
_MULTIPLIER_1 = signed64(0xBF58_476D_1CE4_E5B9)
_MULTIPLIER_2 = signed64(0x94D0_49BB_1331_11EB)


def uniform(seeds: Tensor, counters: Tensor) -> Tensor:
    """One number in [0, 1) per pair of seed and counter.

    Args:
        seeds: int64 [R]; see :func:`signed64` for other integers.
        counters: int64 [R], number of the draw within the seed's stream, from 0.

    Returns:
        float64 [R] with 53 random bits.
    """
    bits = _mix(_mix(seeds + _GAMMA) + (counters + 1) * _GAMMA)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _MULTIPLIER_1
    bits = (bits ^ _shift_right(bits, 27)) * _MULTIPLIER_2
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift in zeros; the operator alone would repeat the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
