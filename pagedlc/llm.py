"""The LLM class: a model with vLLM's way of being called."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

from pagedlc.batch import RequestBatch
from pagedlc.messages import Messages, conversations, is_conversation
from pagedlc.outputs import CompletionChunk, RequestOutput
from pagedlc.prefix import PrefixExplanation, explain
from pagedlc.prompts import (
    PreparedRequest,
    Prompt,
    are_long,
    as_prompts,
    check_text_length,
    each,
    pair_params,
    prepare,
)
from pagedlc.served_model import ServedModel
from pagedlc_engine.config import check_option_names
from pagedlc_engine.device import kv_block_size
from pagedlc_engine.errors import ConfigError, InvalidRequestError
from pagedlc_engine.request import SamplingParams
from pagedlc_engine.validation import check_request

__all__ = ["LLM", "Messages"]

_Made = TypeVar("_Made")
_TEMPLATE_OPTIONS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class LLM(ServedModel):
    """A language model of this process, or of a child of it, on a paged engine with continuous batching.

    Making one checks everything that can be checked without weights and returns at once; the weights load at
    the first request, or at :meth:`load`. All methods may be called from any number of threads and asyncio
    tasks at once: their requests are batched together.

    Every LLM has an engine of its own, with weights and KV cache: two of one model are in memory twice. Make one and
    hand it around, or let :func:`pagedlc.shared_llm` do so, as the LangChain and LlamaIndex classes do.

    >>> from pagedlc import LLM, SamplingParams
    >>> with LLM("smollm2") as llm:                                                  # doctest: +SKIP
    ...     llm.generate("The sky is", SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].text

    Args:
        model: ``"smollm2"`` (the embedded default), a path (a folder with ``config.json`` and safetensors, or a
            ``.gguf`` file), or a Hugging Face id.
        tokenizer: Another source for the tokenizer: a path or a Hugging Face id.
        chat_template: A Jinja template, or the path of one, in place of the model's own.
        revision: Branch, tag or commit of a Hugging Face id.
        trust_remote_code: Allow Python code that lies beside the tokenizer to run.
        use_tqdm: Show progress bars; ``None`` shows them on a terminal only.
        engine_options: The fields of :class:`pagedlc.EngineConfig`.

    Raises:
        ConfigError: An option is unknown or impossible.
        ModelNotFoundError, UnsupportedModelError, ModelLoadError: The model cannot be used.
    """

    # -- complete a prompt ----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; all of them are in the engine at once.

        Args:
            prompts: One or more of: text, token ids (a list, an array or a tensor), ``{"prompt_token_ids": [...]}``.
            sampling_params: For all prompts, or one for each. ``None``: temperature 1 and up to 512 tokens.
            use_tqdm: Show a progress bar; ``None`` shows one for several prompts on a terminal.
            request_id: Names the request of a single prompt for :meth:`abort`.
            priority: Smaller runs first.
            cache_salt: Share cached prefixes only with requests of the same salt.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidRequestError: A prompt or parameter is invalid; nothing has been generated then.
            PagedLCError: A prompt fails on the way. ``error.outputs`` has the outputs that were finished by then, and
                ``None`` for all other prompts; what was not finished is given up.
        """
        requests = self._prepare(as_prompts(prompts), sampling_params, priority, cache_salt, request_id)
        return self._run(requests, use_tqdm)

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """:meth:`generate` for asyncio; cancelling the task gives the requests up."""
        items = as_prompts(prompts)
        prepare = partial(self._prepare, items, sampling_params, priority, cache_salt)
        return await self._arun(await self._amake(prepare, are_long(items)))

    def generate_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        whole: bool = False,
    ) -> Generator[CompletionChunk, None, None]:
        """Complete one prompt and yield the answer as it comes.

        Closing the generator gives the request up. ``request_id`` names it for :meth:`abort`. With ``whole`` each
        answer comes as one piece, unless a stop string has to be looked for: for callers who can be interrupted, but
        show nothing before the end.
        """
        params = pair_params(sampling_params, 1)[0]
        return self._stream(self._prepare_one(prompt, params, request_id, priority, cache_salt), whole)

    def agenerate_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        whole: bool = False,
    ) -> AsyncGenerator[CompletionChunk, None]:
        """:meth:`generate_stream` for asyncio; cancelling the task, or ``aclose()``, gives the request up."""
        params = pair_params(sampling_params, 1)[0]
        prepare = partial(self._prepare_one, prompt, params, request_id, priority, cache_salt)
        return self._astream(prepare, are_long([prompt]), whole)

    # -- answer a conversation ------------------------------------------------------------------------

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations; all of them are in the engine at once.

        Args:
            messages: One conversation (OpenAI-style dicts), or a list of them.
            sampling_params, use_tqdm, priority, cache_salt: As for :meth:`generate`.
            template_options: ``tools``, ``add_generation_prompt``, ``continue_final_message`` and
                ``chat_template_kwargs``, as for :meth:`render_chat`.

        Raises:
            InvalidRequestError: The model has no chat template, or messages or parameters are invalid.
        """
        prompts = self._render_all(messages, template_options)
        return self._run(self._prepare(prompts, sampling_params, priority, cache_salt), use_tqdm)

    async def achat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """:meth:`chat` for asyncio; cancelling the task gives the requests up."""

        def prepare() -> list[PreparedRequest]:
            prompts = self._render_all(messages, template_options)
            return self._prepare(prompts, sampling_params, priority, cache_salt)

        return await self._arun(await self._amake(prepare, True))

    def chat_stream(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        **template_options: Any,
    ) -> Generator[CompletionChunk, None, None]:
        """Answer one conversation and yield the answer as it comes; see :meth:`generate_stream`."""
        prompt = self._render(messages, template_options)
        return self.generate_stream(
            prompt, sampling_params, request_id=request_id, priority=priority, cache_salt=cache_salt
        )

    def achat_stream(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        **template_options: Any,
    ) -> AsyncGenerator[CompletionChunk, None]:
        """:meth:`chat_stream` for asyncio."""
        params = pair_params(sampling_params, 1)[0]

        def prepare() -> PreparedRequest:
            prompt = self._render(messages, template_options)
            return self._prepare_one(prompt, params, request_id, priority, cache_salt)

        return self._astream(prepare, True)

    def render_chat(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        must_fit: bool = False,
    ) -> list[int]:
        """The prompt's token ids for a conversation.

        Args:
            messages: OpenAI-style dicts with ``role`` and ``content``.
            tools: JSON schemas of tools, for templates that know them.
            add_generation_prompt: End with the opening of the assistant's answer.
            continue_final_message: Leave the last message open, to be continued.
            chat_template_kwargs: Further variables of the template.
            must_fit: Refuse at once, without counting its tokens, what is far too long for ``max_model_len``.

        Raises:
            InvalidRequestError: No chat template, or it refuses the messages.
            PromptTooLongError: With ``must_fit``.
        """
        variables = chat_template_kwargs or {}
        if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
            raise InvalidRequestError(f"chat_template_kwargs is a dict of the template's variables, not {variables!r}.")
        if reserved := {"messages", *_TEMPLATE_OPTIONS} & set(variables):
            raise InvalidRequestError(f"chat_template_kwargs cannot hold {', '.join(sorted(reserved))}.")
        template = self.chat_template
        text = template.render_text(messages, tools, add_generation_prompt, continue_final_message, **variables)
        if must_fit:
            check_text_length(text, self.tokenizer, self.max_model_len, self.model_limit)
        return template.encode(text)

    def _render(self, messages: Messages, options: Mapping[str, Any]) -> list[int]:
        try:
            check_option_names(options, _TEMPLATE_OPTIONS)
        except ConfigError as error:
            raise InvalidRequestError(f"{error} Sampling parameters go into SamplingParams(...).") from None
        return self.render_chat(messages, **options, must_fit=True)

    def _render_all(self, messages: Messages | Sequence[Messages], options: Mapping[str, Any]) -> list[list[int]]:
        return each("Conversation", conversations(messages), lambda item: self._render(item, options))

    # -- control --------------------------------------------------------------------------------------

    def abort(self, request_id: str | Sequence[str]) -> None:
        """Give up a running request, or several: each ends with ``finish_reason="abort"`` and keeps the text it has.

        Raises:
            InvalidRequestError: An id is not a string.
        """
        several = isinstance(request_id, Iterable) and not isinstance(request_id, str)
        request_ids: list[Any] = list(request_id) if several else [request_id]
        if not all(isinstance(item, str) for item in request_ids):
            raise InvalidRequestError(f"A request id is a string; these are not all: {request_ids!r}")
        client = self._client
        if client is not None:
            for item in request_ids:
                client.abort(item)

    def interrupt(self, name: str) -> int:
        """End answers within a step, by the id of their run or conversation; they keep the text they have.

        Returns:
            How many there were.
        """
        return self.running.interrupt(name)

    def explain_prefix(
        self, prompt: Prompt | Messages, *, cache_salt: str | None = None, **template_options: Any
    ) -> PrefixExplanation:
        """Say how much of a prompt the prefix cache would serve now, and where it stops, why.

        Nothing is computed. The comparison is with the latest 64 requests of this LLM.

        Args:
            prompt: A prompt as for :meth:`generate`, or a conversation as for :meth:`chat`.
            cache_salt: The salt the request would have.
            template_options: For conversations, as for :meth:`render_chat`.

        >>> print(llm.explain_prefix(messages))                                      # doctest: +SKIP
        16 of 60 prompt tokens would come from the cache. Token 21 differs from the most similar earlier request:
          earlier: '... Today is Monday ...'
          this:    '... Today is Tuesday ...'
        """
        request = self._prepare_one(
            self._render(prompt, template_options) if is_conversation(prompt) else prompt,
            SamplingParams(),
            None,
            0,
            cache_salt,
        ).request
        client = self._client
        if client is None:
            cached, block_size = 0, kv_block_size(self.config)
        else:
            cached, block_size = client.count_cached_tokens(request), client.block_size
        return explain(request.prompt_token_ids, cache_salt, cached, self._history, self.tokenizer, block_size)

    # -- the way of a request -------------------------------------------------------------------------

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int,
        cache_salt: str | None,
        request_id: str | None = None,
    ) -> list[PreparedRequest]:
        if request_id is not None and len(prompts) != 1:
            raise InvalidRequestError(f"request_id names one request, and there are {len(prompts)} prompts.")
        pairs = list(zip(prompts, pair_params(sampling_params, len(prompts)), strict=True))
        return each("Prompt", pairs, lambda pair: self._prepare_one(*pair, request_id, priority, cache_salt))

    def _prepare_one(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, priority: int, cache_salt: str | None
    ) -> PreparedRequest:
        prepared = prepare(
            prompt,
            params,
            self.tokenizer,
            self.max_model_len,
            model_limit=self.model_limit,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        check_request(prepared.request, self.spec.vocab_size, self.max_model_len, self.model_limit)
        return prepared

    def _run(self, requests: list[PreparedRequest], use_tqdm: bool | None) -> list[RequestOutput]:
        if not requests:
            return []
        batch = RequestBatch(self._ready(), self.tokenizer, self._history, requests, whole=True)
        show = self._use_tqdm if use_tqdm is None else use_tqdm
        show = False if show is None and len(requests) == 1 else show
        try:
            for item in requests:
                self.running.submitted(item.request.request_id)
            # A bar costs time even where it is not shown.
            with nullcontext() if show is False else self._bar(len(requests), "Generating", "prompt", show) as bar:
                while deltas := batch.mailbox.take():
                    finished = batch.read(deltas)
                    if bar is not None:
                        bar.update(finished)
            return batch.results()
        finally:
            batch.close()

    async def _arun(self, requests: list[PreparedRequest]) -> list[RequestOutput]:
        if not requests:
            return []
        batch = RequestBatch(await self._aready(), self.tokenizer, self._history, requests, whole=True)
        try:
            while deltas := await batch.mailbox.take_async():
                batch.read(deltas)
            return batch.results()
        finally:
            batch.close()

    def _stream(self, prepared: PreparedRequest, whole: bool) -> Generator[CompletionChunk, None, None]:
        batch = RequestBatch(self._ready(), self.tokenizer, self._history, [prepared], whole=whole)
        try:
            self.running.submitted(prepared.request.request_id)
            while deltas := batch.mailbox.take():
                yield from batch.chunks(deltas)
        finally:
            batch.close()

    async def _amake(self, make: Callable[[], _Made], is_long: bool) -> _Made:
        """What ``make`` makes of text, in a thread where that takes a while."""
        await self._aread_text_parts()
        return await self.beside.run(make) if is_long else make()

    async def _astream(
        self, prepare: Callable[[], PreparedRequest], is_long: bool, whole: bool = False
    ) -> AsyncGenerator[CompletionChunk, None]:
        prepared = await self._amake(prepare, is_long)
        batch = RequestBatch(await self._aready(), self.tokenizer, self._history, [prepared], whole=whole)
        try:
            self.running.submitted(prepared.request.request_id)
            while deltas := await batch.mailbox.take_async():
                for chunk in batch.chunks(deltas):
                    yield chunk
        finally:
            batch.close()
