"""Where kernels run in tests: compiled where there is a GPU, in Triton's interpreter elsewhere.

To be imported before Triton.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

__all__ = ["device", "seeded"]

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("Triton was imported before TRITON_INTERPRET could be set")
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
