"""How the kernels are launched: interpreted or compiled, with or without programmatic dependent launch; and compiled
ahead of their launch, several at a time."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton

from pagedlc_engine.errors import ConfigError
from pagedlc_engine.kernels.compile_lock import alone_in

__all__ = [
    "LOG2_E",
    "Card",
    "can_copy_in_bulk",
    "can_overlap",
    "can_specialize_warps",
    "card_of",
    "compile_ahead",
    "dot_precision",
    "interpreted",
    "launch_options",
]

LOG2_E = 1.4426950408889634
_MOST_COMPILERS = 16
#: Gluon is experimental, its names change between versions.
_FIRST_GLUON, _LAST_GLUON = (3, 6), (3, 9)
#: Triton has one hook: two that are set at once could not both be taken back.
_hook_lock = threading.Lock()


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def can_overlap() -> bool:
    """Whether a kernel may start while its predecessor still runs (programmatic dependent launch): on GPUs of compute
    capability 9.0 and later."""
    return not interpreted() and _is_hopper_or_later()


def can_copy_in_bulk() -> bool:
    """Whether tiles can be fetched by descriptor: by the same GPUs, whose copy engine does it. On others Triton turns
    descriptors into plain loads that nothing is done ahead of."""
    return interpreted() or _is_hopper_or_later()


def can_specialize_warps() -> bool:
    """Whether warps of a program can have roles of their own (:mod:`specialized_attention`): on Hopper, whose matrix
    instructions that kernel is written in, with a version of Triton that it was compiled with."""
    return not interpreted() and _is_hopper_or_later(90) and _FIRST_GLUON <= _triton_version() <= _LAST_GLUON


def _is_hopper_or_later(latest: int = 1 << 10) -> bool:
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and 90 <= target.arch <= latest)


def _triton_version() -> tuple[int, int]:
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True, slots=True)
class Card:
    """What a launch has to fit.

    Args:
        num_processors: Multiprocessors.
        shared_bytes: Shared memory that one program may take.
    """

    num_processors: int = 132
    shared_bytes: int = 232448


@lru_cache
def card_of(device: torch.device) -> Card:
    """The device that a launch is for; one like an H100 where there is none."""
    if device.type != "cuda":
        return Card()
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return Card(properties["multiprocessor_count"], properties["max_shared_mem"])


def launch_options(
    num_warps: int = 4, num_stages: int = 3, *, overlap: bool = False, max_registers: int | None = None
) -> dict[str, Any]:
    """Keyword arguments for one launch.

    Args:
        num_warps: Warps a program.
        num_stages: Depth of the software pipeline.
        overlap: Programmatic dependent launch, where :func:`can_overlap`: the kernel may start while its predecessor
            still runs. It must have been given the matching compile-time flag, and keep the rule of such chains: every
            program waits (``gdc_wait``) before it writes anything and before it ends, and reads before that only what
            earlier steps or the step's first kernel, which nothing overlaps, have written.
        max_registers: Most registers a thread; ``None`` leaves it to the compiler.
    """
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    if overlap:  # the interpreter knows no such option
        options["launch_pdl"] = True
    if max_registers is not None:
        options["maxnreg"] = max_registers
    return options


def dot_precision(dtype: torch.dtype) -> str:
    """Precision of ``tl.dot`` operands: full float32 products for float32 data, no effect on 16-bit types."""
    return "ieee" if dtype == torch.float32 else "tf32"


def compile_ahead(launch: Callable[[], None], device: torch.device) -> int:
    """Compile and load every kernel that ``launch`` launches, several at a time.

    While ``launch`` runs, kernels that are not compiled yet are noted in place of being launched; those that are
    compiled run. Its results mean nothing, and it must bear that some launches did not happen. Triton compiles mostly
    outside the interpreter lock, so threads are enough.

    Args:
        launch: Launches kernels, in the calling thread.
        device: The CUDA device they are for.

    Returns:
        How many were compiled, or read from Triton's cache on disk.

    Raises:
        ConfigError: A kernel could not be compiled.
    """
    noting = _note(launch)
    workers = min(_MOST_COMPILERS, os.cpu_count() or 1)
    with alone_in(Path(triton.knobs.cache.dir)), ThreadPoolExecutor(workers, "pagedlc-compile") as pool:
        compiled = [pool.submit(_compile, *variant, device) for variant in noting.variants.values()]
        try:
            for each in compiled:
                each.result()
        except Exception as error:
            pool.shutdown(cancel_futures=True)
            raise ConfigError(
                f"The GPU kernels could not be compiled: {error} Triton needs a C compiler (gcc or clang, or the one "
                "that the variable CC names) and a cache folder it can write (TRITON_CACHE_DIR). "
                "attention_backend='torch' does without kernels, far slower."
            ) from error
    return len(compiled)


def _note(launch: Callable[[], None]) -> _Noting:
    runtime = triton.knobs.runtime
    with _hook_lock:
        noting = _Noting(runtime.jit_cache_hook)
        runtime.jit_cache_hook = noting
        try:
            launch()
        finally:
            runtime.jit_cache_hook = noting.before
    return noting


def _compile(function: Any, variant: str, device: torch.device) -> None:
    torch.cuda.set_device(device)
    # Asking for ``run`` loads the binary and, in some versions of Triton, builds a launcher with the C compiler.
    _ = function.preload(variant).run


class _Noting:
    """Triton's hook that is asked before a kernel is compiled: true means that it need not be, nor launched.

    Args:
        before: The hook that was there; answers for other threads.
    """

    def __init__(self, before: Callable[..., Any] | None) -> None:
        self.before = before
        self._thread = threading.get_ident()
        self.variants: dict[tuple[int, str], tuple[Any, str]] = {}

    def __call__(self, **known: Any) -> bool:
        if threading.get_ident() != self._thread:
            return bool(self.before and self.before(**known))
        function = known["fn"].jit_function
        variant = function, known["compile"]["specialization_data"]
        self.variants.setdefault((id(function), str(known["key"])), variant)
        return True
