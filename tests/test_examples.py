"""Every file in examples/ runs, and says what it promises."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import pytest

from pagedlc import LLM, shared_llm

EXAMPLES = Path(__file__).parent.parent / "examples"

#: What a run must print. An example without an entry must print something.
EXPECTED = {
    "ask_documents.py": [
        "A LangChain chain answers:",
        "A LlamaIndex query engine answers:",
        "120 square met",
        "twelve items",
        "21 days",
        "85 euros",
        "source: library-rules.md, Borrowing",
        "source: allotment-terms.pdf, page 1",
        "The prefix cache saved",
    ],
}


@pytest.fixture(scope="module")
def shared_model() -> LLM:
    """Kept alive over all examples: they name the same model and options, and so share its engine."""
    return shared_llm("smollm2").load()


@pytest.mark.usefixtures("shared_model")
@pytest.mark.parametrize("name", sorted(file.name for file in EXAMPLES.glob("*.py")))
def test_example(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)  # an example finds its files wherever it is started
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.strip()
    for text in EXPECTED.get(name, []):
        assert text in printed


def test_every_expectation_belongs_to_an_example() -> None:
    assert set(EXPECTED) <= {file.name for file in EXAMPLES.glob("*.py")}
