"""Passages: nothing lost, headings known, sizes kept."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedlc.documents import Document, Passage, split_documents
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


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def read(name: str, text: str) -> list[Passage]:
    return split_documents([Document(name, text)])


CONTACTS = """# Contacts

## Phone of the caretaker

+44 20 7946 0018

## Wifi password

sunflower-1987

## Office

Room 12, second floor
"""
STEPS = "1. Open the lid\n\n2. Hold the red button for 9 seconds\n\n3. Wait for the green lamp\n"
LAMP = (
    "# Lamp\n\n## Usage\n\n```bash\n# start the lamp\nlampctl start --level 7\n\n# stop the lamp\nlampctl stop\n```\n"
)
LISTED = "Shopping list\n\nMilk 2 litres\n\nBread from the baker\n\nCall Martha on 5 May\n"
POEM = "Come at nine\nBring your badge and the blue folder\nAsk for Ada"


@pytest.mark.parametrize("name", ["a.md", "a.txt"])
@pytest.mark.parametrize("text", [CONTACTS, STEPS, LAMP, LISTED, POEM])
def test_no_word_is_lost(name: str, text: str) -> None:
    found = " ".join(passage.full_text for passage in read(name, text))
    assert words(text) <= words(found)


@given(
    st.lists(
        st.lists(
            st.sampled_from(["# One", "## Two", "Three", "four five", "Six.", "```", "===", "- seven"]), max_size=4
        ),
        max_size=6,
    )
)
def test_no_word_is_lost_however_lines_and_headings_are_mixed(blocks: list[list[str]]) -> None:
    text = "\n\n".join("\n".join(block) for block in blocks)
    for name in ("a.md", "a.txt"):
        assert words(text) <= words(" ".join(passage.full_text for passage in read(name, text)))


def test_short_paragraphs_of_markdown_are_no_headings() -> None:
    by_heading = {passage.heading: passage.text for passage in read("a.md", CONTACTS)}
    assert by_heading["Wifi password"] == "sunflower-1987"
    assert by_heading["Phone of the caretaker"] == "+44 20 7946 0018"


def test_comments_in_fenced_code_are_no_headings() -> None:
    assert [passage.heading for passage in read("a.md", LAMP)] == ["Usage"]


def test_underlined_headings() -> None:
    found = read("a.md", "Lamp\n====\n\nUsage\n-----\n\nTurn it on.")
    assert [(passage.title, passage.heading, passage.text) for passage in found] == [("Lamp", "Usage", "Turn it on.")]
