"""Programs of all kinds can have an engine in a process, and none leaves it behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_helpers import PATHS, engine_processes, eventually, is_running, params
from tiny_models import tiny_llm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from tiny_models import tiny_llm
from pagedlc import SamplingParams
llm = tiny_llm(Path({folder!r}), engine_host="process").load()
{rest}
"""


def script(folder: Path, rest: str) -> str:
    return SCRIPT.format(paths=PATHS, folder=str(folder), rest=rest)


def start(*arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


ANSWER = """
print(llm.generate([[1, 2]], SamplingParams(max_tokens=3))[0].finished)
print(*(pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()))
"""


def check_answer(program: subprocess.Popen[str]) -> None:
    out, err = program.communicate(timeout=60)
    assert out.startswith("True\n"), err
    [pid] = map(int, out.split()[1:])
    assert not is_running(pid)


def test_a_script_without_main_guard_just_works(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(script(folder, ANSWER))
    check_answer(start(str(file)))


def test_files_where_the_program_runs_are_not_taken_for_modules(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("numpy.py", "sitecustomize.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(PATHS))  # the tests' own may be relative
    monkeypatch.chdir(tmp_path)
    with tiny_llm(folder, engine_host="process") as made:
        assert made.generate([[1]], params(2))[0].finished


def test_a_program_without_standard_streams(folder: Path, tmp_path: Path) -> None:
    answer = "llm.generate([[1]], SamplingParams(max_tokens=2))[0].finished"
    rest = f"Path({str(tmp_path / 'out')!r}).write_text(str({answer}))"
    code = "import os\nfor number in range(3): os.close(number)\n" + script(folder, rest)
    program = start("-c", code)
    program.communicate(timeout=60)
    assert (tmp_path / "out").read_text() == "True"


def test_it_works_from_the_command_line(folder: Path) -> None:
    check_answer(start("-c", script(folder, ANSWER)))


def test_it_dies_with_a_killed_parent(folder: Path) -> None:
    stream = "stream = llm.generate_stream([1], SamplingParams(max_tokens=500)); next(stream)"
    parent = start("-c", script(folder, f"{stream}\nprint(1, flush=True)\ninput()"))
    assert parent.stdout is not None
    assert parent.stdout.readline() == "1\n"
    [pid] = engine_processes(parent.pid)
    assert is_running(pid)
    parent.kill()
    parent.communicate(timeout=20)
    eventually(lambda: not is_running(pid), 10)
