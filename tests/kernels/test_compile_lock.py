"""Engines that start at once on one machine compile one after the other, and never wait for good."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from pagedlc_engine.kernels.compile_lock import alone_in

_HOLD = """
import sys, time
from pathlib import Path
from pagedlc_engine.kernels.compile_lock import alone_in
with alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
    Path(sys.argv[1], "done").touch()
"""


def _holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_process_waits_for_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with _holder(folder) as first:
        assert first.stdin is not None
        first.stdin.write("\n")
        first.stdin.flush()
        with alone_in(folder):
            assert (folder / "done").exists()


def test_a_process_that_is_stuck_or_killed_holds_nobody_up(tmp_path: Path) -> None:
    with _holder(tmp_path) as stuck:
        with alone_in(tmp_path, patience=0.1):
            assert not (tmp_path / "done").exists()
        stuck.kill()
    begin = time.monotonic()
    with alone_in(tmp_path, patience=60):
        assert time.monotonic() - begin < 30


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with alone_in(blocked / "cache"):
        assert not (blocked / "cache").exists()
