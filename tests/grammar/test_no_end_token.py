"""A model whose vocabulary has no token that ends an answer."""

from __future__ import annotations

import numpy as np
import pytest

from pagedlc_engine.grammar import TokenVocabulary
from pagedlc_engine.grammar.base import mask_words
from pagedlc_engine.grammar.library import GrammarLibrary
from pagedlc_engine.grammar.spec import StructuredOutputsParams


@pytest.mark.parametrize("size", [63, 64, 65])
def test_masks_fit_the_logits_whatever_their_width(size: int) -> None:
    words = tuple(f"{number};".encode() for number in range(size))
    vocabulary = TokenVocabulary(words, frozenset(), (), lambda text: [int(word) for word in text.split(";") if word])
    matcher = GrammarLibrary(vocabulary).compile(StructuredOutputsParams(regex="7;(5;|9;)+"))
    row = np.full(mask_words(size), -1, np.int32)
    for allowed, token in [({7}, 7), ({5, 9}, 9), ({5, 9}, 5)]:
        matcher = matcher.copy()
        assert matcher.fill(row) is None
        assert set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:size])) == allowed
        assert matcher.accept(token) is None
