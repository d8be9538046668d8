"""``Vllm``: pagedlc's in-process engine as a LlamaIndex LLM."""

from __future__ import annotations

import copy
import logging
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.callbacks import CallbackManager
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM, default_completion_to_prompt
from llama_index.core.types import BaseOutputParser, PydanticProgramMode

import pagedlc
from llama_index.llms.pagedlc.calls import Call, aanswer, answer, astream, stream
from llama_index.llms.pagedlc.messages import to_message_dicts, with_system_prompt
from llama_index.llms.pagedlc.options import (
    merge_engine_options,
    refuse_foreign,
    sampling_params,
    split_call,
    split_options,
)
from llama_index.llms.pagedlc.responses import Answer
from pagedlc.registry import shared_llm
from pagedlc_engine.errors import EngineClosedError

__all__ = ["Vllm"]

logger = logging.getLogger(__name__)

_SAMPLING_FIELDS = (
    "temperature",
    "n",
    "best_of",
    "presence_penalty",
    "frequency_penalty",
    "top_p",
    "top_k",
    "stop",
    "ignore_eos",
    "max_new_tokens",
    "logprobs",
)

#: Fields of this class that only the constructor's ``**options`` bring in.
_FRAMEWORK_OPTIONS = ("query_wrapper_prompt", "rate_limiter", "sampling_kwargs")


