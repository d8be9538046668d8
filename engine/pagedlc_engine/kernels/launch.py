"""How the kernels are launched: interpreted or compiled, with or without programmatic dependent launch."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton

__all__ = ["LOG2_E", "dot_precision", "interpreted", "launch_options"]

LOG2_E = 1.4426950408889634


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def launch_options(
    num_warps: int = 4, num_stages: int = 3, *, overlap: bool = False, max_registers: int | None = None
) -> dict[str, Any]:
    """Keyword arguments for one launch.

    Args:
        num_warps: Warps a program.
        num_stages: Depth of the software pipeline.
        overlap: Programmatic dependent launch: the kernel may start while its predecessor still runs, and waits
            inside for what it needs. The kernel must have been given the matching compile-time flag.
        max_registers: Most registers a thread; ``None`` leaves it to the compiler.
    """
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    if overlap and not interpreted():  # the interpreter knows no such option
        options["launch_pdl"] = True
    if max_registers is not None:
        options["maxnreg"] = max_registers
    return options


def dot_precision(dtype: torch.dtype) -> str:
    """Precision of ``tl.dot`` operands: full float32 products for float32 data, no effect on 16-bit types."""
    return "ieee" if dtype == torch.float32 else "tf32"
