"""All kernels of an engine are compiled at once, before the first request, and none is launched for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")


def run(tmp_path: Path, **changed: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path), **changed}
    command = [sys.executable, "-m", "tests.kernels.fake_gpu"]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_every_variant_is_compiled_once_and_nothing_is_launched(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["compiled"] == 10  # two sizes of one kernel, one of another, seven of the sampler
    assert found["first"] == {"loaded": 10}
    assert found["again"] == 0
    assert found["hook"]
    assert found["other thread"] == {"loaded": 1, "launched": 1}
    # Whole and split prompts for three shapes of heads, a few tokens, a prefix pass; what follows that is another's.
    assert found["attention"] == {"specialized_attention_kernel": 8, "merge_kernel": 4, "attention_kernel": 1}
    assert found["specialized"] == {
        "here": True, "3.5.1": False, "3.6.0+git1234": True, "3.10.0": False, "later card": False,
    }  # fmt: skip


def test_engines_that_start_at_once_leave_the_hook_as_it_was() -> None:
    from triton import knobs

    from pagedlc_engine.kernels.launch import compile_ahead

    device, before = torch.device("cuda"), knobs.runtime.jit_cache_hook
    second_began, first_ended = threading.Event(), threading.Event()

    def second_launch() -> None:
        second_began.set()
        first_ended.wait(20)

    second = threading.Thread(target=compile_ahead, args=(second_launch, device))

    def first_launch() -> None:
        second.start()
        second_began.wait(0.3)  # it should not

    assert compile_ahead(first_launch, device) == 0
    first_ended.set()
    second.join(20)
    assert second_began.is_set()
    assert knobs.runtime.jit_cache_hook is before


def test_a_cache_that_cannot_be_written_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(tmp_path / "file")
    assert done.returncode != 0
    assert "ConfigError: The GPU kernels could not be compiled" in done.stderr
    assert "TRITON_CACHE_DIR" in done.stderr
