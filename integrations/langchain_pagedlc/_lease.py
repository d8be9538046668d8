"""One LangChain object's hold on the shared engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedlc import LLM, EngineClosedError, shared_llm

__all__ = ["EngineLease"]


class EngineLease:
    """A hold on the engine of one model and one set of options.

    Taken on first use, given back by :meth:`close` or garbage collection. A copy is a hold of its own on the
    same engine, and a pickle carries only the names: neither ever copies weights or KV cache.

    Args:
        model: Model name, path or hub id.
        options: Options of ``pagedlc.LLM``.
    """

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self._model = model
        self._options = dict(options)
        self._llm: LLM | None = None
        self._closed = False

    @property
    def llm(self) -> LLM:
        """The engine's front, made or found on first use.

        Raises:
            ConfigError: An option is invalid.
            ModelLoadError: The name leads to no model this engine can run.
            EngineClosedError: After :meth:`close`.
        """
        if self._closed:
            raise EngineClosedError(f"This model ({self._model}) was closed; make a new one.")
        if self._llm is None:
            self._llm = shared_llm(self._model, **self._options)
        return self._llm

    def close(self) -> None:
        """Give the engine back; it ends, and frees its memory, when nobody else holds it."""
        self._closed = True
        self._llm = None

    def __copy__(self) -> EngineLease:
        twin = EngineLease(self._model, self._options)
        twin._llm, twin._closed = self._llm, self._closed
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineLease:
        return self.__copy__()

    def __reduce__(self) -> tuple[type[EngineLease], tuple[str, dict[str, Any]]]:
        return EngineLease, (self._model, self._options)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EngineLease):
            return NotImplemented
        return (self._model, self._options) == (other._model, other._options)

    __hash__ = None  # type: ignore[assignment]
