"""Building the compiled step: once, by several processes at a time, and doing without."""

from __future__ import annotations

import copy
import ctypes
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedlc import LLM, SamplingParams
from pagedlc_engine import device, native
from pagedlc_engine.native import Library, NativeAttention, compiler
from pagedlc_engine.native.compiler import BuildError, build
from pagedlc_engine.native.library import load_library
from tests.engine.tiny_models import make_tiny_model

#: Head sizes that the native step can do, and cannot.
FITTING, UNFITTING = 32, 8
QUICK = (*(flag for flag in compiler.FLAGS if flag != "-O3"), "-O0")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_library.cache_clear()
    yield tmp_path / "cache" / "pagedlc" / "native"
    load_library.cache_clear()


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "broken-c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def made_llm(folder: Path, quantization: str | None, head_dim: int = FITTING, **options: Any) -> LLM:
    model = make_tiny_model(folder / "tiny", head_dim=head_dim)
    return LLM(str(model), load_format="dummy", num_blocks=50, quantization=quantization, **options)


def answers(llm: LLM) -> list[int]:
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    return output.outputs[0].token_ids


def test_without_a_compiler_torch_computes_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.INFO, "pagedlc_engine"), made_llm(tmp_path, "auto") as llm:
        assert len(answers(llm)) == 3
    assert "there is no C++ compiler" in caplog.text
    assert caplog.text.count("torch computes instead") == 1


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'step.cpp:1: error: no such thing' >&2; exit 1", "error: no such thing"),
        ('[ "$1" = --version ] || exec touch /dev/null', "file too short|invalid ELF|cannot"),
        (
            '[ "$1" = --version ] && exit; for last; do :; done; echo "int x;" | cc -shared -x c - -o "$last"',
            "pagedlc_is_fast",
        ),
        ("printf 'erreur interne: \\351' >&2; exit 1", "erreur interne"),
    ],
)
def test_a_broken_compiler_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    with caplog.at_level(logging.INFO, "pagedlc_engine"), made_llm(tmp_path, "int8") as llm:
        assert len(answers(llm)) == 3
    (record,) = [record for record in caplog.records if "torch computes instead" in record.message]
    assert any(part in record.message for part in reason.split("|"))
    assert "\n" not in record.message


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"quantization": "auto"}, True),
        ({"quantization": "int8"}, True),
        ({"quantization": "auto", "head_dim": UNFITTING}, False),
        ({"quantization": "fp16"}, False),
        ({"quantization": None}, False),
        ({"quantization": "auto", "attention_backend": "torch"}, False),
    ],
)
def test_the_native_step_is_taken_where_it_fits(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], taken: bool
) -> None:
    monkeypatch.setattr(device, "load_library", lambda: library)
    made: list[object] = []
    monkeypatch.setattr(NativeAttention, "plan", _spied(NativeAttention.plan, made))
    with made_llm(tmp_path, **options) as llm:
        assert len(answers(llm)) == 3
    assert bool(made) == taken


def test_a_cpu_without_fast_integers_takes_it_only_when_asked(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = copy.copy(library)
    slow.is_fast = False
    monkeypatch.setattr(device, "load_library", lambda: slow)
    with caplog.at_level(logging.INFO, "pagedlc_engine"), made_llm(tmp_path, "auto") as llm:
        first = answers(llm)
    assert "no fast products" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "pagedlc_engine"), made_llm(tmp_path, "int8") as llm:
        assert len(answers(llm)) == len(first)
    assert "torch computes instead" not in caplog.text


def _spied(method: object, calls: list[object]) -> object:
    def spy(*arguments: object) -> object:
        calls.append(arguments)
        return method(*arguments)  # type: ignore[operator]

    return spy


def test_nothing_is_compiled_before_it_is_needed(tmp_path: Path, own_cache: Path) -> None:
    with made_llm(tmp_path, None) as llm:
        answers(llm)
    assert native.__name__ in sys.modules
    assert not own_cache.exists()


@pytest.mark.usefixtures("library")
def test_processes_that_build_at_once_all_get_a_whole_library(own_cache: Path) -> None:
    # The file alone: importing the package would import torch, which takes longer than the compiler.
    code = f"import runpy; print(runpy.run_path({compiler.__file__!r})['build']({QUICK!r}))"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    (path,) = {process.communicate()[0].strip() for process in running}
    assert Library(path).packed_bytes(32, 32) == 1088
    assert len(list(own_cache.iterdir())) == 1


@pytest.fixture
def small_source(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that compiles in a moment, in place of the real one."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "step.cpp").write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(compiler, "SOURCES", folder)
    return folder / "step.cpp"


def test_a_library_is_built_once_per_source(own_cache: Path, small_source: Path) -> None:
    first = build(QUICK)
    built = first.stat().st_ino
    assert build(QUICK) == first
    assert first.stat().st_ino == built
    assert first.parent == own_cache
    small_source.write_text('extern "C" int answer() { return 43; }')
    assert ctypes.CDLL(str(build(QUICK))).answer() == 43
    assert ctypes.CDLL(str(first)).answer() == 42


def test_libraries_of_earlier_versions_do_not_pile_up(own_cache: Path, small_source: Path) -> None:
    def built(number: int) -> Path:
        small_source.write_text(f'extern "C" int answer() {{ return {number}; }}')
        return build(QUICK)

    first, second = built(0), built(1)
    loaded = ctypes.CDLL(str(second))
    for number in range(2, 12):
        latest = built(number)
        assert built(0) == first  # it is in use, however old
    left = list(own_cache.iterdir())
    assert len(left) == 8
    assert {first, latest} <= set(left)
    assert second not in left
    assert loaded.answer() == 1  # whoever has it open keeps it


@pytest.mark.usefixtures("library")
def test_a_cache_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    code = f"import runpy; print(runpy.run_path({compiler.__file__!r})['build']({QUICK!r}))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path / "temporary"))
    assert not done.stderr
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.usefixtures("small_source")
def test_a_damaged_library_is_built_again(caplog: pytest.LogCaptureFixture) -> None:
    built = build(QUICK)
    whole = built.read_bytes()
    # To load this would end the process with a bus error.
    built.write_bytes(whole[: len(whole) // 2])
    assert build(QUICK).read_bytes() == whole
    assert "damaged" in caplog.text
    assert list(built.parent.iterdir()) == [built]


@pytest.mark.usefixtures("small_source")
def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert ctypes.CDLL(str(build(QUICK))).answer() == 42


def test_a_filled_cache_that_cannot_be_written_is_read(
    own_cache: Path, small_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(QUICK)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    assert build(QUICK) == first
    small_source.write_text('extern "C" int answer() { return 43; }')
    another = build(QUICK)
    assert ctypes.CDLL(str(another)).answer() == 43
    assert list(own_cache.iterdir()) == [first]


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(BuildError, match="no-such-compiler does not run"):
        build()
    monkeypatch.setenv("CXX", 'c++ "')
    with pytest.raises(BuildError, match="CXX cannot be read"):
        build()
