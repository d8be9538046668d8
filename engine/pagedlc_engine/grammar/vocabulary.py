"""A model's vocabulary as bytes: all that grammars need to know of a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["TokenVocabulary"]


@dataclass(frozen=True, slots=True)
class TokenVocabulary:
    """What each token writes. Can be pickled if ``encode`` can.

    Args:
        tokens: Bytes per token id, V entries. Inside a text, that is, with a leading space where the token has one; the
            bytes of a single token need not be valid UTF-8. Empty for ids that write nothing and must never be sampled
            under a grammar, such as the padding rows of a model's output layer. A special token has its name here.
        special_token_ids: Tokens that are no text: control tokens such as begin-of-text.
        eos_token_ids: Tokens that end an answer, if there are any.
        encode: A text's usual tokens, without any around it. Where a grammar leaves no choice, it asks for these.
    """

    tokens: tuple[bytes, ...]
    special_token_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]]

    @property
    def size(self) -> int:
        """V, the width of the model's logits."""
        return len(self.tokens)
