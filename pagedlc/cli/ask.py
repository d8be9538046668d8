"""``pagedlc ask``: answers from documents, with their sources."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pagedlc import LLM, SamplingParams
from pagedlc.cli.output import note, prompt_statistics
from pagedlc.documents import Answer, DocumentQA, load_documents
from pagedlc.documents.qa import check_question

__all__ = ["answer_questions"]


def answer_questions(
    path: str,
    questions: Sequence[str],
    model: str,
    sampling: Mapping[str, Any],
    retrieval: Mapping[str, Any],
    engine_options: Mapping[str, Any],
) -> None:
    """Stream the answers to stdout, each followed by its sources; figures go to stderr.

    Args:
        path: File or folder.
        questions: What to ask, one after the other.
        model: Model name or path.
        sampling: Keywords of :class:`SamplingParams`.
        retrieval: Keywords of :class:`DocumentQA`.
        engine_options: Keywords of :class:`LLM`.
    """
    params = SamplingParams(**sampling)
    for question in questions:
        check_question(question)
    if sys.stderr.isatty():
        note(f"Reading {path} and loading {model} ...")
    documents = load_documents(path)
    with LLM(model, **engine_options) as llm:
        llm.load()
        qa = DocumentQA(documents, llm, sampling_params=params, **retrieval)
        for number, question in enumerate(questions):
            if len(questions) > 1:
                print(("\n" if number else "") + f"> {question}", flush=True)
            _print_answer(qa.ask(question))


def _print_answer(answer: Answer) -> None:
    for text in answer:
        sys.stdout.write(text)
        sys.stdout.flush()
    cut = " [cut at --max-tokens]" if answer.finish_reason == "length" else ""
    print(f"{cut}\n")
    print("Sources: " + "; ".join(dict.fromkeys(passage.label for passage in answer.sources)), flush=True)
    note(prompt_statistics(answer.num_prompt_tokens, answer.num_cached_tokens, answer.time_to_first_token))
