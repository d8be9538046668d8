"""LangChain's cache of answers, which must hold whole answers only."""

from __future__ import annotations

from typing import Any, Final

from langchain_core.caches import RETURN_VAL_TYPE, BaseCache
from langchain_core.outputs import ChatGeneration

__all__ = ["WholeAnswersCache"]

#: Why an answer ended that says nothing of what the next one would be.
_CUT_SHORT: Final = {"interrupted", "abort"}


class WholeAnswersCache(BaseCache):
    """A cache that is not given answers that somebody cut short.

    Args:
        cache: Keeps the others.
    """

    def __init__(self, cache: BaseCache) -> None:
        self._cache = cache

    def lookup(self, prompt: str, llm_string: str) -> RETURN_VAL_TYPE | None:
        """See ``BaseCache``."""
        return self._cache.lookup(prompt, llm_string)

    async def alookup(self, prompt: str, llm_string: str) -> RETURN_VAL_TYPE | None:
        """See ``BaseCache``."""
        return await self._cache.alookup(prompt, llm_string)

    def update(self, prompt: str, llm_string: str, return_val: RETURN_VAL_TYPE) -> None:
        """See ``BaseCache``."""
        if not _cut_short(return_val):
            self._cache.update(prompt, llm_string, return_val)

    async def aupdate(self, prompt: str, llm_string: str, return_val: RETURN_VAL_TYPE) -> None:
        """See ``BaseCache``."""
        if not _cut_short(return_val):
            await self._cache.aupdate(prompt, llm_string, return_val)

    def clear(self, **kwargs: Any) -> None:
        """See ``BaseCache``."""
        self._cache.clear(**kwargs)


def _cut_short(answers: RETURN_VAL_TYPE) -> bool:
    return any(
        isinstance(answer, ChatGeneration) and answer.message.response_metadata.get("finish_reason") in _CUT_SHORT
        for answer in answers
    )
