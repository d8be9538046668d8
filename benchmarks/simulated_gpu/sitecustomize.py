"""A stand-in for a GPU, to see what the interpreter does to an engine where there is none.

With this folder first on ``PYTHONPATH`` Python runs this file at its start, in engines' processes too. CPU engines then
compute nothing: a step takes 100 µs of Python on the host, and as long as Qwen3-0.6B takes on an H200 on a device that
works beside it. ``SIMULATED_MOST_AHEAD`` (14) is how far launches may run ahead.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

HOST_SECONDS = 1e-4
STEP_SECONDS = 6.3e-4
ANSWER_SECONDS = 2.2e-5
TOKEN_SECONDS = 5e-6
NAP_SECONDS = 2e-5


class PendingStep:
    """A launched step that is done at a known time."""

    def __init__(self, done_at: float, samples: int) -> None:
        self._done_at = done_at
        self._samples = samples

    def done(self) -> bool:
        """Whether the device is done with it."""
        return time.monotonic() >= self._done_at

    def get(self) -> Any:
        """Wait for it as the GPU's runner does; all tokens are the same."""
        from pagedlc_engine.plan import StepResult

        while not self.done():
            time.sleep(NAP_SECONDS)
        return StepResult([7] * self._samples, [None] * self._samples)


class SimulatedRunner:
    """Takes the time of steps."""

    def __init__(self, spec: Any) -> None:
        self.decoder, self.device = SimpleNamespace(spec=spec), SimpleNamespace(type="cpu")
        self._free_at = 0.0

    def execute(self, plan: Any) -> PendingStep:
        """Work on the host, then queue the step."""
        until = time.thread_time() + HOST_SECONDS
        while time.thread_time() < until:
            pass
        samples = sum(len(item.samplers) for item in plan.scheduled)
        prompt_tokens = plan.num_tokens - len(plan.scheduled)
        seconds = STEP_SECONDS + ANSWER_SECONDS * samples + TOKEN_SECONDS * prompt_tokens
        self._free_at = max(time.monotonic(), self._free_at) + seconds
        return PendingStep(self._free_at, samples)

    def close(self) -> None:
        """There is nothing to give back."""


def _simulate(engine: ModuleType) -> None:
    from pagedlc_engine.device import Placement
    from pagedlc_engine.kv.block_pool import BlockPool
    from pagedlc_engine.kv.manager import KVCacheManager

    def make(config: Any, placement: Any, spec: Any, max_model_len: int, progress: Any) -> tuple[Any, Any]:
        return SimulatedRunner(spec), KVCacheManager(BlockPool(config.num_blocks), config.block_size or 64, True)

    engine._plain_runner = make  # type: ignore[attr-defined]
    most = int(os.environ.get("SIMULATED_MOST_AHEAD", "14"))
    Placement.run_ahead = property(lambda self: 1)  # type: ignore[assignment, method-assign]
    Placement.most_ahead = property(lambda self: most)  # type: ignore[assignment, method-assign]


class _Finder(MetaPathFinder):
    """Waits for the engine to be imported: importing it here would take every Python program seconds."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "pagedlc_engine.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, real: Loader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        _simulate(module)


sys.meta_path.insert(0, _Finder())
