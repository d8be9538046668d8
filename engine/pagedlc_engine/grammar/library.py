"""The grammar library, llguidance: the only place that calls it.

It needs no other package, compiles a typical tool's schema in a millisecond, fills a mask in microseconds, and refuses
a schema that it cannot keep to the letter rather than keeping half of it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from pagedlc_engine.errors import InvalidRequestError
from pagedlc_engine.grammar.base import MaskRow, mask_words
from pagedlc_engine.grammar.lark import LarkWriter
from pagedlc_engine.grammar.structural_tag import tag_grammar
from pagedlc_engine.grammar.vocabulary import TokenVocabulary

if TYPE_CHECKING:
    from pagedlc_engine.grammar.spec import StructuredOutputsParams

__all__ = ["GrammarLibrary", "LibraryMatcher"]

#: An object takes four items of a row for each optional property, and the usual 2,000 end at 500 of them. With these
#: it is the work of one step that ends it, before 2,000.
_LIMITS = LLParserLimits(verbose_errors=False, max_items_in_row=20_000)
#: Arguments among which the one at fault is looked for: the library's time for a schema grows with their square.
_MOST_SEARCHED = 500
#: Patterns of the library's words, and what they mean.
_MEANINGS = {
    "NoExtensionBias": "nothing can match here; a rule or $ref that leads back to itself needs another way out",
    "Unimplemented keys": "these keywords cannot be enforced and must be left out",
    "recursion limit exceeded.*": "it is nested too deeply",
}


class LibraryMatcher:
    """Implements :class:`pagedlc_engine.grammar.base.TokenMatcher`.

    Args:
        matcher: The library's.
        words: Words of a mask as the library writes it: one more than a row where the token it adds begins a word.
        subject: What a message about its grammar begins with.
    """

    __slots__ = ("_matcher", "_subject", "_words")

    def __init__(self, matcher: LLMatcher, words: int, subject: str) -> None:
        self._matcher = matcher
        self._words = words
        self._subject = subject

    @property
    def complete(self) -> bool:
        """See :class:`TokenMatcher`."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def accept(self, token_id: int) -> str | None:
        """See :class:`TokenMatcher`."""
        return None if self._matcher.consume_token(token_id) else self._problem()

    def fill(self, row: MaskRow) -> str | None:
        """See :class:`TokenMatcher`."""
        mask = row if len(row) == self._words else np.empty(self._words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if mask is not row:
            row[:] = mask[: len(row)]
        return self._problem() if self._matcher.is_error() else None

    def copy(self) -> LibraryMatcher:
        """See :class:`TokenMatcher`."""
        return LibraryMatcher(self._matcher.deep_copy(), self._words, self._subject)

    def _problem(self) -> str:
        problem = _message(self._matcher).rstrip(".")
        return (
            f"{self._subject} cannot be followed: {problem}. Simplify it, or take back what forbids its tokens "
            "(bad_words, allowed_token_ids, logit_bias)."
        )


class GrammarLibrary:
    """Compiles specs for one vocabulary.

    Args:
        vocabulary: The model's tokens.
    """

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = LLTokenizer(_Tokens(vocabulary), n_vocab=_width(vocabulary), eos_token=_ends(vocabulary))  # type: ignore[arg-type]

    def compile(self, spec: StructuredOutputsParams) -> LibraryMatcher:
        """A matcher at the beginning of an answer.

        Raises:
            InvalidRequestError: The grammar is wrong, or asks for what cannot be enforced.
        """
        writer = LarkWriter(self._vocabulary, spec)
        matcher = LLMatcher(self._tokenizer, _grammar(spec, writer), log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            # The first mask costs more than the others; later matchers are copies that share what it found.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequestError(
                _tool_at_fault(writer.tools) or f"{spec.subject} cannot be used: {_message(matcher)}"
            )
        return LibraryMatcher(matcher, mask_words(_width(self._vocabulary)), spec.subject)


def _grammar(spec: StructuredOutputsParams, writer: LarkWriter) -> str:
    if spec.structural_tag is not None:
        return tag_grammar(json.loads(spec.structural_tag), writer, _to_lark)
    if spec.json is not None:
        return writer.finish(writer.schema(json.loads(spec.json)))
    if spec.json_object:
        return writer.finish(writer.schema({"type": "object"}))
    if spec.regex is not None:
        return writer.finish(writer.regex(spec.regex))
    if spec.choice is not None:
        return writer.finish(writer.rule(writer.choice(spec.choice)))
    return writer.finish(writer.grammar(_to_lark(spec.grammar or "")))


def _tool_at_fault(tools: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
    """Which tool, and if it is one of them which argument, the library refuses, and why."""
    for tool, schema in tools:
        if problem := _schema_problem(schema):
            what, problem = _argument_at_fault(schema) or ("arguments", problem)
            return f"Tool {tool!r}: the schema of its {what} cannot be used: {problem}"
    return None


def _argument_at_fault(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first argument with which the schema is refused, and why."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or len(properties) > _MOST_SEARCHED:
        return None
    names = list(properties)

    def problem(number: int) -> str:
        chosen = {name: properties[name] if position < number else True for position, name in enumerate(names)}
        return _schema_problem({**schema, "properties": chosen})

    number = bisect_left(range(len(names)), True, key=lambda number: bool(problem(number)))
    return (f"argument {names[number - 1]!r}", problem(number)) if number else None


def _schema_problem(schema: Mapping[str, Any]) -> str:
    return _plain(LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]})))


def _message(matcher: LLMatcher) -> str:
    """What is wrong, without the library's inner state and the grammar that was written around a regular expression."""
    message = re.split(r"\n<|\n +1 \| start: /", str(matcher.get_error()))[0]
    return _plain(message.strip()) or "the token is not allowed"


def _plain(message: str) -> str:
    for pattern, meaning in _MEANINGS.items():
        message = re.sub(pattern, meaning, message)
    return message


def _to_lark(grammar: str) -> str:
    try:
        return any_to_lark(grammar)
    except Exception as error:  # the library raises plain Exception
        raise InvalidRequestError(f"structured_outputs: the grammar cannot be read: {error}") from error


def _width(vocabulary: TokenVocabulary) -> int:
    """V, and one more when no token ends an answer: the library needs one, and the sampler never sees that one."""
    return vocabulary.size + (not vocabulary.eos_token_ids)


def _ends(vocabulary: TokenVocabulary) -> list[int]:
    return list(vocabulary.eos_token_ids) or [vocabulary.size]


class _Tokens:
    """The vocabulary in the form the library asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self._encode = vocabulary.encode
        missing = _width(vocabulary) - vocabulary.size
        self.tokens = [*vocabulary.tokens, *[b""] * missing]
        self.special_token_ids = sorted(vocabulary.special_token_ids)
        self.eos_token_id = _ends(vocabulary)[0]

    def __call__(self, text: str) -> list[int]:
        """The usual tokens of a text that the grammar forces."""
        return list(self._encode(text))
