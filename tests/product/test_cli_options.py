"""The command line before a model is involved: options, help, errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from pagedlc.cli.app import run
from pagedlc.cli.options import option_help, with_engine_options
from pagedlc_engine.config import EngineConfig
from pagedlc_engine.errors import ConfigError, ModelLoadError

ENGINE_OPTIONS = [name for name in EngineConfig.model_fields if name != "model"]


def engine_options(*arguments: str) -> dict[str, Any]:
    """What a command receives for these arguments."""
    received: dict[str, Any] = {}
    app = typer.Typer()

    @app.command()
    @with_engine_options
    def command(*, engine_options: dict[str, Any]) -> None:
        received.update(engine_options)

    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return received


@pytest.mark.parametrize("command", ["ask", "chat"])
def test_every_engine_option_is_an_option_with_its_documentation(command: str, capsys: Any) -> None:
    assert run([command, "--help"]) == 0
    text = capsys.readouterr().out
    words = " ".join(text.split())
    helps = option_help(EngineConfig)
    for name in ENGINE_OPTIONS:
        assert f"--{name.replace('_', '-')} " in text
        assert helps[name].split(".")[0].replace("None", "none")[-30:] in words


def test_only_given_options_are_handed_on() -> None:
    assert engine_options() == {}
    given = engine_options("--max-num-seqs", "8", "--gpu-memory-utilization=0.5", "--no-enable-prefix-caching")
    assert given == {"max_num_seqs": 8, "gpu_memory_utilization": 0.5, "enable_prefix_caching": False}


def test_none_stands_for_none_where_it_is_a_choice() -> None:
    assert engine_options("--quantization", "none") == {"quantization": None}
    assert engine_options("--quantization", "int8") == {"quantization": "int8"}


@pytest.mark.parametrize("written", ["none", None])
def test_no_quantization_has_one_name_everywhere(written: str | None) -> None:
    config = EngineConfig.create(model=".", quantization=written)
    assert config == EngineConfig.create(model=".", **engine_options("--quantization", "none"))
    assert config == EngineConfig.create(model=".", **yaml.safe_load(f"quantization: {written or 'null'}"))
    assert config.quantization is None


def test_another_spelling_is_told_the_name() -> None:
    with pytest.raises(ConfigError, match=r"or 'none' \(got 'None'\)"):
        EngineConfig.create(model=".", **yaml.safe_load("quantization: None"))  # which is text in YAML


def test_lists_are_written_with_commas() -> None:
    given = engine_options("--cudagraph-capture-sizes", "1, 2,8")
    assert EngineConfig.create(model=".", **given).cudagraph_capture_sizes == (1, 2, 8)


def test_given_options_make_a_config() -> None:
    given = engine_options("--kv-cache-memory-bytes", "1000000", "--block-size", "32", "--seed", "7")
    config = EngineConfig.create(model=".", **given)
    assert (config.kv_cache_memory_bytes, config.block_size, config.seed) == (1_000_000, 32, 7)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["chat", "--block-size", "x"], "--block-size"),
        (["chat", "--max-num-seq", "1"], "--max-num-seqs"),
        (["ask", "README.md"], "QUESTION"),
        (["ask", "README.md", "why?", "--top-k", "0"], "--top-k"),
        (["chat", "--quantization", "int9"], "int8"),
        (["dance"], "dance"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments: list[str], words: str, capsys: Any) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pagedlc: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["ask", "nowhere.txt", "why?"], 1, "No such file or folder: nowhere.txt"),
        (["ask", ".", "why?"], 1, "No documents in ."),
        (["ask", "note.txt", "why?", "--block-size", "17"], 2, "block_size: must be 16, 32 or 64"),
        (["ask", "note.txt", "why?", "--model", "./no-model"], 1, "no-model"),
        (["ask", "note.txt", " "], 2, "The question is empty."),
        (["ask", "note.txt", "Gr\udcfc\udcdfe?"], 2, "The question is not valid Unicode"),
        (["chat", "--model", "note.txt"], 1, "note.txt"),
    ],
)
def test_failures_are_one_line(
    arguments: list[str], code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    if "note.txt" in arguments:
        (tmp_path / "note.txt").write_text("A note.")
    assert run(arguments) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("pagedlc: ")
    assert words in error


def test_an_empty_question_loads_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "note.txt").write_text("A note.")
    monkeypatch.setattr("pagedlc.cli.ask.LLM", None)
    assert run(["ask", str(tmp_path), "What is it?", " "]) == 2
    assert capsys.readouterr().err == "pagedlc: The question is empty.\n"


def test_files_that_are_left_out_are_said_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("A note.")
    (tmp_path / "sheet.xlsx").write_bytes(b"PK")
    command = [sys.executable, "-m", "pagedlc.cli", "ask", str(tmp_path), "What is it?", "--max-tokens", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (
        done.stderr.splitlines()[0]
        == "Left out: sheet.xlsx: only .md, .markdown, .rst, .txt, .text, .pdf files are read."
    )


def test_an_error_of_several_lines_becomes_one(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ModelLoadError("first\n  second")

    monkeypatch.setattr("pagedlc.cli.chat.converse", fail)
    assert run(["chat"]) == 1
    assert capsys.readouterr().err == "pagedlc: first second\n"


def test_no_command_shows_the_help(capsys: Any) -> None:
    assert run([]) == 0
    text = capsys.readouterr().out
    assert "ask" in text
    assert "chat" in text


def test_help_and_version_do_not_wait_for_torch() -> None:
    code = (
        "import sys\nfrom pagedlc.cli.app import run\n"
        "assert run(['chat', '--help']) == 0\nassert run(['--version']) == 0\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *_, version, loaded = done.stdout.splitlines()
    assert version.startswith("pagedlc ")
    assert loaded == "[]"
