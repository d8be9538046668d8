"""Tokens as bytes: joined, they are the text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from pagedlc import LLM, UnsupportedModelError
from pagedlc.token_bytes import token_bytes

TEXT = 'Hello, naïve 世界 😀!\n\t{"a": [1, 2]}  \x00 end'


def test_byte_level_tokens_join_to_the_text(smollm2: LLM) -> None:
    vocabulary = smollm2.tokenizer.vocabulary(smollm2.spec.vocab_size + 8)
    assert b"".join(vocabulary.tokens[token] for token in vocabulary.encode(TEXT)) == TEXT.encode()
    assert vocabulary.size == smollm2.spec.vocab_size + 8
    assert vocabulary.tokens[-8:] == (b"",) * 8
    end = smollm2.tokenizer.encode("<|im_end|>")[0]
    assert vocabulary.tokens[end] == b"<|im_end|>"
    assert end in vocabulary.special_token_ids
    assert end in vocabulary.eos_token_ids


def test_sentencepiece_tokens_carry_their_spaces_and_bytes() -> None:
    vocab = {"<unk>": 0, "▁Hi": 1, "<0xC3>": 2, "<0xA9>": 3, "é": 4}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert token_bytes(backend) == {0: b"<unk>", 1: b" Hi", 2: b"\xc3", 3: b"\xa9", 4: "é".encode()}


def test_other_tokenizers_are_refused_by_name() -> None:
    backend = Backend(models.WordPiece(vocab={"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        token_bytes(backend)
