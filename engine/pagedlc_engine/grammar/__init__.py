"""Grammars over tokens: specs are compiled, matchers follow an answer and say which tokens may come next."""
