"""Grammars over tokens: specs are compiled, matchers follow an answer and say which tokens may come next."""

from pagedlc_engine.grammar.base import TokenMatcher
from pagedlc_engine.grammar.compiler import GrammarCompiler
from pagedlc_engine.grammar.spec import StructuredOutputsParams
from pagedlc_engine.grammar.vocabulary import TokenVocabulary

__all__ = ["GrammarCompiler", "StructuredOutputsParams", "TokenMatcher", "TokenVocabulary"]
