"""``Vllm``: pagedlc's in-process engine as a LlamaIndex LLM."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

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
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.llms.llm import default_completion_to_prompt

from llama_index.llms.pagedlc.callbacks import chat_callback
from llama_index.llms.pagedlc.calls import Call, aanswer, answer, astream, prompt_token_ids, stream
from llama_index.llms.pagedlc.messages import as_chat_messages, to_message_dicts, with_system_prompt
from llama_index.llms.pagedlc.options import TEMPLATE_OPTIONS, TOOL_OPTIONS, interruption, sampling_params, split_call
from llama_index.llms.pagedlc.responses import Answer
from llama_index.llms.pagedlc.settings import EngineBackedLLM
from llama_index.llms.pagedlc.tool_calling import to_tool_dicts
from pagedlc.prefix import PrefixExplanation
from pagedlc_engine.errors import InvalidRequestError

__all__ = ["Vllm"]

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

_TURN_FIELDS = ("chat_template_kwargs", "reasoning", "tool_call_format")
_INTERRUPTION_FIELDS = ("conversation_id", "barge_in")


class Vllm(EngineBackedLLM):
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

    Agents and tools: this is a ``FunctionCallingLLM``. Calls are always of a tool that was given, with arguments that
    match its schema, streamed or not::

        from llama_index.core.agent.workflow import FunctionAgent

        agent = FunctionAgent(tools=[get_weather, add], llm=llm)
        print(await agent.run("What is the weather in Zürich?"))

    Objects of a pydantic class, streamed as they grow: ``structured_predict`` and its variants, and
    ``as_structured_llm``. Thoughts of a reasoning model come as a ``ThinkingBlock``, when streaming also as
    ``additional_kwargs["thinking_delta"]``, and are not in the text.

    Interruption: ``stop_when=lambda text: ...`` watches the answer; ``llm.interrupt(name)`` ends those with that
    ``run_id`` or ``conversation_id``; with ``barge_in=True`` a new turn of a conversation ends the one before. The
    text so far stays, with finish reason ``"interrupted"``, and what was computed stays in the prefix cache.

    A call's keywords override any sampling parameter (``temperature=0``, ``stop=["\\n"]``, ``seed=1`` …);
    ``priority``, ``cache_salt``, ``stop_when``, ``run_id``, ``conversation_id``, ``barge_in`` and (chat)
    ``chat_template_kwargs``, ``reasoning``, ``tools``, ``tool_choice``, ``parallel_tool_calls`` and
    ``tool_call_format`` are passed on.

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
        is_function_calling_model: Whether agents give tools to the model itself; ``None``: if it has a chat template.
        tool_call_format: How the model writes calls, by name; ``None``: as its chat template teaches.
        reasoning: Whether to look for thoughts; ``None``: if the chat template speaks of them.
        chat_template_kwargs: Variables of the chat template, such as ``{"enable_thinking": False}``.
        conversation_id: Name of all calls that bring none, for :meth:`interrupt`.
        barge_in: A new turn interrupts what its conversation is still generating.
        **options: Engine options (``max_model_len``, ``gpu_memory_utilization``, ``quantization`` …), and
            sampling parameters that have no argument above (``repetition_penalty``, ``min_p``, ``seed`` …). The
            engine's own ``seed`` goes into ``vllm_kwargs``.

    Raises:
        ConfigError: An option is unknown (the nearest is suggested), asks for what is not supported, or is
            given twice with different values.
        InvalidRequestError: A sampling value is out of range.
        ModelLoadError: The model is missing, damaged or of an unsupported architecture.
    """

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serializes this class."""
        return "Vllm"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex wants to know about the model; ``context_window`` and ``num_output`` in tokens."""
        window = self.llm.max_model_len
        return LLMMetadata(
            context_window=window,
            num_output=self._reserved(window),
            is_chat_model=self._chats,
            is_function_calling_model=self._calls_tools,
            model_name=self.llm.model_name,
        )

    def interrupt(self, name: str) -> int:
        """End answers within a step; they keep the text they have, with finish reason ``"interrupted"``.

        Works from any thread, also for answers of other objects that share the engine.

        Args:
            name: The ``run_id`` or ``conversation_id`` of a call.

        Returns:
            How many answers there were.
        """
        return self.llm.interrupt(name)

    def explain_prefix(self, prompt: str | Sequence[ChatMessage], **kwargs: Any) -> PrefixExplanation:
        """Say how much of a prompt the prefix cache would serve, and what differs where it stops.

        Args:
            prompt: As for :meth:`complete` or :meth:`chat`.
            kwargs: As for these, such as ``tools``; ``formatted`` with text.
        """
        if isinstance(prompt, str):
            call = self._completion_call(prompt, kwargs.pop("formatted", False), kwargs)
        else:
            call = self._chat_call(prompt, kwargs)
        salt = call.request.get("cache_salt")
        return self.llm.explain_prefix(prompt_token_ids(self.llm, call), cache_salt=salt)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text``, without special tokens around it; for ``Settings.tokenizer``."""
        return list(self.llm.tokenizer.encode(text, add_special_tokens=False))

    # -- the eight ways to ask --

    @chat_callback
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return answer(self.llm, self._chat_call(messages, kwargs)).as_chat()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt; with ``formatted`` the text goes in as it is."""
        return answer(self.llm, self._completion_call(prompt, formatted, kwargs)).as_completion()

    @chat_callback
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation as it is generated; closing the generator ends the request."""
        return stream(self.llm, self._chat_call(messages, kwargs), Answer.as_chat)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a prompt as it is generated; closing the generator ends the request."""
        return stream(self.llm, self._completion_call(prompt, formatted, kwargs), Answer.as_completion)

    @chat_callback
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation; cancelling the task ends the request."""
        return (await aanswer(self.llm, self._chat_call(messages, kwargs))).as_chat()

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt; cancelling the task ends the request."""
        return (await aanswer(self.llm, self._completion_call(prompt, formatted, kwargs))).as_completion()

    @chat_callback
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a conversation as it is generated; closing the generator ends the request."""
        return await astream(self.llm, self._chat_call(messages, kwargs), Answer.as_chat)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Answer a prompt as it is generated; closing the generator ends the request."""
        return await astream(self.llm, self._completion_call(prompt, formatted, kwargs), Answer.as_completion)

    # -- from LlamaIndex's terms to the engine's --

    @property
    def _chats(self) -> bool:
        if self.is_chat_model is None:
            return self.llm.chat_template.available
        return self.is_chat_model

    @property
    def _templated(self) -> bool:
        """Whether conversations go through the chat template."""
        return self._chats and self.messages_to_prompt in (None, generic_messages_to_prompt)

    @property
    def _calls_tools(self) -> bool:
        if self.is_function_calling_model is None:
            return self._templated and self.llm.chat_template.available
        return self.is_function_calling_model

    def _reserved(self, window: int) -> int:
        """Tokens of the context that LlamaIndex keeps free of the prompt, for the answer."""
        wanted = self.max_new_tokens or DEFAULT_NUM_OUTPUTS
        chosen = self.max_new_tokens not in (None, type(self).model_fields["max_new_tokens"].default)
        # The engine reserves nothing: an answer may be as long as the context has room. Only a length that somebody
        # chose, and that fits, is worth more than half of it.
        return wanted if chosen and wanted < window else min(wanted, window // 2)

    def _chat_call(self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]) -> Call:
        conversation = with_system_prompt(as_chat_messages(messages), self.system_prompt)
        if not self._templated:
            return self._call(self._as_text(conversation), kwargs)
        if kwargs.get("tools"):
            kwargs = {**kwargs, "tools": to_tool_dicts(kwargs["tools"])}
        return self._call(to_message_dicts(conversation), kwargs, TEMPLATE_OPTIONS | TOOL_OPTIONS)

    def _as_text(self, conversation: Sequence[ChatMessage]) -> str:
        to_prompt = self.messages_to_prompt or generic_messages_to_prompt
        return to_prompt(conversation)

    def _completion_call(self, prompt: str, formatted: bool, kwargs: Mapping[str, Any]) -> Call:
        if not isinstance(prompt, str):
            kind = type(prompt).__name__
            raise InvalidRequestError(f"A prompt is text here, not {kind}. llm.llm.generate(...) takes token ids, too.")
        if formatted:
            return self._call(prompt, kwargs)
        to_prompt = self.completion_to_prompt
        if to_prompt is not None and (not self._chats or to_prompt is not default_completion_to_prompt):
            return self._call(to_prompt(self._extend_prompt(prompt)), kwargs)
        message = ChatMessage(role=MessageRole.USER, content=prompt)
        messages = to_message_dicts(with_system_prompt([message], self.system_prompt))
        return self._call(messages, kwargs, TEMPLATE_OPTIONS)

    def _call(
        self, prompt: str | list[dict[str, Any]], kwargs: Mapping[str, Any], turn_options: Collection[str] = ()
    ) -> Call:
        split = split_call(kwargs, turn_options)
        sampling = {**self._values(_SAMPLING_FIELDS), **self.sampling_kwargs, **split.sampling}
        turn = {**self._values(_TURN_FIELDS), **split.turn} if turn_options else {}
        cut = interruption(split.interruption, self._values(_INTERRUPTION_FIELDS))
        return Call(prompt, sampling_params(sampling), split.request, turn, cut)

    def _values(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}
