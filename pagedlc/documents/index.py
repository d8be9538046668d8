"""Find the passages nearest to a question, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedlc.documents.embedding import Embedder
from pagedlc.documents.splitting import Passage

__all__ = ["Hit", "PassageIndex"]


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage and its cosine similarity to the question, -1 to 1."""

    passage: Passage
    score: float


class PassageIndex:
    """Passages with their vectors; every search compares with all of them.

    Args:
        passages: What can be found.
        embedder: Makes the vectors, of passages now and of questions later.
    """

    def __init__(self, passages: Sequence[Passage], embedder: Embedder) -> None:
        self.passages = list(passages)
        self._embedder = embedder
        self._vectors = embedder.embed([passage.full_text for passage in self.passages])

    def search(self, question: str, top_k: int = 4) -> list[Hit]:
        """The ``top_k`` nearest passages, the nearest first (fewer if there are fewer)."""
        scores = self._vectors @ self._embedder.embed([question])[0]
        nearest = np.argsort(-scores, kind="stable")[:top_k]
        return [Hit(self.passages[number], float(scores[number])) for number in nearest]
