"""Tokenizers shared by the tests of the text layer: the embedded model's, and tiny ones trained here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from pagedlc.models import resolve_model
from pagedlc.tokenizer import Tokenizer

CORPUS = (
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 1999 or 2024; they'll pay 3.14 each.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "Größe und Übermut, déjà vu, señor, naïve café. Привет, мир! 你好，世界。こんにちは",
    "  two  spaces   three\ttabs\r\nlines\n\n\nand MORE WORDS, more Words: wordsWords the then there these",
)
MARKED = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")

GgufWriter = Callable[..., Path]


@pytest.fixture(scope="session")
def smollm() -> Tokenizer:
    return Tokenizer.from_files(resolve_model("smollm2"))


@pytest.fixture(scope="session")
def write_gguf(tmp_path_factory: pytest.TempPathFactory) -> GgufWriter:
    """Writes a GGUF file that holds a tokenizer and no tensor."""

    def write(name: str, family: str, tokens: list[str], kinds: list[int], **extra: Any) -> Path:
        path = tmp_path_factory.mktemp("gguf") / f"{name}.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        writer.add_block_count(1)
        writer.add_tokenizer_model(family)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if "pre" in extra:
            writer.add_tokenizer_pre(extra["pre"])
        if "merges" in extra:
            writer.add_token_merges(extra["merges"])
        if "scores" in extra:
            writer.add_token_scores(extra["scores"])
        if "template" in extra:
            writer.add_chat_template(extra["template"])
        if "eot" in extra:
            writer.add_eot_token_id(extra["eot"])
        if "add_bos" in extra:
            writer.add_add_bos_token(extra["add_bos"])
        if "space_prefix" in extra:
            writer.add_add_space_prefix(extra["space_prefix"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="session")
def write_byte_level(write_gguf: GgufWriter) -> GgufWriter:
    """Writes the GGUF file of a byte-level BPE whose merges would join anything that the split allows."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^\n]{12}|\n{1,3}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=list(MARKED),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    merges = [" ".join(merge) for merge in _model_json(backend)["merges"]]
    tokens, kinds = _listing(backend)

    def write(pre: str, **extra: Any) -> Path:
        return write_gguf(f"byte-level-{pre}", "gpt2", tokens, kinds, pre=pre, merges=merges, **extra)

    return write


@pytest.fixture(scope="session")
def sentencepiece_backend() -> Backend:
    """A small BPE in the manner of Llama 2's tokenizer: dummy prefix space, byte fallback, digits unmerged."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*MARKED, *byte_tokens], limit_alphabet=60, show_progress=False
    )
    backend.train_from_iterator([text.replace("\n", " ") for text in CORPUS[:2]], trainer)
    return backend


@pytest.fixture(scope="session")
def sentencepiece_file(sentencepiece_backend: Backend, write_gguf: GgufWriter) -> Path:
    tokens, kinds = _listing(sentencepiece_backend)
    scores = [-float(position) for position in range(len(tokens))]
    return write_gguf("sentencepiece", "llama", tokens, kinds, scores=scores)


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_file: Path) -> Tokenizer:
    return Tokenizer.from_files(resolve_model(sentencepiece_file))


def _listing(backend: Backend) -> tuple[list[str], list[int]]:
    """Tokens in order of their ids, and their GGUF types (1 normal, 2 unknown, 3 control, 6 byte)."""
    tokens = [token for token, _ in sorted(backend.get_vocab().items(), key=lambda item: item[1])]
    named = {"<unk>": 2, **dict.fromkeys(MARKED[1:], 3)}
    return tokens, [6 if token.startswith("<0x") else named.get(token, 1) for token in tokens]


def _model_json(backend: Backend) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    return model
