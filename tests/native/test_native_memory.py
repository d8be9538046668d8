"""Where packed weights lie."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pagedlc_engine.native.weights import Arena


@pytest.mark.skipif(sys.platform != "linux", reason="looks memory up in /proc")
def test_packed_weights_lie_in_memory_that_can_have_huge_pages() -> None:
    arena = Arena(1 << 23)
    at = arena.take(64)
    assert at % 64 == 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags, *_ = line.split()
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= at < last:
            assert flags == "rw-p"  # shared memory has its own setting, which is off nearly everywhere
            return
    raise AssertionError("the memory is not there")
