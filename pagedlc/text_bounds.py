"""How many tokens a text must have at least, told from its length alone.

A text far too long for a model is refused without spending a second, and its memory, on tokenizing it. That is only
right where nothing of a text is lost on its way into tokens; of tokenizers for which this cannot be shown, nothing is
said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer, models

from pagedlc.token_bytes import byte_level_letter

__all__ = ["TextBound", "text_bound"]

#: NFC makes one character of at most so many: none has a longer canonical decomposition (UAX #15).
_MOST_COMPOSED: Final = 4
#: Each cuts text into pieces that together are all of it; "Split" may also drop what it matches.
_KEEPING: Final = frozenset({"ByteLevel", "Digits", "Metaspace", "Split"})
#: Bytes of UTF-8 beyond ASCII that every such character has at least one of.
_CONTINUATION: Final = range(0x80, 0xC0)


@dataclass(frozen=True, slots=True)
class TextBound:
    """What bounds the number of a text's tokens from below.

    Args:
        longest: Most characters of normalised text that one token stands for.
        composes: Normalising may make one character of several.
        lost: ASCII characters that the vocabulary cannot write, of which no token is made.
    """

    longest: int
    composes: bool = False
    lost: str = ""

    def fewest_tokens(self, text: str) -> int:
        """No fewer tokens than this come of ``text``, special tokens around it not counted."""
        kept = len(text) - sum(map(text.count, self.lost))
        together = _MOST_COMPOSED if self.composes and not text.isascii() else 1
        return -(-kept // (self.longest * together))


def text_bound(backend: Tokenizer) -> TextBound | None:
    """The bound for a tokenizer's texts; ``None`` if there may be none."""
    added = backend.get_added_tokens_decoder().values()
    # These take the spaces beside them in, however many.
    swallowing = any(token.lstrip or token.rstrip for token in added)
    if swallowing or backend.truncation is not None or not _is_plain_bpe(backend.model):
        return None
    cuts = list(_parts(backend.pre_tokenizer, "pretokenizers"))
    if any(cut["type"] not in _KEEPING or cut.get("behavior") == "Removed" for cut in cuts):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    longest = max(map(len, vocabulary), default=1)
    if backend.normalizer is not None:
        longest = max([longest, *(len(backend.normalizer.normalize_str(token.content)) for token in added)])
    changes = list(_parts(backend.normalizer, "normalizers"))
    if any(cut["type"] == "ByteLevel" for cut in cuts):
        return _byte_level_bound(vocabulary, longest, changes)
    if not _writes_all_bytes(backend.model, vocabulary) or not all(map(_lengthens, changes)):
        return None
    return TextBound(longest)


def _is_plain_bpe(model: Any) -> bool:
    """Whether tokens hold nothing but text."""
    return isinstance(model, models.BPE) and not model.continuing_subword_prefix and not model.end_of_word_suffix


def _byte_level_bound(
    vocabulary: Mapping[str, int], longest: int, changes: list[Mapping[str, Any]]
) -> TextBound | None:
    kinds = [change["type"] for change in changes]
    if kinds not in ([], ["NFC"]) or any(byte_level_letter(byte) not in vocabulary for byte in _CONTINUATION):
        return None
    lost = "".join(chr(byte) for byte in range(128) if byte_level_letter(byte) not in vocabulary)
    return TextBound(longest, composes=bool(kinds), lost=lost)


def _writes_all_bytes(model: Any, vocabulary: Mapping[str, int]) -> bool:
    """Whether a character without a token of its own becomes those of its bytes."""
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _lengthens(change: Mapping[str, Any]) -> bool:
    """Whether a normaliser never makes text shorter."""
    if change["type"] == "Replace":
        replaced = change["pattern"].get("String")
        return replaced is not None and len(replaced) <= len(change["content"])
    return bool(change["type"] == "Prepend")


def _parts(stage: Any, members: str) -> Iterator[Mapping[str, Any]]:
    """The states of a stage's parts; a sequence may hold sequences."""
    waiting = [] if stage is None else [json.loads(stage.__getstate__())]
    while waiting:
        state = waiting.pop(0)
        if state["type"] == "Sequence":
            waiting = [*state[members], *waiting]
        else:
            yield state
