"""Ask a model about documents: find the passages, put them into a prompt, stream the answer."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedlc.documents.embedding import Embedder, MiniLM
from pagedlc.documents.index import PassageIndex
from pagedlc.documents.loading import Document, DocumentError, load_documents
from pagedlc.documents.splitting import Passage, split_documents
from pagedlc_engine.errors import ConfigError, InvalidRequestError
from pagedlc_engine.request import SamplingParams

if TYPE_CHECKING:
    from pagedlc import LLM, CompletionChunk
    from pagedlc_engine.model import ModelSpec

__all__ = ["Answer", "DocumentQA", "check_question"]

INSTRUCTIONS = "Answer the question from the documents, in one short sentence."
DEFAULT_SAMPLING = SamplingParams(max_tokens=256, temperature=0.0)
#: Up to about this many weights a model mixes up what it reads when that is more than one passage.
SMALL_MODEL = 300_000_000
#: Room for the question and the chat template around it, when documents are to be read whole.
QUESTION_TOKENS = 256


class Answer:
    """An answer on its way: iterate to get its text piece by piece, once.

    Attributes:
        sources: The passages that the model reads, the most important first.
        text: What has arrived so far.
        num_prompt_tokens: Size of the prompt; 0 before the first piece.
        num_cached_tokens: How much of the prompt came from the prefix cache.
        time_to_first_token: Seconds from asking to the first token, once it is there.
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"`` once the answer is complete.
    """

    def __init__(self, sources: list[Passage], chunks: Generator[CompletionChunk, None, None]) -> None:
        self.sources = sources
        self.text = ""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.time_to_first_token: float | None = None
        self.finish_reason: str | None = None
        self._chunks = chunks

    def __iter__(self) -> Iterator[str]:
        for chunk in self._chunks:
            self._note(chunk)
            if chunk.text:
                self.text += chunk.text
                yield chunk.text

    def _note(self, chunk: CompletionChunk) -> None:
        self.num_prompt_tokens = chunk.num_prompt_tokens
        self.num_cached_tokens = chunk.num_cached_tokens
        self.finish_reason = chunk.finish_reason
        self.time_to_first_token = chunk.timings.time_to_first_token

    def read(self) -> str:
        """Wait for the rest and return the whole text."""
        for _ in self:
            pass
        return self.text

    def close(self) -> None:
        """Give the answer up; the engine stops computing it."""
        self._chunks.close()


class DocumentQA:
    """Documents and a model that answers questions about them.

    What stays the same from question to question (instructions, documents) stands at the beginning of the prompt
    and the question at its end, so that the engine's prefix cache serves all of it but the question: always when the
    documents are small enough to be read whole, and when a question leads to the same passages as an earlier one.

    Args:
        documents: What to read, from :func:`load_documents`.
        llm: The model.
        embedder: Finds the passages; :class:`MiniLM` when ``None``.
        top_k: Passages per question. ``None``: one for a small model (below 300 million weights or so, such as the
            default one), which mixes up several; otherwise four.
        passage_tokens: Size of a passage in tokens, about.
        whole_document_tokens: Documents of up to this many tokens in all are read whole; 0 always picks passages.
            ``None``: 0 for a small model, otherwise 4,096.
        sampling_params: How to generate; greedy, at most 256 tokens, when ``None``.
        instructions: What the model is told before the documents.

    Raises:
        DocumentError: There are no documents, or something else among them.
        ConfigError: ``llm`` is no :class:`LLM`, a number cannot work, or ``sampling_params`` asks for several answers.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        llm: LLM,
        *,
        embedder: Embedder | None = None,
        top_k: int | None = None,
        passage_tokens: int = 160,
        whole_document_tokens: int | None = None,
        sampling_params: SamplingParams | None = None,
        instructions: str = INSTRUCTIONS,
    ) -> None:
        _check_documents(documents)
        _check_number("top_k", top_k, 1)
        _check_number("passage_tokens", passage_tokens, 1)
        _check_number("whole_document_tokens", whole_document_tokens, 0)
        if not isinstance(sampling_params, SamplingParams | None) or (sampling_params and sampling_params.n > 1):
            raise ConfigError(f"sampling_params must be SamplingParams with n=1, not {sampling_params!r}.")
        if not hasattr(llm, "spec"):
            raise ConfigError(f"llm must be a pagedlc.LLM, such as LLM('smollm2'), not {llm!r}.")
        small = _num_weights(llm.spec) < SMALL_MODEL
        if top_k is None:
            top_k = 1 if small else 4
        if whole_document_tokens is None:
            whole_document_tokens = 0 if small else 4096
        self._llm = llm
        self._top_k = top_k
        self._params = sampling_params or DEFAULT_SAMPLING
        self._instructions = instructions
        self.passages = split_documents(documents, max_tokens=passage_tokens, overlap=passage_tokens // 8)
        self._whole = self._read_whole(documents, whole_document_tokens)
        self._index = None if self._whole else PassageIndex(self.passages, embedder or MiniLM())

    @classmethod
    def from_path(cls, path: str | Path, llm: LLM, **options: Any) -> DocumentQA:
        """Read a file or folder with :func:`load_documents`; ``options`` as for the class.

        Raises:
            DocumentError: There is nothing to read, or it cannot be read.
        """
        return cls(load_documents(path), llm, **options)

    def ask(self, question: str) -> Answer:
        """Start answering; the answer streams while it is iterated.

        Raises:
            InvalidRequestError: The question is empty, or too long for the model with the passages.
        """
        check_question(question)
        sources = self.retrieve(question)
        return Answer(sources, self._llm.chat_stream(self.messages(question, sources), self._params))

    def retrieve(self, question: str) -> list[Passage]:
        """The passages that the model is to read for ``question``: the nearest ones, or all."""
        if self._index is None:
            return self.passages
        return [hit.passage for hit in self._index.search(question, self._top_k)]

    def messages(self, question: str, passages: Sequence[Passage]) -> list[dict[str, Any]]:
        """The chat that asks ``question`` about ``passages``."""
        text = self._whole or "\n\n".join(passage.full_text for passage in passages)
        return [
            {"role": "system", "content": f"{self._instructions}\n\n{text}"},
            {"role": "user", "content": question.strip()},
        ]

    def _read_whole(self, documents: Sequence[Document], most: int) -> str:
        """The documents' text, or nothing when it has more than ``most`` tokens or leaves no room for an answer."""
        text = "\n\n".join(document.text.strip() for document in documents)
        room = self._llm.max_model_len - QUESTION_TOKENS - (self._params.max_tokens or 0)
        # A text of eight characters a token would be rare; this spares tokenizing a whole library.
        if not most or len(text) > 8 * most:
            return ""
        return text if len(self._llm.tokenizer.encode(text)) <= min(most, room) else ""


def _check_documents(documents: Any) -> None:
    if not isinstance(documents, Sequence) or not all(isinstance(item, Document) for item in documents):
        raise DocumentError(
            f"documents must be a list from load_documents(path), not {documents!r:.80}; "
            "DocumentQA.from_path(path, llm) does both."
        )
    if not documents:
        raise DocumentError("There are no documents to ask about.")


def _check_number(name: str, value: Any, least: int) -> None:
    if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or value < least):
        raise ConfigError(f"{name} must be a whole number from {least}, not {value!r}.")


def check_question(question: str) -> None:
    """Raise :class:`InvalidRequestError` if there is nothing in a question, or something that is no text."""
    if not isinstance(question, str):
        raise InvalidRequestError(f"A question is a text, not {question!r}.")
    if not question.strip():
        raise InvalidRequestError("The question is empty.")
    try:
        question.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError("The question is not valid Unicode: it holds half of a surrogate pair.") from None


def _num_weights(spec: ModelSpec) -> int:
    """About how many weights the layers have."""
    attention = 2 * spec.hidden_size * spec.head_dim * (spec.num_heads + spec.num_kv_heads)
    return spec.num_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size)
