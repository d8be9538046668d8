"""Cut documents into passages along their headings, paragraphs and sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pagedlc.documents.loading import Document

__all__ = ["Passage", "estimate_tokens", "split_documents"]

_BLANK_LINES = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")
_MARKDOWN_HEADING = re.compile(r"#{1,6}[ \t]+(.+?)[ \t]*#*")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[^\s])")
_UNDERLINE = re.compile(r"=+|-{2,}")
_FENCES = ("```", "~~~")
_LONGEST_HEADING = 60


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document that is found and shown as a whole.

    Args:
        text: The passage without its heading.
        source: File name.
        page: Page of a PDF, counted from 1.
        heading: The heading it stands under, if any.
        title: The document's title, if it begins with one.
    """

    text: str
    source: str
    page: int | None = None
    heading: str = ""
    title: str = ""

    @property
    def label(self) -> str:
        """Where the passage comes from, for people: ``manual.pdf, page 3``, ``policy.md, Hotels``."""
        place = f"page {self.page}" if self.page is not None else self.heading
        return f"{self.source}, {place}" if place else self.source

    @property
    def full_text(self) -> str:
        """Title, heading and text, as the embedding and the prompt see them."""
        heads = [self.title] if self.title else []
        if self.heading and self.heading != self.title:
            heads.append(self.heading)
        return "\n".join([" - ".join(heads), self.text]) if heads else self.text


def estimate_tokens(text: str) -> int:
    """About how many tokens ``text`` has in a Latin script: four characters each."""
    return (len(text) + 3) // 4


def split_documents(documents: Iterable[Document], *, max_tokens: int = 160, overlap: int = 24) -> list[Passage]:
    """Cut documents into passages of at most about ``max_tokens`` tokens.

    A heading starts a new passage. Longer sections are cut between sentences, and what follows begins with
    the last sentences before the cut, up to ``overlap`` tokens.

    Args:
        documents: What to cut.
        max_tokens: Size of a passage in tokens, estimated by :func:`estimate_tokens`.
        overlap: Tokens repeated across a cut; less than half of ``max_tokens``.

    Raises:
        ValueError: ``max_tokens`` or ``overlap`` cannot work.
    """
    if max_tokens < 1 or not 0 <= overlap <= max_tokens // 2:
        raise ValueError(f"overlap ({overlap}) must be between 0 and half of max_tokens ({max_tokens})")
    titles: dict[str, str] = {}
    passages: list[Passage] = []
    for document in documents:
        blocks = list(_markdown_blocks(document.text) if _is_markdown(document) else _text_blocks(document.text))
        # All pages of a PDF have the title that stands on its first.
        title = titles.setdefault(document.source, blocks[0].text if blocks and blocks[0].heading else "")
        for heading, paragraphs in _sections(blocks, title):
            texts = _pack(paragraphs, max_tokens, overlap)
            passages.extend(Passage(text, document.source, document.page, heading, title) for text in texts if text)
    return passages


@dataclass(frozen=True, slots=True)
class _Block:
    """A paragraph, or a heading."""

    text: str
    heading: bool = False


def _is_markdown(document: Document) -> bool:
    return document.source.lower().endswith((".md", ".markdown"))


def _sections(blocks: list[_Block], title: str) -> Iterator[tuple[str, list[str]]]:
    """Headings with the paragraphs below them; text before the first heading has the heading ``""``.

    A heading with nothing below it stands in front of the next section's text: it may be no heading after all, and no
    word is lost. The title needs no such place, since every passage shows it.
    """
    heading, paragraphs, carried = "", list[str](), list[str]()
    for block in blocks:
        if not block.heading:
            paragraphs.append(block.text)
            continue
        if paragraphs:
            yield heading, carried + paragraphs
            carried = []
        elif heading and heading != title:
            carried.append(heading)
        heading, paragraphs = block.text, []
    if paragraphs:
        yield heading, carried + paragraphs
    elif heading:
        yield "", [*carried, heading]


