"""One turn of a conversation: what goes into the engine, and how what comes out is read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pagedlc.messages import normalize_messages
from pagedlc.outputs import CompletionChunk
from pagedlc.reasoning import ReasoningSplitter, ReasoningTags, find_reasoning_tags
from pagedlc.tools.events import AnswerEvent, ChatMessage
from pagedlc.tools.form import formed_answer
from pagedlc.tools.formats import RenderInput, ToolCallFormat, choose_format
from pagedlc.tools.grammar import CallGrammar
from pagedlc.tools.history import link_results
from pagedlc.tools.parser import CallParser, PlainParser
from pagedlc.tools.reader import MessageReader
from pagedlc.tools.spec import ChoiceArgument, ToolChoice, ToolSpec, resolve_choice, tool_specs
from pagedlc.tools.stops import TextStops
from pagedlc_engine.request import SamplingParams

if TYPE_CHECKING:
    from pagedlc.llm import LLM

__all__ = ["ChatTurn", "TurnDelta"]

#: So many tokens at the end of a prompt are enough to see whether it opens the model's thoughts.
_TAIL = 16


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """A piece of a streamed answer.

    Args:
        chunk: The engine's side: tokens, usage, timings. Its ``text`` is raw.
        events: What is new in the message.
        message: The message so far.
    """

    chunk: CompletionChunk
    events: list[AnswerEvent]
    message: ChatMessage


class ChatTurn:
    """The next answer in a conversation, with tools or without, with reasoning or without.

    >>> turn = ChatTurn(llm, messages, tools, tool_choice="auto")          # doctest: +SKIP
    >>> for delta in turn.stream(SamplingParams(max_tokens=256)):
    ...     print(delta.events)

    The parts can also be used one by one: :attr:`prompt_token_ids`, :meth:`sampling_params` and :meth:`reader`.

    Args:
        llm: The model.
        messages: OpenAI-style messages; see :func:`pagedlc.messages.normalize_messages`. Results of tools are
            messages with ``role="tool"`` and ``tool_call_id``, and ``status="error"`` if the tool failed.
        tools: OpenAI-style tools.
        tool_choice: ``"auto"`` (the default), ``"required"`` or ``"any"``, ``"none"``, or a tool's name. With
            ``"none"`` the tools stay in the prompt, which keeps its cached beginning, but are not called.
        parallel_tool_calls: Whether one answer may have several calls; ``None``: as the format's models do, and one
            call where ``tool_choice`` names a tool.
        tool_call_format: A format or its name, in place of the one that the chat template teaches.
        reasoning: Whether to look for thoughts; ``None``: if the chat template speaks of them.
        add_generation_prompt, continue_final_message, chat_template_kwargs: As for :meth:`pagedlc.LLM.render_chat`.
        must_fit: Refuse a conversation that is far too long at once. Without, it can be counted.

    Raises:
        InvalidRequestError: Messages, tools or choice are invalid, or the model has no chat template.
    """

    def __init__(
        self,
        llm: LLM,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any] | ToolSpec] | None = None,
        *,
        tool_choice: ChoiceArgument = None,
        parallel_tool_calls: bool | None = None,
        tool_call_format: str | ToolCallFormat | None = None,
        reasoning: bool | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        must_fit: bool = True,
    ) -> None:
        self._llm = llm
        self.tools: list[ToolSpec] = tool_specs(tools)
        self.choice: ToolChoice = resolve_choice(tool_choice, self.tools)
        template = llm.chat_template.source(with_tools=bool(self.tools))
        self.format: ToolCallFormat = choose_format(template, tool_call_format)
        own_way = self.format.parallel and not self.choice.named
        self._parallel = own_way if parallel_tool_calls is None else parallel_tool_calls
        prepared = self._prepare(messages)
        self.prompt_token_ids: list[int] = llm.render_chat(
            prepared.messages,
            prepared.tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            must_fit=must_fit,
        )
        self._tags = _tags(template, reasoning)
        self._thinking = self._tags is not None and self._prompt_ends_with(self._tags.opening)
        self._thought = self._tags is not None and self._prompt_ends_with(self._tags.closing)

    def _prepare(self, messages: Sequence[Mapping[str, Any]]) -> RenderInput:
        linked = link_results(normalize_messages(messages))
        return self.format.prepare(linked, self.tools) if self.tools else self.format.prepare_plain(linked)

    def _prompt_ends_with(self, text: str) -> bool:
        tail = self._llm.tokenizer.decode(self.prompt_token_ids[-_TAIL:], skip_special_tokens=False)
        return tail.rstrip().endswith(text)

    @property
    def grammar(self) -> CallGrammar | None:
        """What the answer may be; ``None``: anything."""
        if not self.choice.active:
            return None
        grammar = self.format.grammar(self.choice, self._parallel)
        if self._tags is None or self._thought:
            return grammar
        return replace(
            grammar,
            thinking_open="" if self._thinking else self._tags.opening,
            thinking_close=self._tags.closing,
        )

    def sampling_params(self, params: SamplingParams) -> SamplingParams:
        """The caller's parameters, with what this turn needs: the grammar, and special tokens that mark calls or
        thoughts left in the text. Stop strings are taken out where there may be calls: the reader looks for them, in
        text only. ``structured_outputs`` of the caller is the form of the text: of what follows the thoughts, and, with
        tools, of an answer that calls none.
        """
        changes: dict[str, Any] = {}
        if any(self._is_special(marker) for marker in self._markers()):
            changes["skip_special_tokens"] = False
        grammar = self.grammar
        if params.structured_outputs is not None:
            closing = self._tags.closing if self._thinking and self._tags is not None else None
            required = self.choice.mode == "required"
            changes["structured_outputs"] = formed_answer(params.structured_outputs, grammar, required, closing)
        elif grammar is not None:
            changes["structured_outputs"] = grammar.to_structured_outputs()
        if grammar is not None:
            changes["stop"] = ()
        return params.replace(**changes) if changes else params

    def _markers(self) -> tuple[str, ...]:
        tags = () if self._tags is None else (self._tags.opening, self._tags.closing)
        return (*tags, *self.format.markers) if self.choice.active else tags

    def _is_special(self, text: str) -> bool:
        tokenizer = self._llm.tokenizer
        return tokenizer.backend.token_to_id(text) in tokenizer.special_token_ids

    def reader(self, params: SamplingParams | None = None) -> MessageReader:
        """A reader for one answer; each of ``n`` answers needs its own.

        Args:
            params: The caller's parameters, as given to :meth:`sampling_params`.
        """
        stops = params.stop if params is not None and self.choice.active else ()
        parser: CallParser = PlainParser()
        if self.choice.active:
            parser = self.format.parser([tool.name for tool in self.choice.tools])
        return MessageReader(
            ReasoningSplitter(self._tags, self._thinking),
            parser,
            TextStops(stops, params is not None and params.include_stop_str_in_output),
            params.min_tokens if params is not None else 0,
        )

    def stream(
        self, params: SamplingParams, *, whole: bool = False, **request_options: Any
    ) -> Generator[TurnDelta, None, None]:
        """Answer, piece by piece. Closing the generator gives the request up.

        Args:
            params: The caller's parameters.
            whole: Nobody looks at the pieces, so each answer may come as one, which takes less of everything.
            request_options: ``request_id``, ``priority``, ``cache_salt``, as for :meth:`pagedlc.LLM.generate_stream`.
        """
        readers = [self.reader(params) for _ in range(params.n)]
        stream = self._llm.generate_stream(
            self.prompt_token_ids, self.sampling_params(params), whole=whole and not params.stop, **request_options
        )
        with closing(stream) as chunks:
            for chunk in chunks:
                if (delta := _read(readers, chunk)) is not None:
                    yield delta
                if all(reader.finished for reader in readers):
                    return

    async def astream(
        self, params: SamplingParams, *, whole: bool = False, **request_options: Any
    ) -> AsyncGenerator[TurnDelta, None]:
        """:meth:`stream` for asyncio; cancelling the task gives the request up."""
        readers = [self.reader(params) for _ in range(params.n)]
        stream = self._llm.agenerate_stream(
            self.prompt_token_ids, self.sampling_params(params), whole=whole and not params.stop, **request_options
        )
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                if (delta := _read(readers, chunk)) is not None:
                    yield delta
                if all(reader.finished for reader in readers):
                    return


def _read(readers: Sequence[MessageReader], chunk: CompletionChunk) -> TurnDelta | None:
    reader = readers[chunk.index]
    if reader.finished:
        return None
    return TurnDelta(chunk, reader.read(chunk), reader.message)


def _tags(template: str, reasoning: bool | None) -> ReasoningTags | None:
    if reasoning is False:
        return None
    return find_reasoning_tags(template) or (ReasoningTags("<think>", "</think>") if reasoning else None)
