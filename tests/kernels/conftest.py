"""Kernels run compiled where there is a GPU, and in Triton's interpreter elsewhere."""

from tests.triton_device import device, seeded

__all__ = ["device", "seeded"]