def _markdown_blocks(text: str) -> Iterator[_Block]:
    """Headings of both kinds (``# ...``, and underlined), paragraphs, and fenced code as it stands."""
    lines: list[str] = []
    fence = ""
    for line in text.splitlines():
        bare = line.strip()
        if fence or bare.startswith(_FENCES):
            lines.append(line.rstrip())
            closes = fence and bare.startswith(fence)
            fence = "" if closes else fence or bare[:3]
        elif match := _MARKDOWN_HEADING.fullmatch(bare):
            yield from _paragraph(lines)
            yield _Block(match[1], heading=True)
        elif len(lines) == 1 and _UNDERLINE.fullmatch(bare):
            yield _Block(lines.pop(), heading=True)
        elif bare:
            lines.append(bare)
        else:
            yield from _paragraph(lines)
    yield from _paragraph(lines)


def _paragraph(lines: list[str]) -> Iterator[_Block]:
    if lines:
        yield _Block("\n".join(lines))
        lines.clear()


def _text_blocks(text: str) -> Iterator[_Block]:
    """Paragraphs, and lines that look like headings."""
    for block in _BLANK_LINES.split(text.replace("\r\n", "\n").strip()):
        lines: list[str] = []
        all_lines = [line.strip() for line in block.split("\n")]
        for number, line in enumerate(all_lines):
            if _is_heading_among(all_lines, number):
                yield from _paragraph(lines)
                yield _Block(_heading(line) or line, heading=True)
            else:
                lines.append(line)
        if len(lines) == 1 and (title := _heading(lines[0])) is not None:
            yield _Block(title, heading=True)
        else:
            yield from _paragraph(lines)


def _is_heading_among(lines: list[str], number: int) -> bool:
    """Whether a line is a heading though no blank lines set it apart, as in text taken from a PDF."""
    line = lines[number]
    if _MARKDOWN_HEADING.fullmatch(line):
        return True
    after_a_sentence = number == 0 or lines[number - 1].endswith((".", "!", "?")) or bool(_heading(lines[number - 1]))
    before_a_sentence = number + 1 < len(lines) and lines[number + 1][:1].isupper()
    return after_a_sentence and before_a_sentence and line[:1].isupper() and _heading(line) is not None


def _heading(block: str) -> str | None:
    """The heading that a block is, if it is one: Markdown's, or a short line that ends no sentence."""
    if match := _MARKDOWN_HEADING.fullmatch(block):
        return match[1]
    looks_like_one = "\n" not in block and len(block) <= _LONGEST_HEADING and block[-1:].isalnum()
    return block if looks_like_one and not block.startswith(("-", "*")) else None


def _pack(paragraphs: list[str], max_tokens: int, overlap: int) -> Iterator[str]:
    """Join whole sentences into texts of at most ``max_tokens``; a longer sentence is cut between words."""
    current: list[str] = []
    size = 0
    for piece in _pieces(paragraphs, max_tokens):
        length = estimate_tokens(piece)
        if current and size + length > max_tokens:
            yield "".join(current).strip()
            current = _tail(current, min(overlap, max_tokens - length))
            size = sum(map(estimate_tokens, current))
        current.append(piece)
        size += length
    if current:
        yield "".join(current).strip()


def _pieces(paragraphs: list[str], max_tokens: int) -> Iterator[str]:
    """Sentences, each with the space or paragraph break that follows it."""
    for paragraph in paragraphs:
        sentences = _SENTENCE_END.split(paragraph.strip())
        for number, sentence in enumerate(sentences, start=1):
            end = "\n\n" if number == len(sentences) else " "
            if estimate_tokens(sentence) <= max_tokens:
                yield sentence + end
            else:
                yield from _cut_words(sentence, max_tokens, end)


def _cut_words(sentence: str, max_tokens: int, end: str) -> Iterator[str]:
    most = max_tokens * 4 - 1
    while len(sentence) > most:
        cut = sentence.rfind(" ", 1, most)
        cut = most if cut < 0 else cut + 1
        yield sentence[:cut]
        sentence = sentence[cut:]
    yield sentence + end


def _tail(pieces: list[str], most: int) -> list[str]:
    """The last pieces that together have at most ``most`` tokens."""
    tail: list[str] = []
    for piece in reversed(pieces):
        most -= estimate_tokens(piece)
        if most < 0:
            break
        tail.insert(0, piece)
    return tail
