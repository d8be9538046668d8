from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedlc import LLM
from tests.engine.tiny_models import tiny_llm


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Random weights, one token per byte, and 42 rows of logits that are no token."""
    folder = tmp_path_factory.mktemp("tiny")
    with tiny_llm(folder, vocab_size=300, num_blocks=4000) as llm:
        yield llm
