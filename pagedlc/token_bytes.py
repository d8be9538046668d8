"""What each token of a tokenizer writes, as bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from pagedlc_engine.errors import UnsupportedModelError

__all__ = ["token_bytes"]

_SINGLE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(backend: Tokenizer) -> dict[int, bytes]:
    """Token id to the bytes it writes inside a text.

    Added tokens, special ones among them, write their own name.

    Raises:
        UnsupportedModelError: The tokenizer is neither byte-level nor SentencePiece-like.
    """
    spell = _speller(_decoder_kinds(backend))
    added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
    plain = backend.get_vocab(with_added_tokens=False)
    found = {token_id: spell(token) for token, token_id in plain.items()}
    found.update((token_id, content.encode()) for token_id, content in added.items())
    return found


def _decoder_kinds(backend: Tokenizer) -> set[str]:
    if backend.decoder is None:
        return set()
    state: Mapping[str, Any] = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return {part["type"] for part in parts}


def _speller(kinds: set[str]) -> Any:
    if "ByteLevel" in kinds:
        letters = _byte_of_letter()
        return lambda token: b"".join(letters.get(letter, letter.encode()) for letter in token)
    if kinds & {"ByteFallback", "Metaspace"}:
        return _spell_sentencepiece
    raise UnsupportedModelError(
        "Structured outputs need a byte-level or SentencePiece tokenizer; this model's tokenizer decodes by "
        f"{', '.join(sorted(kinds)) or 'nothing'}."
    )


def _spell_sentencepiece(token: str) -> bytes:
    single = _SINGLE_BYTE.fullmatch(token)
    return bytes([int(single[1], 16)]) if single else token.replace("▁", " ").encode()


def _byte_of_letter() -> dict[str, bytes]:
    """The byte-level alphabet of GPT-2: printable Latin-1 letters stand for their own byte, the other bytes for the
    letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): bytes([byte]) for byte in printable}
    letters.update((chr(0x100 + number), bytes([byte])) for number, byte in enumerate(others))
    return letters
