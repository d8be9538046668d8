"""Reading files: what a person gets from theirs, and what they are told when it cannot work."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pypdf
import pytest
from product_helpers import make_pdf

from pagedlc.documents import Document, DocumentError, load_documents


def test_a_folder_gives_its_documents_by_name_and_skips_the_rest(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# Bees")
    (tmp_path / "a.txt").write_text("\ufeffApples", encoding="utf-8")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.PDF").write_bytes(make_pdf("Cherries", "", "Cider"))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "d.txt").write_text("secret")
    (tmp_path / "empty.txt").write_text(" \n")

    assert load_documents(tmp_path) == [
        Document("a.txt", "Apples"),
        Document("b.md", "# Bees"),
        Document("deep/c.PDF", "Cherries\n", page=1),
        Document("deep/c.PDF", "Cider\n", page=3),
    ]


def test_a_single_file_is_called_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "note.txt"
    file.write_text("Größe: 5 µm")
    assert load_documents(str(file)) == [Document("note.txt", "Größe: 5 µm")]


def test_a_name_in_another_encoding_can_be_printed(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"gr\xfc\xdfe.txt")
    try:
        file.write_text("Hello")
    except OSError:
        pytest.skip("this file system takes no such name")
    expected = [Document("gr\ufffd\ufffde.txt", "Hello")]
    assert load_documents(file) == load_documents(tmp_path) == expected


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"No such file or folder: .*nowhere"):
        load_documents(tmp_path / "nowhere")


def test_an_empty_path_is_not_the_current_folder() -> None:
    with pytest.raises(DocumentError, match="path is empty"):
        load_documents("")


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "x" * 300])
def test_a_path_that_cannot_be_looked_up(path: str) -> None:
    with pytest.raises(DocumentError, match=r"Cannot read .*[a-z]\.$"):
        load_documents(path)


def test_what_is_neither_file_nor_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DocumentError, match=r"pipe\.txt is neither a file nor a folder"):
        load_documents(tmp_path / "pipe.txt")


def test_empty_folder_names_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / ".hidden.md").write_text("x")
    with pytest.raises(DocumentError, match=r"No documents in .*looked for .*\.md.*\.pdf"):
        load_documents(tmp_path)


def test_unsupported_type_names_the_supported_ones(tmp_path: Path) -> None:
    (tmp_path / "sheet.xlsx").write_bytes(b"PK")
    with pytest.raises(DocumentError, match=r"sheet\.xlsx: files of type \.xlsx are not supported.*\.txt.*\.pdf"):
        load_documents(tmp_path / "sheet.xlsx")


def test_files_without_text(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DocumentError, match="There is no text in"):
        load_documents(tmp_path)


def test_text_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(DocumentError, match=r"old\.txt: not UTF-8"):
        load_documents(tmp_path)


@pytest.mark.parametrize("data", [b"%PDF-1.4\nbroken", b"", make_pdf("Text")[:120]])
def test_damaged_pdf(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "bad.pdf").write_bytes(data)
    with pytest.raises(DocumentError, match=r"bad\.pdf: not a readable PDF"):
        load_documents(tmp_path)


def test_halves_of_characters_in_a_pdf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.pdf").write_bytes(make_pdf("x"))
    monkeypatch.setattr(pypdf.PageObject, "extract_text", lambda _: "A \ud83d\ude00 and \ud83d.")
    assert load_documents(tmp_path) == [Document("a.pdf", "A \U0001f600 and \ufffd.", page=1)]


def test_scanned_pdf(tmp_path: Path) -> None:
    (tmp_path / "scan.pdf").write_bytes(make_pdf("", ""))
    with pytest.raises(DocumentError, match=r"scan\.pdf: its pages hold no text.*OCR"):
        load_documents(tmp_path)


def test_pdf_with_a_password(tmp_path: Path) -> None:
    (tmp_path / "plain.pdf").write_bytes(make_pdf("Text"))
    writer = pypdf.PdfWriter(clone_from=tmp_path / "plain.pdf")
    writer.encrypt("secret", algorithm="RC4-128")
    writer.write(tmp_path / "locked.pdf")
    with pytest.raises(DocumentError, match=r"locked\.pdf: the PDF is protected by a password"):
        load_documents(tmp_path / "locked.pdf")


def test_pdf_without_pypdf_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.pdf").write_bytes(make_pdf("Text"))
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(DocumentError, match="pip install pypdf"):
        load_documents(tmp_path)


def test_a_damaged_file_does_not_keep_the_others_of_its_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "good.txt").write_text("The well is in the yard.")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xfa broken")
    assert [document.source for document in load_documents(tmp_path)] == ["good.txt"]
    assert "Left out: Cannot read bad.txt" in caplog.text


def test_files_of_other_types_are_named_and_not_the_hidden_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(7):
        (tmp_path / f"table{number}.xlsx").write_bytes(b"PK")
    for name in ("good.txt", "LICENSE", "empty.md", ".DS_Store"):
        (tmp_path / name).write_text("The well is in the yard." if name == "good.txt" else "")
    load_documents(tmp_path)
    empty, others = [record.getMessage() for record in caplog.records]
    assert empty == "Left out: There is no text in empty.md."
    listed = "LICENSE, table0.xlsx, table1.xlsx, table2.xlsx, table3.xlsx, and 3 more"
    assert others == f"Left out: {listed}: only .md, .markdown, .rst, .txt, .text, .pdf files are read."


def test_where_nothing_is_left_the_reasons_are_said(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xfa broken")
    (tmp_path / "report.docx").write_bytes(b"PK")
    with pytest.raises(DocumentError, match=r"can be read. Cannot read bad\.txt: not UTF-8.*report\.docx: only \.md"):
        load_documents(tmp_path)
