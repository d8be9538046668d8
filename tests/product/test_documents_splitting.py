"""Passages: nothing lost, headings known, sizes kept."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedlc.documents import Document, split_documents
from pagedlc.documents.splitting import estimate_tokens

MARKDOWN = """# Manual

Intro.

## Care

Wipe it dry.

Keep it cool.

### Storage
In a box.
"""


def test_markdown_is_cut_at_headings() -> None:
    passages = split_documents([Document("m.md", MARKDOWN)])
    assert [(p.title, p.heading, p.text) for p in passages] == [
        ("Manual", "Manual", "Intro."),
        ("Manual", "Care", "Wipe it dry.\n\nKeep it cool."),
        ("Manual", "Storage", "In a box."),
    ]
    assert [p.full_text for p in passages][:2] == ["Manual\nIntro.", "Manual - Care\nWipe it dry.\n\nKeep it cool."]
    assert passages[1].label == "m.md, Care"


def test_plain_text_headings_are_short_lines_alone() -> None:
    text = "User guide\n\nBattery\n\nIt lasts a day.\n\nThis line is alone.\n\nReset\r\n\r\nHold the button."
    passages = split_documents([Document("g.txt", text)])
    assert [(p.heading, p.text) for p in passages] == [
        ("Battery", "It lasts a day.\n\nThis line is alone."),
        ("Reset", "Hold the button."),
    ]
    assert {p.title for p in passages} == {"User guide"}


def test_headings_are_found_in_pdf_text_that_has_no_blank_lines() -> None:
    pages = ["House rules\nNoise\nBe quiet after ten, also on the\nbalcony.\nPets\nCats are welcome.", "Dogs are not."]
    passages = split_documents([Document("r.pdf", text, page) for page, text in enumerate(pages, start=1)])
    assert [(p.page, p.title, p.heading, p.text) for p in passages] == [
        (1, "House rules", "Noise", "Be quiet after ten, also on the\nbalcony."),
        (1, "House rules", "Pets", "Cats are welcome."),
        (2, "House rules", "", "Dogs are not."),
    ]


def test_a_document_that_is_only_a_heading_is_kept() -> None:
    assert [p.text for p in split_documents([Document("a.md", "# Closed on Monday")])] == ["Closed on Monday"]


def test_pdf_passages_are_labelled_by_page() -> None:
    [passage] = split_documents([Document("a.pdf", "Some text on a page.", page=7)])
    assert passage.label == "a.pdf, page 7"


def test_long_sections_overlap_by_whole_sentences() -> None:
    text = " ".join(f"Sentence number {number} is here." for number in range(20))
    passages = [p.text for p in split_documents([Document("a.txt", text)], max_tokens=40, overlap=10)]
    assert len(passages) > 3
    for before, after in itertools.pairwise(passages):
        last = before.split(". ")[-1]
        assert after.startswith(last)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet="ab .!?\n#", min_size=1, max_size=600),
    max_tokens=st.integers(4, 40),
    data=st.data(),
)
def test_no_word_is_lost_and_no_passage_too_long(text: str, max_tokens: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, max_tokens // 2))
    passages = split_documents([Document("a.txt", text)], max_tokens=max_tokens, overlap=overlap)
    for passage in passages:
        assert estimate_tokens(passage.text) <= max_tokens + 1
        assert passage.text.strip()
    letters = sum(text.count(letter) for letter in "ab")
    kept = "".join([*(p.text for p in passages), *{p.heading for p in passages}, *{p.title for p in passages}])
    if not _has_headings(text):
        assert letters <= sum(kept.count(letter) for letter in "ab")


def _has_headings(text: str) -> bool:
    passages = split_documents([Document("a.txt", text)])
    return any(p.heading or p.title for p in passages)


def test_sizes_that_cannot_work() -> None:
    with pytest.raises(ValueError, match="overlap"):
        split_documents([Document("a.txt", "x")], max_tokens=10, overlap=6)
