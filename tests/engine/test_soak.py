"""Seconds of what ``benchmarks/soak.py`` does for minutes."""

from __future__ import annotations

from pathlib import Path

from benchmarks import soak


def test_random_load_leaves_nothing_behind_and_nothing_wrong(tmp_path: Path) -> None:
    sizes = {"--seconds": 4, "--interval": 2, "--at-once": 40, "--longest": 200, "--spots": 40}
    report = soak.main([str(tmp_path / "soak.json"), *(str(item) for pair in sizes.items() for item in pair)])
    assert report["problems"] == []
    assert report["checked_again"]["answers"] > 0
