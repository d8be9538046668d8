"""Access to torch's FBGEMM kernels, the fast CPU products with small weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["fbgemm_available", "fbgemm_engine"]

_ENGINES = ("x86", "fbgemm")


def fbgemm_available(*operators: str) -> bool:
    """Whether this torch has FBGEMM for this CPU, with these operators of ``torch.ops.quantized``."""
    return "fbgemm" in torch.backends.quantized.supported_engines and all(
        hasattr(torch.ops.quantized, name) for name in operators
    )


@contextmanager
def fbgemm_engine() -> Iterator[None]:
    """Pack weights for FBGEMM, whatever engine the process has chosen."""
    chosen = torch.backends.quantized.engine
    if chosen in _ENGINES:
        yield
        return
    torch.backends.quantized.engine = "fbgemm"
    try:
        yield
    finally:
        torch.backends.quantized.engine = chosen
