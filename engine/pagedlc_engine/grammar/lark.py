"""Writes rules in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from llguidance import regex_to_lark

from pagedlc_engine.errors import InvalidRequestError
from pagedlc_engine.grammar.schema import prepare_schema
from pagedlc_engine.grammar.spec import StructuredOutputsParams
from pagedlc_engine.grammar.vocabulary import TokenVocabulary

__all__ = ["LarkWriter"]

_MOST_ALTERNATIVES = 1000


class LarkWriter:
    """Collects the rules of one grammar.

    Args:
        vocabulary: Its special tokens are recognised in literals.
        spec: Options for JSON schemas.
    """

    def __init__(self, vocabulary: TokenVocabulary, spec: StructuredOutputsParams) -> None:
        self._spec = spec
        self._special = {
            vocabulary.tokens[token_id].decode(errors="ignore"): token_id for token_id in vocabulary.special_token_ids
        }
        names = sorted(filter(None, self._special), key=len, reverse=True)
        self._special_names = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self._rules: list[str] = []
        self._parts: list[dict[str, Any]] = []
        #: Schemas of tools' arguments, each with the tool's name.
        self.tools: list[tuple[str, dict[str, Any]]] = []

    def pieces(self, text: str) -> list[str]:
        """A literal as terms, one after the other: its special tokens stand for themselves."""
        split = [text] if self._special_names is None else self._special_names.split(text)
        return [self._piece(piece) for piece in split if piece]

    def _piece(self, piece: str) -> str:
        special = self._special.get(piece)
        return json.dumps(piece, ensure_ascii=False) if special is None else f"<[{special}]>"

    def literal(self, text: str) -> str:
        """A term for exactly this text."""
        return " ".join(self.pieces(text)) or '""'

    def regex(self, pattern: str) -> str:
        """A term for a regular expression, in which ``\\d`` means the digits 0 to 9 only."""
        return f"/{regex_to_lark(pattern, 'd')}/"

    def rule(self, body: str, options: str = "") -> str:
        """A new rule; returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def choice(self, options: Sequence[str]) -> str:
        """A term for one of these texts."""
        terms = [self.literal(option) for option in options]
        # The library's parser limits alternatives, its lexer does not; but special tokens are the parser's.
        if len(terms) > _MOST_ALTERNATIVES and not any("<[" in term for term in terms):
            return self.regex("|".join(map(re.escape, options)))
        return " | ".join(terms)

    def schema(self, schema: Any, tool: str | None = None) -> str:
        """A term for JSON that fits a schema, which may be that of a tool's arguments."""
        if not isinstance(schema, dict | bool):
            raise InvalidRequestError(f"structured_outputs: {schema!r} is not a JSON schema.")
        prepared = prepare_schema(schema, self._spec)
        if tool is not None:
            self.tools.append((tool, prepared))
        return self._part({"json_schema": prepared})

    def grammar(self, lark: str) -> str:
        """A term for a whole grammar in Lark syntax."""
        return self._part({"lark_grammar": lark})

    def _part(self, part: dict[str, Any]) -> str:
        name = f"part{len(self._parts)}"
        self._parts.append({"name": name, **part})
        return f"@{name}"

    def finish(self, start: str) -> str:
        """The grammar whose answers are ``start``, as the library takes it."""
        lines = [f"start: {start}", *self._rules, r"TEXT: /(.|\n)*/", ""]
        grammars = [{"name": "answer", "lark_grammar": "\n".join(lines)}, *self._parts]
        return json.dumps({"grammars": grammars}, allow_nan=False)
