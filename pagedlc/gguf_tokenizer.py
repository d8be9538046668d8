"""A ``tokenizers.Tokenizer`` built from the vocabulary in a GGUF file's metadata.

Two families are known: byte-level BPE (``tokenizer.ggml.model`` = ``gpt2``; SmolLM2, Llama 3, Qwen) and
SentencePiece BPE with byte fallback (``llama``; Llama 2, Mistral). The split patterns are those that the models'
own ``tokenizer.json`` files carry; which one applies is named by ``tokenizer.ggml.pre``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pagedlc_engine.errors import ModelLoadError, UnsupportedModelError

__all__ = ["GGUF_PRE_TOKENIZERS", "build_gguf_tokenizer", "gguf_bos_token_id"]

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How byte-level text is cut into pieces before merging.

    Args:
        split: Pattern of the pieces; ``None`` takes GPT-2's.
        digits: Cut every digit off by itself first.
        whole_words: Take a piece that is a vocabulary entry as it is, without replaying its merges.
        nfc: Normalise to NFC first.
        bos: Prompts begin with the begin-of-text token unless the file says otherwise.
    """

    split: str | None = None
    digits: bool = False
    whole_words: bool = False
    nfc: bool = False
    bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.split is not None:
            steps.append(pre_tokenizers.Split(Regex(self.split), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.split is None))
        return pre_tokenizers.Sequence(steps)


_GPT2 = _PreTokenizer()
_GPT2_DIGITS = _PreTokenizer(digits=True)
_LLAMA3 = _PreTokenizer(split=_LLAMA3_SPLIT, whole_words=True, bos=True)
_QWEN2 = _PreTokenizer(split=_QWEN2_SPLIT, nfc=True)

#: ``tokenizer.ggml.pre`` to the way of splitting.
GGUF_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "codeshell": _GPT2_DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _PreTokenizer(split=_TEKKEN_SPLIT, whole_words=True, bos=True),
}


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes.

    Args:
        metadata: From :func:`pagedlc.gguf_metadata.read_gguf_metadata`.

    Raises:
        UnsupportedModelError: A tokenizer family or split pattern that is not known.
        ModelLoadError: The file holds no vocabulary, or one without merges.
    """
    if not metadata.get("tokenizer.ggml.tokens"):
        raise ModelLoadError(
            "The GGUF file holds no tokenizer vocabulary; give tokenizer= a folder or Hugging Face id."
        )
    family = metadata.get("tokenizer.ggml.model")
    if family == "gpt2":
        tokenizer = _byte_level(metadata)
    elif family == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise UnsupportedModelError(
            f"The GGUF file's tokenizer is of the family {family!r}; 'gpt2' and 'llama' can be read. "
            "Give tokenizer= the folder or Hugging Face id of the original model."
        )
    _add_marked_tokens(tokenizer, metadata)
    _prepend_bos(tokenizer, metadata)
    return tokenizer


def gguf_bos_token_id(metadata: Mapping[str, Any]) -> int | None:
    """The begin-of-text token's id, if the file names one."""
    value = metadata.get("tokenizer.ggml.bos_token_id")
    return None if value is None else int(value)


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    if "tokenizer.ggml.merges" not in metadata:
        raise ModelLoadError("The GGUF file's byte-level vocabulary has no merges; give tokenizer= another source.")
    pre = _pre_tokenizer(metadata)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocabulary(metadata),
            merges=[_pair(merge) for merge in metadata["tokenizer.ggml.merges"]],
            ignore_merges=pre.whole_words,
        )
    )
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(metadata: Mapping[str, Any]) -> _PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in GGUF_PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"The GGUF file's tokenizer splits text as {name!r}, which is not known "
            f"(known: {', '.join(sorted(GGUF_PRE_TOKENIZERS))}). "
            "Give tokenizer= the folder or Hugging Face id of the original model."
        )
    return GGUF_PRE_TOKENIZERS[name]


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    vocabulary = _vocabulary(metadata)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_sentencepiece_merges(metadata, vocabulary),
            unk_token=metadata["tokenizer.ggml.tokens"][unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    text: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        text.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(text)
    return tokenizer


def _sentencepiece_merges(metadata: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges of the file, or those its scores imply: every way to make a token of two others, best token first."""
    if "tokenizer.ggml.merges" in metadata:
        return [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    if "tokenizer.ggml.scores" not in metadata:
        raise ModelLoadError(
            "The GGUF file's vocabulary has neither merges nor scores; give tokenizer= another source."
        )
    scores = metadata["tokenizer.ggml.scores"]
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, identifier in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[identifier], vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: identifier for identifier, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _add_marked_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Make control tokens, and those the model's authors added, match as a whole in text."""
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    special = {
        metadata[key]
        for name in ("bos", "eos", "eot", "eom")
        if (key := f"tokenizer.ggml.{name}_token_id") in metadata and metadata[key] < len(tokens)
    }
    special |= {identifier for identifier, kind in enumerate(kinds) if kind in (_UNKNOWN, _CONTROL)}
    added = {identifier for identifier, kind in enumerate(kinds) if kind == _USER_DEFINED} - special
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in sorted(special)])
    tokenizer.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in sorted(added)])


def _prepend_bos(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    bos = gguf_bos_token_id(metadata)
    usual = metadata["tokenizer.ggml.model"] == "llama" or _pre_tokenizer(metadata).bos
    if bos is None or not metadata.get("tokenizer.ggml.add_bos_token", usual):
        return
    token = metadata["tokenizer.ggml.tokens"][bos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", "$B"], special_tokens=[(token, bos)]
    )
