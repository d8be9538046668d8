"""Tokenizers read from GGUF files and Hugging Face folders give the ids their models were trained with."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedlc.gguf_metadata import read_gguf_metadata
from pagedlc.models import ModelFiles, resolve_model
from pagedlc.tokenizer import Tokenizer
from pagedlc_engine.errors import InvalidRequestError, ModelLoadError, ModelNotFoundError, UnsupportedModelError

TEXTS = [
    "Hello, world! It's a test, isn't it? I'll say they'd've known. IT'S",
    "The capital of France is Paris.\nThe capital of Germany is Berlin.\n",
    "def f(n):\n    return n if n < 2 else f(n-1) + f(n-2)  # recursion\r\n\r\n\tx = y",
    "Übergrößenträger kosten 1234567 Euro (3.14 %), davon!",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 你好，世界 こんにちは नमस्ते مرحبا Привет",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "trailing   ",
    "",
]


@pytest.fixture(scope="module")
def transformers_smollm() -> Any:
    """The same file read by transformers: an independent reading of vocabulary, merges and special tokens."""
    from transformers import AutoTokenizer

    path = resolve_model("smollm2").path
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


# ---- SmolLM2


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_gives_the_ids_that_transformers_gives(smollm: Tokenizer, transformers_smollm: Any, text: str) -> None:
    assert smollm.encode(text) == transformers_smollm(text)["input_ids"]


@settings(max_examples=80, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=("N", "Z", "C")), max_size=30))
def test_smollm2_gives_the_ids_that_transformers_gives_for_any_words(
    smollm: Tokenizer, transformers_smollm: Any, text: str
) -> None:
    assert smollm.encode(text) == transformers_smollm(text)["input_ids"]


@pytest.mark.parametrize(
    ("text", "token_ids"),
    [
        ("Hello", [19556]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("def fibonacci(n):", [1604, 3987, 46477, 24, 94, 727]),
    ],
)
def test_smollm2_gives_the_published_ids(smollm: Tokenizer, text: str, token_ids: list[int]) -> None:
    assert smollm.encode(text) == token_ids


def test_smollm2_cuts_digits_off_before_the_spaces_around_them(smollm: Tokenizer) -> None:
    """As the model's own tokenizer.json does (Digits, then ByteLevel): the spaces before a number stay together."""
    pieces = [smollm.token_text(token) for token in smollm.encode("a  12\n\n3 ½")]
    assert pieces[:7] == ["a", "  ", "1", "2", "\n\n", "3", " "]


def test_smollm2_special_tokens(smollm: Tokenizer) -> None:
    assert smollm.encode("<|im_start|>") == [1]
    assert smollm.eos_token_ids == (2,)
    assert smollm.bos_token_id == 1
    assert smollm.special_token_ids == frozenset(range(17))
    assert smollm.special_tokens_map["eos_token"] == "<|im_end|>"
    assert smollm.vocab_size == 49152
    assert smollm.encode("hello", add_special_tokens=True) == smollm.encode("hello", add_special_tokens=False)


@settings(max_examples=80, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=("Cc", "Cs", "Cn", "Co")), max_size=40))
def test_smollm2_text_survives_a_round_trip(smollm: Tokenizer, text: str) -> None:
    if any(ord(character) > 0x3FFFF for character in text):
        return  # the vocabulary has no token for the first byte of these
    assert smollm.decode(smollm.encode(text), skip_special_tokens=False) == text


def test_bad_words_are_banned_with_and_without_a_leading_space(smollm: Tokenizer) -> None:
    sequences = smollm.encode_bad_words(["cat", " dog"])
    assert {smollm.decode(sequence) for sequence in sequences} == {"cat", " cat", "dog", " dog"}


def test_bad_words_that_cannot_be_written_are_refused(smollm: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="cannot write"):
        smollm.encode_bad_words(["\x04"])


@pytest.mark.parametrize("text", ["\ud800", b"bytes", None])
def test_what_is_no_text_is_refused(smollm: Tokenizer, text: Any) -> None:
    with pytest.raises(InvalidRequestError):
        smollm.encode(text)


# ---- other GGUF tokenizers


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_files_split_like_transformers_splits_them(pre: str, write_byte_level: Any) -> None:
    from transformers import AutoTokenizer

    path = write_byte_level(pre, add_bos=False)
    tokenizer = Tokenizer.from_files(resolve_model(path))
    reference = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in TEXTS:
        composed = unicodedata.normalize("NFC", text)
        assert tokenizer.encode(composed) == reference(composed)["input_ids"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["x", " 2024"]),
        ("smollm", ["x", " ", "2", "0", "2", "4"]),
        ("llama-bpe", ["x", " ", "202", "4"]),
        ("qwen2", ["x", " ", "2", "0", "2", "4"]),
    ],
)
def test_numbers_are_split_as_each_family_does(pre: str, pieces: list[str], write_byte_level: Any) -> None:
    tokenizer = Tokenizer.from_files(resolve_model(write_byte_level(pre)))
    split = tokenizer.backend.pre_tokenizer.pre_tokenize_str("x 2024")
    assert [piece.replace("Ġ", " ") for piece, _ in split] == pieces


@pytest.mark.parametrize(
    ("pre", "extra", "begins_with_bos"),
    [
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"add_bos": True}, True),
    ],
)
def test_prompts_begin_with_bos_where_the_model_wants_it(
    pre: str, extra: dict[str, Any], begins_with_bos: bool, write_byte_level: Any
) -> None:
    tokenizer = Tokenizer.from_files(resolve_model(write_byte_level(pre, **extra)))
    assert (tokenizer.encode("hello")[0] == tokenizer.bos_token_id) is begins_with_bos
    assert tokenizer.encode("hello", add_special_tokens=False)[0] != tokenizer.bos_token_id


