"""What ``DocumentQA`` refuses before it reads anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedlc import ConfigError, InvalidRequestError, SamplingParams
from pagedlc.documents import Document, DocumentError, DocumentQA, load_documents
from scripted_model import ScriptedLLM

DOCUMENTS = [Document("ferry.txt", "The ferry leaves at nine.")]


@pytest.mark.parametrize("documents", ["ferry.txt", ["ferry.txt"], None, DOCUMENTS[0]])
def test_documents_are_loaded_first(scripted_llm: Callable[..., ScriptedLLM], documents: Any) -> None:
    with pytest.raises(DocumentError, match="load_documents"):
        DocumentQA(documents, scripted_llm("Nine."))


def test_without_documents_there_is_nothing_to_ask(scripted_llm: Callable[..., ScriptedLLM]) -> None:
    with pytest.raises(DocumentError, match="no documents"):
        DocumentQA([], scripted_llm("Nine."))


@pytest.mark.parametrize("path", [None, 5, ["ferry.txt"]])
def test_documents_have_a_path(path: Any) -> None:
    with pytest.raises(DocumentError, match="named by a path"):
        load_documents(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 0}, "top_k must be a whole number from 1"),
        ({"top_k": 1.5}, "top_k must be"),
        ({"top_k": True}, "top_k must be"),
        ({"passage_tokens": 0}, "passage_tokens must be"),
        ({"whole_document_tokens": -1}, "whole_document_tokens must be a whole number from 0"),
        ({"sampling_params": {"max_tokens": 5}}, "must be SamplingParams"),
        ({"sampling_params": SamplingParams(n=2)}, "n=1"),
    ],
)
def test_options_that_cannot_work(
    scripted_llm: Callable[..., ScriptedLLM], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        DocumentQA(DOCUMENTS, scripted_llm("Nine."), **options)


def test_the_model_is_no_name_of_one() -> None:
    with pytest.raises(ConfigError, match=r"such as LLM\('smollm2'\), not 'smollm2'"):
        DocumentQA(DOCUMENTS, "smollm2")  # type: ignore[arg-type]


def test_a_number_of_numpy_is_one(scripted_llm: Callable[..., ScriptedLLM]) -> None:
    qa = DocumentQA(DOCUMENTS, scripted_llm("Nine."), top_k=np.int64(1), whole_document_tokens=100)
    assert qa.ask("When does the ferry leave?").read() == "Nine."


@pytest.mark.parametrize("question", [None, 5, "", "  "])
def test_a_question_is_a_text_with_something_in_it(scripted_llm: Callable[..., ScriptedLLM], question: Any) -> None:
    qa = DocumentQA(DOCUMENTS, scripted_llm("Nine."), whole_document_tokens=100)
    with pytest.raises(InvalidRequestError, match="question"):
        qa.ask(question)
    assert qa.ask("When does the ferry leave?").read() == "Nine."
