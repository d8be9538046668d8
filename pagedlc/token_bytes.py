"""What each token of a tokenizer writes, as bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Tokenizer

from pagedlc_engine.errors import UnsupportedModelError

__all__ = ["byte_level_letter", "token_bytes"]

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


def byte_level_letter(byte: int) -> str:
    """How GPT-2's byte-level alphabet writes a byte."""
    return _LETTER_OF_BYTE.get(byte, chr(byte))


def _decoder_kinds(backend: Tokenizer) -> set[str]:
    if backend.decoder is None:
        return set()
    state: Mapping[str, Any] = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return {part["type"] for part in parts}


def _speller(kinds: set[str]) -> Callable[[str], bytes]:
    if "ByteLevel" in kinds:
        return _spell_byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return _spell_sentencepiece
    raise UnsupportedModelError(
        "Structured outputs need a byte-level or SentencePiece tokenizer; this model's tokenizer decodes by "
        f"{', '.join(sorted(kinds)) or 'nothing'}."
    )


def _spell_sentencepiece(token: str) -> bytes:
    single = _SINGLE_BYTE.fullmatch(token)
    return bytes([int(single[1], 16)]) if single else token.replace("▁", " ").encode()


def _spell_byte_level(token: str) -> bytes:
    """Undo the byte-level alphabet of GPT-2: printable Latin-1 letters stand for their own byte, the other bytes are
    written as the letters from U+0100 on. A token with any other letter is plain text."""
    try:
        return token.translate(_BYTE_OF_LETTER).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


_PRINTABLE = frozenset([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])
_BYTE_OF_LETTER = dict(enumerate([byte for byte in range(256) if byte not in _PRINTABLE], start=0x100))
_LETTER_OF_BYTE = {byte: chr(letter) for letter, byte in _BYTE_OF_LETTER.items()}