class Vllm(LLM):
    """A language model inside your own process, for LlamaIndex.

    Takes the constructor of LlamaIndex's ``Vllm`` (package ``llama-index-llms-vllm``), and engine options and
    further sampling parameters directly as keywords. Making one checks model, options and sampling values and
    takes no time; weights load with the first request or :meth:`load`. Instances for the same model and engine
    options share one engine, its memory and its prefix cache.

    Complete::

        from llama_index.llms.pagedlc import Vllm

        llm = Vllm(model="smollm2", max_new_tokens=64, temperature=0.0)
        print(llm.complete("Name three fruits.").text)

    Chat, streaming::

        from llama_index.core.llms import ChatMessage

        for part in llm.stream_chat([ChatMessage(role="user", content="Tell me about the sea.")]):
            print(part.delta, end="", flush=True)

    Ask documents::

        from llama_index.core import Settings

        Settings.llm = llm
        Settings.tokenizer = llm.tokenize  # so that LlamaIndex counts this model's tokens

    Usage, finish reason and timings are in ``response.additional_kwargs``; ``response.raw`` has them in the
    shape of an OpenAI response, with all ``n`` answers. When streaming, ``logprobs`` are those of the delta.

    A model with a chat template is a chat model: ``complete(prompt)`` sends the prompt as one user message
    through the template, as an instruct model needs. ``complete(prompt, formatted=True)`` sends the text as it
    is. A ``completion_to_prompt`` or ``messages_to_prompt`` of your own replaces the chat template.
    ``system_prompt`` leads every conversation that has no system message.

    A call's keywords override any sampling parameter (``temperature=0``, ``stop=["\\n"]``, ``seed=1`` …);
    ``priority``, ``cache_salt`` and (chat) ``chat_template_kwargs`` are passed on.

    Args:
        model: ``"smollm2"`` (the embedded default), a model folder or ``.gguf`` file, or a Hugging Face id.
        temperature: 0 is greedy.
        tensor_parallel_size: Only 1.
        trust_remote_code: As in ``pagedlc.LLM``.
        n: Answers per prompt; ``text`` is the first, ``raw["choices"]`` has all. Streaming gives one.
        best_of: Only ``None`` or the same as ``n``.
        presence_penalty: Subtracted once from each token already generated.
        frequency_penalty: Subtracted per occurrence in the generated tokens.
        top_p: Keep the smallest set of tokens whose probabilities sum to at least this.
        top_k: Keep the k likeliest tokens; 0 or -1 keeps all.
        stop: Strings that end the answer and are not part of it.
        ignore_eos: Go on after end-of-sequence.
        max_new_tokens: Most tokens to generate; ``None`` goes to the end of the context.
        logprobs: Log-probabilities of the chosen and the k likeliest tokens.
        dtype: Type of weights and activations.
        download_dir: Only ``None``.
        vllm_kwargs: More engine options, the same as giving them as keywords.
        api_url: Only empty: no server is called.
        callback_manager: LlamaIndex callbacks.
        system_prompt: Leads conversations and prompts that bring no system message.
        messages_to_prompt: Turns a conversation into text; ``None`` takes the chat template.
        completion_to_prompt: Turns a prompt into the text that goes in; ``None`` takes the chat template.
        pydantic_program_mode: LlamaIndex's way to structured output.
        output_parser: LlamaIndex output parser.
        is_chat_model: ``None``: whether the model has a chat template.
        **options: Engine options (``max_model_len``, ``gpu_memory_utilization``, ``quantization`` …), and
            sampling parameters that have no argument above (``repetition_penalty``, ``min_p``, ``seed`` …). The
            engine's own ``seed`` goes into ``vllm_kwargs``.

    Raises:
        ConfigError: An option is unknown (the nearest is suggested), or asks for what is not supported.
        InvalidRequestError: A sampling value is out of range.
        ModelLoadError: The model is missing, damaged or of an unsupported architecture.
    """

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
        engine_options = merge_engine_options(split.engine, vllm_kwargs or {})
        sampling = {
            "temperature": temperature,
            "n": n,
            "best_of": best_of,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "top_p": top_p,
            "top_k": top_k,
            "stop": list(stop) if isinstance(stop, tuple) else stop,
            "ignore_eos": ignore_eos,
            "max_new_tokens": split.sampling.pop("max_tokens", max_new_tokens),
            "logprobs": logprobs,
        }
        sampling_kwargs = {**(split.framework.pop("sampling_kwargs", None) or {}), **split.sampling}
        sampling_params({**sampling, **sampling_kwargs})
        fields: dict[str, Any] = dict(
            model=os.fspath(model),
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
        super().__init__(**fields)
        self._llm = shared_llm(self.model, **self._engine_options())

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serializes this class."""
        return "Vllm"

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

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex wants to know about the model; ``context_window`` and ``num_output`` in tokens."""
        return LLMMetadata(
            context_window=self.llm.max_model_len,
            num_output=self.max_new_tokens or DEFAULT_NUM_OUTPUTS,
            is_chat_model=self._chats,
            model_name=self.llm.model_name,
        )

    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text``, without special tokens around it; for ``Settings.tokenizer``."""
        return list(self.llm.tokenizer.encode(text, add_special_tokens=False))

    # -- the eight ways to ask --

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return answer(self.llm, self._chat_call(messages, kwargs)).as_chat()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt; with ``formatted`` the text goes in as it is."""
        return answer(self.llm, self._completion_call(prompt, formatted, kwargs)).as_completion()

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation as it is generated; closing the generator ends the request."""
        return stream(self.llm, self._chat_call(messages, kwargs), Answer.as_chat)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a prompt as it is generated; closing the generator ends the request."""
        return stream(self.llm, self._completion_call(prompt, formatted, kwargs), Answer.as_completion)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation; cancelling the task ends the request."""
        return (await aanswer(self.llm, self._chat_call(messages, kwargs))).as_chat()

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt; cancelling the task ends the request."""
        return (await aanswer(self.llm, self._completion_call(prompt, formatted, kwargs))).as_completion()

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a conversation as it is generated; closing the generator ends the request."""
        return astream(self.llm, self._chat_call(messages, kwargs), Answer.as_chat)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Answer a prompt as it is generated; closing the generator ends the request."""
        return astream(self.llm, self._completion_call(prompt, formatted, kwargs), Answer.as_completion)

    # -- from LlamaIndex's terms to the engine's --

    @property
    def _chats(self) -> bool:
        if self.is_chat_model is None:
            return self.llm.chat_template.available
        return self.is_chat_model

    def _engine_options(self) -> dict[str, Any]:
        options = dict(self.vllm_kwargs)
        if self.dtype != "auto":
            options["dtype"] = self.dtype
        if self.trust_remote_code:
            options["trust_remote_code"] = True
        return options

    def _chat_call(self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]) -> Call:
        checked = [ChatMessage.model_validate(message) for message in messages]
        conversation = with_system_prompt(checked, self.system_prompt)
        to_prompt = self.messages_to_prompt
        if to_prompt is not None and (not self._chats or to_prompt is not generic_messages_to_prompt):
            return self._call(to_prompt(conversation), kwargs)
        return self._call(to_message_dicts(conversation), kwargs)

    def _completion_call(self, prompt: str, formatted: bool, kwargs: Mapping[str, Any]) -> Call:
        if formatted:
            return self._call(prompt, kwargs)
        to_prompt = self.completion_to_prompt
        if to_prompt is not None and (not self._chats or to_prompt is not default_completion_to_prompt):
            return self._call(to_prompt(self._extend_prompt(prompt)), kwargs)
        message = ChatMessage(role=MessageRole.USER, content=prompt)
        return self._call(to_message_dicts(with_system_prompt([message], self.system_prompt)), kwargs)

    def _call(self, prompt: str | list[dict[str, Any]], kwargs: Mapping[str, Any]) -> Call:
        sampling, options = split_call(kwargs, chat=not isinstance(prompt, str))
        own = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        return Call(prompt, sampling_params({**own, **self.sampling_kwargs, **sampling}), options)

    # -- copying and pickling: the settings travel, the engine is found again --

    def __copy__(self) -> Self:
        return type(self)(**self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return type(self)(**copy.deepcopy(self.__dict__, memo))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with ``update`` applied and validated; it shares the engine if the engine options are the same."""
        values = copy.deepcopy(self.__dict__) if deep else self.__dict__
        return type(self)(**{**values, **(update or {})})

    def __getstate__(self) -> dict[str, Any]:
        return {"__dict__": {name: value for name, value in self.__dict__.items() if _can_pickle(name, value)}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["__dict__"])  # type: ignore[misc]


def _can_pickle(name: str, value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        logger.warning("%s of this Vllm cannot be pickled and is left out.", name)
        return False
    return True
