"""Compiles for a GPU on a machine that has none: run as a program by :mod:`tests.kernels.test_compile_ahead`.

Triton's driver is replaced by one that claims to be an H100 and counts what is loaded and launched.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from pagedlc_engine.kernels.activation import silu_mul
from pagedlc_engine.kernels.launch import can_specialize_warps, compile_ahead
from pagedlc_engine.kernels.logprobs import measure_tokens
from pagedlc_engine.kernels.norm import add_rms_norm
from pagedlc_engine.kernels.paged_attention import paged_attention
from pagedlc_engine.kernels.sampler_stages import forbid_tokens, penalise_tokens, record_tokens
from pagedlc_engine.kernels.sampling import sample_tokens
from pagedlc_engine.sampling import Sampler, SamplerKernels
from tests.kernels.support import make_step

counts: Counter[str] = Counter()
loaded: Counter[str] = Counter()


class FakeUtils:
    """What Triton's driver offers to load a kernel."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 18}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        counts["loaded"] += 1
        loaded[name] += 1
        return "module", "function", 1, 0, 1024

    def unload_module(self, module: Any) -> None:
        pass


class FakeDriver:
    """A card that computes nothing."""

    utils = FakeUtils()
    arch = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(*arguments: Any) -> None:
            counts["launched"] += 1

        return launch


def launch() -> None:
    for size in (64, 64, 96):
        rows = torch.zeros(2, size)
        add_rms_norm(rows, None, rows[0], 1e-6)
    silu_mul(torch.zeros(2, 64))
    kernels = SamplerKernels(sample_tokens, forbid_tokens, penalise_tokens, record_tokens, measure_tokens)
    Sampler(5000, torch.device("cpu"), kernels).launch_kernels()


def attend_to_prompts() -> None:
    """Whole prompts, parts of one that come late in it and whose keys are split, and decoding after a shared prefix."""
    for heads, head_dim in ((4, 64), (4, 128), (6, 128)):
        attend([300], [300], heads, head_dim)
        attend([65], [5000], heads, head_dim)
    attend([20], [5000], 4, 128)
    attend([1] * 40, [3000] * 40, 4, 128, shared_blocks=40)


def attend(queries: list[int], contexts: list[int], heads: int, head_dim: int, shared_blocks: int = 0) -> None:
    step = make_step(
        queries, contexts, heads=heads, kv_heads=2, head_dim=head_dim, block_size=64, shared_blocks=shared_blocks,
        device=torch.device("cpu"), dtype=torch.bfloat16,
    )  # fmt: skip
    paged_attention(step.query, step.key_cache, step.value_cache, step.plan, scale=step.scale, overlap=True)


def noticed_in_another_thread() -> None:
    """A user's kernel, launched while the engine compiles, is compiled and launched as ever."""
    user = threading.Thread(target=silu_mul, args=(torch.zeros(2, 128),))
    user.start()
    user.join()


def main() -> None:
    """Print what happened as JSON."""
    triton.runtime.driver.set_active(FakeDriver())
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    found: dict[str, Any] = {"compiled": compile_ahead(launch, torch.device("cpu"))}
    found["first"] = dict(counts)
    found["again"] = compile_ahead(launch, torch.device("cpu"))
    found["hook"] = triton.knobs.runtime.jit_cache_hook is None
    loaded.clear()
    compile_ahead(attend_to_prompts, torch.device("cpu"))
    found["attention"] = dict(loaded)
    found["specialized"] = {"here": can_specialize_warps()}
    version = triton.__version__
    for other in ("3.5.1", "3.6.0+git1234", "3.10.0"):
        triton.__version__ = other
        found["specialized"][other] = can_specialize_warps()
    triton.__version__ = version
    FakeDriver.arch = 100
    found["specialized"]["later card"] = can_specialize_warps()
    FakeDriver.arch = 90
    counts.clear()
    compile_ahead(noticed_in_another_thread, torch.device("cpu"))
    found["other thread"] = dict(counts)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
