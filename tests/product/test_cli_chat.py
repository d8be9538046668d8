"""The terminal chat, with a scripted model in place of the real one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pagedlc.cli import chat
from pagedlc_engine.errors import PromptTooLongError

STOP = KeyboardInterrupt()
CUT = "and so"


class ScriptedLLM:
    """Streams the next answer of the script; an exception in it is raised at that place."""

    model_name = "scripted"

    def __init__(self, *answers: list[str | BaseException]) -> None:
        self.answers = list(answers)
        self.asked: list[list[dict[str, str]]] = []
        self.closed_streams = 0

    def chat_stream(self, messages: list[dict[str, str]], params: object) -> Iterator[Any]:
        self.asked.append(messages)
        try:
            for number, piece in enumerate(self.answers.pop(0), start=1):
                if isinstance(piece, BaseException):
                    raise piece
                timings = SimpleNamespace(time_to_first_token=0.5, time_per_output_token=1.0)
                yield SimpleNamespace(
                    text=piece,
                    num_prompt_tokens=30,
                    num_cached_tokens=16,
                    num_generated_tokens=number,
                    timings=timings,
                    finish_reason="length" if piece == CUT else None,
                )
        finally:
            self.closed_streams += 1

    def load(self) -> ScriptedLLM:
        return self

    def __enter__(self) -> ScriptedLLM:
        return self

    def __exit__(self, *_: object) -> None:
        return


def talk(
    monkeypatch: pytest.MonkeyPatch,
    llm: ScriptedLLM,
    *lines: str | BaseException,
    system: str = "",
    stats: bool = False,
) -> None:
    """Type the lines, then Ctrl-D."""
    typed = iter(lines)

    def read(prompt: str = "") -> str:
        line = next(typed, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(chat, "LLM", lambda *_, **__: llm)
    chat.converse("scripted", system, {"max_tokens": 9}, {}, show_stats=stats)


def test_a_conversation_keeps_its_turns(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    llm = ScriptedLLM(["Hel", "lo!"], ["Blue."])
    talk(monkeypatch, llm, "Hi", "", "What colour?", system="Be brief.")
    assert capsys.readouterr().out == "Hello!\nBlue.\n"
    assert llm.asked[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "What colour?"},
    ]


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    llm = ScriptedLLM(["One ", "two ", STOP], ["Three."])
    talk(monkeypatch, llm, "Count", "Go on")
    assert "One two  [stopped]\nThree.\n" in capsys.readouterr().out
    assert llm.asked[1][1] == {"role": "assistant", "content": "One two "}
    assert llm.closed_streams == 2


def test_ctrl_c_at_the_prompt_does_not_leave(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    talk(monkeypatch, ScriptedLLM(["Still here."]), STOP, "Hello?")
    assert "Still here." in capsys.readouterr().out


def test_reset_forgets_all_but_the_system_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM(["A"], ["B"])
    talk(monkeypatch, llm, "first", "/reset", "second", system="S")
    assert [message["content"] for message in llm.asked[1]] == ["S", "second"]


def test_exit_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM()
    talk(monkeypatch, llm, "/exit", "never asked")
    assert llm.asked == []


def test_unknown_command_is_not_sent_to_the_model(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    llm = ScriptedLLM()
    talk(monkeypatch, llm, "/rest now")
    assert llm.asked == []
    assert "There is no command /rest." in capsys.readouterr().err


def test_a_conversation_that_grew_too_long_can_be_reset(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    llm = ScriptedLLM(["A"], [PromptTooLongError("too\nlong")], ["B"])
    talk(monkeypatch, llm, "one", "two", "three")
    assert "too long (/reset forgets" in capsys.readouterr().err
    assert [message["content"] for message in llm.asked[2]] == ["one", "A", "three"]


def test_a_cut_answer_says_which_option_cut_it(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    talk(monkeypatch, ScriptedLLM(["Once ", CUT]), "A story")
    assert "--max-tokens" in capsys.readouterr().err


def test_stats_name_cached_tokens_and_speed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    talk(monkeypatch, ScriptedLLM(["a", "b", "c"]), "go", stats=True)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "30 prompt tokens, 16 from the prefix cache; first token after 0.50 s; 3 tokens, 1 per second"