def test_end_of_turn_also_ends_an_answer(write_byte_level: Any) -> None:
    assert Tokenizer.from_files(resolve_model(write_byte_level("llama-bpe", eot=4))).eos_token_ids == (2, 4)


def test_sentencepiece_files_give_the_ids_of_the_tokenizer_they_were_made_of(
    sentencepiece: Tokenizer, sentencepiece_backend: tokenizers.Tokenizer
) -> None:
    for text in [text for text in TEXTS if text] + ["  two spaces first", " one", "a<s>b", "\n", "👍"]:
        expected = sentencepiece_backend.encode(text, add_special_tokens=False).ids
        assert sentencepiece.encode(text, add_special_tokens=False) == expected
        assert sentencepiece.encode(text) == [sentencepiece.bos_token_id, *expected]


def test_a_file_may_ask_for_no_space_prefix(write_gguf: Any) -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab"]
    scores = [-float(position) for position in range(len(tokens))]
    for prefix, first in ((True, "▁a"), (False, "a")):
        path = write_gguf("prefix", "llama", tokens, [2, 3, 3, 1, 1, 1, 1, 1], scores=scores, space_prefix=prefix)
        tokenizer = Tokenizer.from_files(resolve_model(path))
        token_ids = tokenizer.encode("a b", add_special_tokens=False)
        assert tokens[token_ids[0]] == first
        assert tokenizer.decode(token_ids) == "a b"


def test_a_file_may_hold_several_chat_templates(write_byte_level: Any) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    tokenizer = Tokenizer.from_files(resolve_model(write_byte_level("gpt-2", template=templates)))
    assert tokenizer.chat_template == "plain"
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "with tools"}


def test_a_token_is_shown_with_its_leading_space(sentencepiece: Tokenizer, smollm: Tokenizer) -> None:
    assert sentencepiece.token_text(sentencepiece.encode("fox", add_special_tokens=False)[0])[0] == " "
    assert smollm.token_text(smollm.encode(" fox")[0]) == " fox"
    assert smollm.token_text(2) == "<|im_end|>"


def test_unknown_kinds_of_tokenizer_are_named(write_byte_level: Any, write_gguf: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'chatglm-bpe'.*known: .*smollm.*tokenizer="):
        Tokenizer.from_files(resolve_model(write_byte_level("chatglm-bpe")))
    with pytest.raises(UnsupportedModelError, match="family 'rwkv'"):
        Tokenizer.from_files(resolve_model(write_gguf("other", "rwkv", ["a", "b", "c"], [1, 1, 1])))


def test_a_cut_off_file_is_a_clear_error(write_byte_level: Any, tmp_path: Path) -> None:
    whole = write_byte_level("gpt-2").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [4, 10, 24, 40, 200, len(whole) // 2, len(whole) - 60]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError):
            Tokenizer.from_files(ModelFiles("cut", cut, cut))


def test_damaged_sizes_do_not_take_memory(tmp_path: Path) -> None:
    import struct

    key = b"tokenizer.ggml.tokens"
    header = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    path = tmp_path / "damaged.gguf"
    for kind in (4, 8):
        path.write_bytes(header + struct.pack("<IIQ", 9, kind, 2**60))
        with pytest.raises(ModelLoadError, match="damaged"):
            read_gguf_metadata(path)


def test_metadata_is_read_as_the_gguf_library_reads_it(write_byte_level: Any) -> None:
    import gguf

    path = write_byte_level("gpt-2", add_bos=True, eot=4, template="{{ messages }}")
    metadata = read_gguf_metadata(path)
    fields = gguf.GGUFReader(str(path)).fields
    assert set(metadata) == {key for key in fields if not key.startswith("GGUF.")}
    for key, value in metadata.items():
        assert value == fields[key].contents()


# ---- Hugging Face folders


@pytest.fixture
def folder(tmp_path: Path, smollm: Tokenizer) -> Path:
    smollm.backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": "{{ messages[0]['content'] }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return tmp_path


def test_a_folder_gives_tokenizer_template_and_all_end_tokens(folder: Path, smollm: Tokenizer) -> None:
    tokenizer = Tokenizer.from_files(resolve_model(folder))
    assert tokenizer.encode(TEXTS[3]) == smollm.encode(TEXTS[3])
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.special_tokens_map["bos_token"] == "<|im_start|>"
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"


def test_truncation_saved_with_a_tokenizer_is_not_applied_to_prompts(folder: Path, smollm: Tokenizer) -> None:
    backend = tokenizers.Tokenizer.from_str(smollm.backend.to_str())
    backend.enable_truncation(max_length=3)
    backend.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.from_files(resolve_model(folder)).encode(TEXTS[0])) > 3


def test_another_tokenizer_can_be_given(folder: Path, smollm: Tokenizer, sentencepiece_file: Path) -> None:
    files = resolve_model(sentencepiece_file)
    for source in (folder, folder / "tokenizer.json", resolve_model("smollm2").path):
        assert Tokenizer.from_files(files, tokenizer=str(source)).vocab_size == smollm.vocab_size


def test_missing_and_damaged_tokenizers_are_clear_errors(folder: Path) -> None:
    files = resolve_model(folder)
    with pytest.raises(ModelNotFoundError, match="no file or folder 'nowhere'"):
        Tokenizer.from_files(files, tokenizer="nowhere")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        Tokenizer.from_files(files)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelNotFoundError, match="give tokenizer="):
        Tokenizer.from_files(files)
