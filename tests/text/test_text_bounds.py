"""A text's least number of tokens, told from its length, is never more than it has, or nothing is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pagedlc.models import resolve_model
from pagedlc.tokenizer import Tokenizer

# Runs of what vocabularies have long tokens for, characters that compose, and what SmolLM2 has no token for.
NASTY = st.lists(
    st.tuples(
        st.sampled_from([" ", "\n", "#", "e\u0301", "\u1100\u1161\u11a8", "\x04", "\U00040000", "日", "a"]),
        st.integers(1, 90),
    ),
    max_size=6,
).map(lambda runs: "".join(text * count for text, count in runs))
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


@pytest.fixture(scope="module")
def qwen2(write_byte_level: Any) -> Tokenizer:
    return Tokenizer.from_files(resolve_model(write_byte_level("qwen2")))


@pytest.fixture(params=["smollm", "qwen2", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


@settings(max_examples=150, deadline=None)
@given(text=st.one_of(st.text(max_size=60), NASTY))
@example(text="\x04" * 200)
@example(text="#" * 800)
@example(text="e\u0301" * 200)
def test_no_text_has_fewer_tokens(smollm: Tokenizer, qwen2: Tokenizer, sentencepiece: Tokenizer, text: str) -> None:
    for tokenizer in (smollm, qwen2, sentencepiece):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_long_texts_are_known_to_have_many_tokens(tokenizer: Tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 1000
    assert tokenizer.fewest_tokens(text) > 500
    assert tokenizer.fewest_tokens("") == 0


def byte_level(**changes: Any) -> Backend:
    """A tokenizer with a token for each byte, and nothing that loses text but what ``changes`` bring."""
    vocabulary = {letter: number for number, letter in enumerate(ALPHABET)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for name, value in changes.items():
        setattr(backend, name, value)
    return backend


def fallback(tokens: list[str], normalizer: Any = None) -> Backend:
    """A tokenizer of the SentencePiece kind with these tokens and ``<unk>``."""
    vocabulary = {token: number for number, token in enumerate(["<unk>", *tokens])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend


def with_added(token: AddedToken) -> Backend:
    backend = byte_level()
    backend.add_tokens([token])
    return backend


def cut_off() -> Backend:
    backend = byte_level()
    backend.enable_truncation(16)
    return backend


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPLIT = pre_tokenizers.Split
LOSING: dict[str, tuple[Callable[[], Backend], str]] = {
    "spaces are collapsed": (lambda: fallback(BYTES, normalizers.Replace(Regex(" +"), " ")), " " * 900),
    "text is replaced by less": (lambda: fallback(BYTES, normalizers.Replace("abc", "x")), "abc" * 300),
    "spaces are stripped": (lambda: byte_level(normalizer=normalizers.Strip()), " " * 900),
    "characters are dropped": (lambda: byte_level(normalizer=normalizers.BertNormalizer()), "\x01" * 900),
    "spaces are dropped": (lambda: byte_level(pre_tokenizer=pre_tokenizers.Whitespace()), " " * 900),
    "pieces are dropped": (
        lambda: byte_level(
            pre_tokenizer=pre_tokenizers.Sequence([SPLIT("x", "removed"), pre_tokenizers.ByteLevel(False)])
        ),
        "x" * 900,
    ),
    "unknown characters are one token": (lambda: fallback(BYTES[:128]), "日" * 900),
    "a token takes spaces in": (lambda: with_added(AddedToken("<end>", rstrip=True)), "<end>" + " " * 900),
    "long texts are cut off": (cut_off, "a" * 900),
    "words are one token": (
        lambda: Backend(models.WordLevel({"a" * 900: 0, "<unk>": 1}, unk_token="<unk>")),
        "b" * 900,
    ),
}


@pytest.mark.parametrize("way", LOSING)
def test_of_tokenizers_that_lose_text_nothing_is_said(way: str) -> None:
    make, text = LOSING[way]
    tokenizer = Tokenizer(make())
    assert len(tokenizer.encode(text)) <= 16 or way == "text is replaced by less"
    assert tokenizer.fewest_tokens(text) == 0


@pytest.mark.parametrize(
    ("make", "fewest"),
    [
        (byte_level, 900),
        (lambda: byte_level(normalizer=normalizers.NFC()), 900),
        (lambda: fallback(BYTES), 150),  # "<0x61>" might be text as well
        (lambda: with_added(AddedToken("a" * 30)), 30),
    ],
)
def test_the_longest_token_says_how_few_there_can_be(make: Callable[[], Backend], fewest: int) -> None:
    assert Tokenizer(make()).fewest_tokens("a" * 900) == fewest
