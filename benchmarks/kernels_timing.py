"""Timing for the kernel benchmarks: CUDA graphs over rotating buffers, medians, and the card's own ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

__all__ = ["ceilings", "microseconds"]

Call = Callable[[], object]


def microseconds(calls: Sequence[Call], *, repeats: int = 7, window_ms: float = 3.0) -> float:
    """Device time of one call, from a CUDA graph of all of them in order.

    Args:
        calls: The same work on different buffers, together larger than the L2 cache, so that each finds its data
            in device memory as it would between the layers of a model.
        repeats: Timings, of which the median counts.
        window_ms: Least length of a timing.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed(count: int) -> float:
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    timed(1)
    count = max(2, int(window_ms / max(timed(1), 1e-3)) + 1)
    return statistics.median(timed(count) for _ in range(repeats)) / count / len(calls) * 1e3


def ceilings() -> dict[str, float]:
    """Copy bandwidth in GB/s (read + written) and bf16 matrix rate in TFLOP/s, on random data."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    # A kernel that copies: as a node of a graph, copy_ itself is no kernel and slower.
    copy = microseconds([lambda: torch.neg(source, out=target)], window_ms=10)
    left, right = source.view(-1, 8192)[:8192], source.view(-1, 8192)[8192:16384]
    product = torch.empty((8192, 8192), dtype=torch.bfloat16, device="cuda")
    matmul = microseconds([lambda: torch.mm(left, right, out=product)], window_ms=10)
    return {"copy_GBps": 2 * source.nbytes / copy / 1e3, "matmul_TFLOPs": 2 * 8192**3 / matmul / 1e6}
