"""Thoughts and answer are told apart, wherever the stream was cut."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tool_samples import QWEN_LIKE, QWEN_THINKING, splits

from pagedlc.reasoning import ReasoningDelta, ReasoningSplitter, ReasoningTags, find_reasoning_tags

TAGS = ReasoningTags("<think>", "</think>")


def split(pieces: Iterable[str], opened: bool = False, tags: ReasoningTags | None = TAGS) -> tuple[str, str]:
    splitter = ReasoningSplitter(tags, opened)
    deltas = [delta for piece in pieces for delta in splitter.feed(piece)] + list(splitter.finish())
    assert all(delta.text for delta in deltas)
    thoughts = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    return thoughts, "".join(delta.text for delta in deltas if not isinstance(delta, ReasoningDelta))


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nHm, 2.\n\nYes.\n</think>\n\nTwo.\n", False, ("Hm, 2.\n\nYes.", "Two.\n")),
        ("\n<think>Hm</think>Two.", False, ("Hm", "Two.")),
        ("\nHm, 2.\n</think>\n\nTwo.", True, ("Hm, 2.", "Two.")),
        ("Hm </thin </think", True, ("Hm </thin </think", "")),
        ("Just text.\n", False, ("", "Just text.\n")),
        ("  indented", False, ("", "  indented")),
        ("<thinking is hard", False, ("", "<thinking is hard")),
        ("<thin", False, ("", "<thin")),
        ("", False, ("", "")),
        ("<think>never ends, a < b\n", False, ("never ends, a < b", "")),
        ("<think>\n\n</think>\n\nTwo.", False, ("", "Two.")),
        ("<think>Hm</think>", False, ("Hm", "")),
        ("<think>Hm</think>\n\n", False, ("Hm", "")),
        ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        ("Say <think>x</think>", False, ("", "Say <think>x</think>")),
    ],
)
def test_thoughts_are_split_off_at_every_cut(text: str, opened: bool, expected: tuple[str, str]) -> None:
    for pieces in splits(text):
        assert split(pieces, opened) == expected, pieces


def test_without_tags_everything_is_answer() -> None:
    assert split(["<think>a</think>", "b "], tags=None) == ("", "<think>a</think>b ")


def test_thoughts_and_answer_stream() -> None:
    splitter = ReasoningSplitter(TAGS)
    streamed = [len(splitter.feed(piece)) for piece in ["<think>", "One", " two", "</think>", "\n", "Three", " four"]]
    assert streamed == [0, 1, 1, 0, 0, 1, 1]


def test_the_template_tells_whether_a_model_thinks() -> None:
    assert find_reasoning_tags(QWEN_THINKING) == TAGS
    assert find_reasoning_tags(QWEN_LIKE) is None
    assert find_reasoning_tags("{{ content.split('[/THINK]') }}") == ReasoningTags("[THINK]", "[/THINK]")
