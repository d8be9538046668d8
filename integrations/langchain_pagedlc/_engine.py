"""What the chat model and the completion model share: fields of the model, and the hold on its engine."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Self

from pydantic import BaseModel, BeforeValidator, Field, PrivateAttr, ValidationError

from langchain_pagedlc._lease import EngineLease
from langchain_pagedlc._options import arrange_options
from pagedlc import LLM, ConfigError
from pagedlc_engine.config import validation_message

__all__ = ["EngineBacked"]

#: Fields handed to ``pagedlc.LLM`` beside the model and the engine's options.
_LLM_FIELDS: Final = ("tokenizer", "chat_template", "revision", "trust_remote_code", "use_tqdm")


def _as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


#: A name or path; kept as text, so that it can be serialized.
Name = Annotated[str, BeforeValidator(_as_text)]


class EngineBacked(BaseModel):
    """Mixin: a LangChain model whose answers come from a shared in-process engine."""

    model: Name = "smollm2"
    """``"smollm2"`` (the embedded default), a model folder or ``.gguf`` file, or a Hugging Face id."""

    tokenizer: Name | None = None
    """File, folder or Hugging Face id of another tokenizer than the model's own."""

    chat_template: Name | None = None
    """Jinja chat template, or the path of one, instead of the model's own."""

    revision: str | None = None
    """Branch, tag or commit of a Hugging Face model."""

    trust_remote_code: bool = False
    """As in ``pagedlc.LLM``."""

    use_tqdm: bool | None = Field(default=None, exclude=True)
    """Progress bars: ``None`` shows them on a terminal only."""

    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the engine (see ``pagedlc_engine.EngineConfig``). Give them as plain keywords; they are collected
    here. The engine's own ``seed`` must be written here, because the keyword ``seed`` is the sampling seed."""

    if TYPE_CHECKING:  # a field of every LangChain model
        custom_get_token_ids: Callable[[str], list[int]] | None

    _lease: EngineLease = PrivateAttr()
    _aliases: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **options: Any) -> None:
        cls = type(self)
        arranged = arrange_options(options, cls.model_fields, cls._aliases, _LLM_FIELDS)
        try:
            super().__init__(**arranged)
        except ValidationError as error:
            raise ConfigError(validation_message("option", error)) from None
        self._lease = EngineLease(self.model, self._llm_options())
        # Whatever is wrong with the model or its options is said here, not by the first request.
        self._lease.llm  # noqa: B018

    @property
    def llm(self) -> LLM:
        """The ``pagedlc.LLM`` behind this model: ``stats()``, ``reset_prefix_cache()``, ``tokenizer`` …"""
        return self._settled_lease().llm

    def load(self) -> Self:
        """Load the weights now rather than with the first request."""
        self.llm.load()
        return self

    def close(self) -> None:
        """Let go of the engine. Its memory is freed when no other object holds it; this object is done."""
        self._lease.close()

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of ``text`` by the model's tokenizer, without special tokens."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return list(self.llm.tokenizer.encode(text, add_special_tokens=False))

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """LangChain's ``dumps`` writes the constructor's keywords; ``loads`` needs nothing else."""
        return True

    def __copy__(self) -> Self:
        twin = super().__copy__()
        twin._lease = copy.copy(self._lease)
        return twin

    def _settled_lease(self) -> EngineLease:
        wanted = EngineLease(self.model, self._llm_options())
        if wanted != self._lease:  # a field was changed, as by model_copy(update=...)
            self._lease = wanted
        return self._lease

    def _twin(self, **changes: Any) -> Self:
        """A copy with other fields, but the same hold on the engine: what the copy takes, this model has."""
        lease = self._settled_lease()
        twin = self.model_copy(update=changes)
        twin._lease = lease
        return twin

    def _token_text(self, token_id: int) -> str:
        return self.llm.tokenizer.token_text(token_id)

    def _llm_options(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in _LLM_FIELDS}
        defaults = {name: type(self).model_fields[name].default for name in _LLM_FIELDS}
        chosen = {name: value for name, value in given.items() if value != defaults[name]}
        return {**chosen, **self.engine_options}
