"""The settings of ``Vllm``, its hold on the engine, and copies that keep both."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import Field, PrivateAttr, ValidationError
from llama_index.core.callbacks import CallbackManager
from llama_index.core.types import BaseOutputParser, PydanticProgramMode

import pagedlc
from llama_index.llms.pagedlc.options import (
    merge_engine_options,
    merge_sampling,
    sampling_params,
    split_options,
    updated_settings,
)
from llama_index.llms.pagedlc.structured import StructuredOutputLLM
from pagedlc.foreign import refuse_foreign
from pagedlc.option_names import same
from pagedlc.registry import shared_llm
from pagedlc_engine.config import validation_message
from pagedlc_engine.errors import ConfigError, EngineClosedError

__all__ = ["EngineBackedLLM"]

logger = logging.getLogger(__name__)

#: Fields of this class that only the constructor's ``**options`` bring in.
_FRAMEWORK_OPTIONS = ("query_wrapper_prompt", "rate_limiter", "sampling_kwargs")


class EngineBackedLLM(StructuredOutputLLM):
    """A LlamaIndex LLM whose answers come from a shared in-process engine; its subclass says how."""

    model: str = Field(description="Name, path or Hugging Face id of the model.", frozen=True)
    temperature: float = Field(description="0 is greedy.")
    tensor_parallel_size: int | None = Field(default=1, description="Devices per engine.", frozen=True)
    trust_remote_code: bool = Field(default=False, description="As in pagedlc.LLM.", frozen=True)
    n: int = Field(default=1, description="Answers per prompt.")
    best_of: int | None = Field(default=None, description="None or the same as n.")
    presence_penalty: float = Field(default=0.0, description="Subtracted once from tokens already generated.")
    frequency_penalty: float = Field(default=0.0, description="Subtracted per occurrence in the answer.")
    top_p: float = Field(default=1.0, description="Probability mass to sample from.")
    top_k: int = Field(default=-1, description="Likeliest tokens to sample from; -1 is all.")
    stop: str | list[str] | None = Field(default=None, description="Strings that end the answer.")
    ignore_eos: bool = Field(default=False, description="Go on after end-of-sequence.")
    max_new_tokens: int | None = Field(default=512, description="Most tokens to generate.")
    logprobs: int | None = Field(default=None, description="Log-probabilities per token to return.")
    dtype: str = Field(default="auto", description="Type of weights and activations.", frozen=True)
    download_dir: str | None = Field(default=None, description="Only None.", frozen=True)
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict, description="All engine options.", frozen=True)
    api_url: str | None = Field(default="", description="Only empty.", frozen=True)
    is_chat_model: bool | None = Field(default=None, description="None: whether there is a chat template.")
    sampling_kwargs: dict[str, Any] = Field(default_factory=dict, description="Further sampling parameters.")
    is_function_calling_model: bool | None = Field(default=None, description="None: whether tools can be rendered.")
    tool_call_format: str | None = Field(default=None, description="None: the one the chat template teaches.")
    reasoning: bool | None = Field(default=None, description="None: thoughts if the chat template speaks of them.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the chat template.")
    conversation_id: str | None = Field(default=None, description="Name of the conversation, for interrupt().")
    barge_in: bool = Field(default=False, description="A new turn interrupts its conversation's running one.")

    _llm: pagedlc.LLM | None = PrivateAttr(default=None)

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2",
        temperature: float = 1.0,
        tensor_parallel_size: int | None = 1,
        trust_remote_code: bool = False,
        n: int = 1,
        best_of: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        top_p: float = 1.0,
        top_k: int = -1,
        stop: str | list[str] | None = None,
        ignore_eos: bool = False,
        max_new_tokens: int | None = 512,
        logprobs: int | None = None,
        dtype: str = "auto",
        download_dir: str | None = None,
        vllm_kwargs: Mapping[str, Any] | None = None,
        api_url: str | None = "",
        callback_manager: CallbackManager | None = None,
        system_prompt: str | None = None,
        messages_to_prompt: Callable[[Sequence[ChatMessage]], str] | None = None,
        completion_to_prompt: Callable[[str], str] | None = None,
        pydantic_program_mode: PydanticProgramMode = PydanticProgramMode.DEFAULT,
        output_parser: BaseOutputParser | None = None,
        is_chat_model: bool | None = None,
        **options: Any,
    ) -> None:
        split = split_options(options, {*_FRAMEWORK_OPTIONS, *type(self).model_fields})
        for name, value in (
            ("tensor_parallel_size", tensor_parallel_size),
            ("download_dir", download_dir),
            ("api_url", api_url),
        ):
            refuse_foreign(name, value)
        engine_options = merge_engine_options(
            split.engine, vllm_kwargs or {}, _chosen(dtype=dtype, trust_remote_code=trust_remote_code)
        )
        arguments = {
            "temperature": temperature,
            "n": n,
            "best_of": best_of,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "top_p": top_p,
            "top_k": top_k,
            "stop": list(stop) if isinstance(stop, tuple) else stop,
            "ignore_eos": ignore_eos,
            "max_new_tokens": max_new_tokens,
            "logprobs": logprobs,
        }
        nested = split.framework.pop("sampling_kwargs", None) or {}
        sampling_kwargs = merge_sampling(_chosen(**arguments), split.sampling, nested)
        sampling = {name: sampling_kwargs.pop(name, value) for name, value in arguments.items()}
        sampling_params({**sampling, **sampling_kwargs})
        fields: dict[str, Any] = dict(
            model=os.fspath(model) if isinstance(model, os.PathLike) else model,
            tensor_parallel_size=tensor_parallel_size,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            download_dir=download_dir,
            vllm_kwargs=engine_options,
            api_url=api_url,
            callback_manager=callback_manager or CallbackManager([]),
            system_prompt=system_prompt,
            messages_to_prompt=messages_to_prompt,
            completion_to_prompt=completion_to_prompt,
            pydantic_program_mode=pydantic_program_mode,
            output_parser=output_parser,
            is_chat_model=is_chat_model,
            sampling_kwargs=sampling_kwargs,
            **sampling,
            **split.framework,
        )
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(validation_message("option", error)) from None
        self._llm = shared_llm(self.model, **self._engine_options())

    # -- the engine --

    @property
    def llm(self) -> pagedlc.LLM:
        """The shared engine behind this object: statistics, prefix cache, token-level access.

        Raises:
            EngineClosedError: After :meth:`close`.
        """
        if self._llm is None:
            raise EngineClosedError("This Vllm was closed; make a new one.")
        return self._llm

    def load(self) -> Self:
        """Load the weights now instead of with the first request."""
        self.llm.load()
        return self

    def close(self) -> None:
        """Let go of the engine. It ends, and frees its memory, when no other object uses it."""
        self._llm = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _engine_options(self) -> dict[str, Any]:
        options = dict(self.vllm_kwargs)
        if self.dtype != "auto":
            options["dtype"] = self.dtype
        if self.trust_remote_code:
            options["trust_remote_code"] = True
        return options

    # -- copying and pickling: the settings travel, the engine is found again --

    def __copy__(self) -> Self:
        return type(self)(**self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return type(self)(**copy.deepcopy(self.__dict__, memo))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with ``update`` applied and validated; it shares the engine if the engine options are the same."""
        values = copy.deepcopy(self.__dict__) if deep else self.__dict__
        return type(self)(**updated_settings(values, update or {}))

    def __getstate__(self) -> dict[str, Any]:
        return {"__dict__": {name: value for name, value in self.__dict__.items() if _can_pickle(name, value)}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["__dict__"])  # type: ignore[misc]


def _chosen(**arguments: Any) -> dict[str, Any]:
    """The constructor's arguments that are not at their default."""
    parameters = inspect.signature(EngineBackedLLM.__init__).parameters
    return {name: value for name, value in arguments.items() if not same(value, parameters[name].default)}


def _can_pickle(name: str, value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        logger.warning("%s of this Vllm cannot be pickled and is left out.", name)
        return False
    return True
