"""Read text, Markdown and PDF files."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagedlc_engine.errors import PagedLCError

__all__ = ["SUPPORTED_SUFFIXES", "Document", "DocumentError", "load_documents"]

logger = logging.getLogger(__name__)

TEXT_SUFFIXES = (".md", ".markdown", ".rst", ".txt", ".text")
SUPPORTED_SUFFIXES = (*TEXT_SUFFIXES, ".pdf")
#: Names or reasons that one message lists.
_MOST_LISTED = 5


class DocumentError(PagedLCError, ValueError):
    """A document cannot be read, or there is none."""


@dataclass(frozen=True, slots=True)
class Document:
    """Text of one file, or of one page of a PDF.

    Args:
        source: File name, relative to the folder that was loaded.
        text: The text, with ``\\n`` line ends.
        page: Page number in a PDF, counted from 1.
    """

    source: str
    text: str
    page: int | None = None


def load_documents(path: str | Path) -> list[Document]:
    """Read a file, or every supported file in a folder and below, in order of name.

    In a folder, files of other types and files that cannot be read are left out, with a warning in the log; hidden
    ones without.

    Args:
        path: A ``.txt``, ``.md``, ``.rst`` or ``.pdf`` file, or a folder. PDFs need ``pypdf``.

    Raises:
        DocumentError: The path does not exist, holds no readable text, or is of another type.
    """
    if not isinstance(path, str | os.PathLike):
        raise DocumentError(f"Documents are named by a path, not by {path!r}.")
    if path == "":
        raise DocumentError("The path is empty. Name a file or a folder; '.' is the current one.")
    try:
        path = Path(path).expanduser()
        is_file, is_folder, exists = path.is_file(), path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # no such user, a name too long, a folder that may not be looked into
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise DocumentError(f"Cannot read {path}: {reason}.") from None
    if not exists:
        raise DocumentError(f"No such file or folder: {path}")
    if not os.access(path, os.R_OK):
        raise DocumentError(f"{path} may not be read.")
    if is_file:
        return _read_file(path, _printable(path.name))
    if not is_folder:
        # A pipe that nobody writes to, or a device without an end.
        raise DocumentError(f"{path} is neither a file nor a folder.")
    documents: list[Document] = []
    problems: list[str] = []
    others: list[str] = []
    for file, name in _visible_files(path):
        if file.suffix.lower() not in SUPPORTED_SUFFIXES:
            others.append(name)
            continue
        try:
            documents.extend(_read(file, name))
        except DocumentError as error:
            problems.append(str(error))
    if others:
        problems.append(f"{_listed(others, ', ')}: only {', '.join(SUPPORTED_SUFFIXES)} files are read.")
    if not problems and not documents:
        raise DocumentError(f"No documents in {path}: looked for {', '.join(SUPPORTED_SUFFIXES)} files.")
    if not documents:
        raise DocumentError(f"No documents in {path} that can be read. {_listed(problems, ' ')}")
    for problem in problems:
        logger.warning("Left out: %s", problem)
    return documents


def _read_file(file: Path, name: str) -> list[Document]:
    if file.suffix.lower() not in SUPPORTED_SUFFIXES:
        raise DocumentError(
            f"Cannot read {name}: files of type {file.suffix or '(none)'} are not supported. "
            f"Supported: {', '.join(SUPPORTED_SUFFIXES)}."
        )
    return _read(file, name)


def _read(file: Path, name: str) -> list[Document]:
    return _read_pdf(file, name) if file.suffix.lower() == ".pdf" else _read_text(file, name)


def _visible_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Files in a folder and below with their names relative to it, in order; hidden ones left out."""
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        if file.is_file() and not any(part.startswith(".") for part in name.parts):
            yield file, _printable(name.as_posix())


def _printable(name: str) -> str:
    """A file's name, without bytes of another encoding: these could neither be printed nor stored."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _listed(items: Sequence[str], separator: str) -> str:
    more = len(items) - _MOST_LISTED
    return separator.join(items[:_MOST_LISTED]) + (f"{separator}and {more} more" if more > 0 else "")


def _read_text(file: Path, name: str) -> list[Document]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"Cannot read {name}: not UTF-8 text (byte {error.start}). Convert it to UTF-8.") from None
    except OSError as error:
        raise DocumentError(f"Cannot read {name}: {error.strerror}.") from None
    if not text.strip():
        raise DocumentError(f"There is no text in {name}.")
    return [Document(name, text)]


def _read_pdf(file: Path, name: str) -> list[Document]:
    try:
        import pypdf
    except ImportError:
        raise DocumentError(f"Reading {name} needs pypdf: pip install pypdf (or the extra pagedlc[pdf])") from None
    try:
        reader = pypdf.PdfReader(file)
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError(f"Cannot read {name}: the PDF is protected by a password.")
        texts = [_whole_characters(page.extract_text()) for page in reader.pages]
    except DocumentError:
        raise
    # pypdf raises many kinds of errors on damaged files: its own, KeyError, ValueError, struct.error …
    except Exception as error:
        raise DocumentError(f"Cannot read {name}: not a readable PDF ({error}).") from error
    pages = [Document(name, text, number) for number, text in enumerate(texts, start=1) if text.strip()]
    if not pages:
        raise DocumentError(f"Cannot read {name}: its pages hold no text. Scanned pages need OCR first.")
    return pages


def _whole_characters(text: str) -> str:
    """Halves of surrogate pairs, which a PDF's fonts may name, put together; one alone, which no tokenizer takes, is
    replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
