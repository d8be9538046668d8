"""A stand-in for ``pagedlc.LLM``: scripted answers, and a record of who asked for what, when and with whom."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedlc import SamplingParams
from pagedlc.beside import Beside
from pagedlc.interruption import RunningAnswers
from pagedlc.outputs import CompletionChunk, CompletionOutput, RequestOutput, Timings
from pagedlc_engine.config import EngineConfig
from pagedlc_engine.errors import InvalidRequestError, ModelNotFoundError
from pagedlc_engine.request import Logprob, TokenLogprobs

TIMINGS = Timings(queue_time=0.1, time_to_first_token=0.2, time_per_output_token=0.3, total_time=0.5)
CACHED_TOKENS = 4
WAIT = 60.0
LLM_OPTIONS = ("tokenizer", "chat_template", "revision", "trust_remote_code", "use_tqdm")


class FakeTokenizer:
    """One token per character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(char) for char in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))

    def token_text(self, token_id: int) -> str:
        return chr(token_id)


class FakeChatTemplate:
    """Knows neither tools nor thoughts."""

    def source(self, *, with_tools: bool = False) -> str:
        return "{{ messages }}"


@dataclass
class Call:
    method: str
    prompt: Any
    params: SamplingParams
    options: dict[str, Any]


@dataclass
class FakeEngine:
    """What holders of the same model and options share.

    ``company`` makes every request wait until that many run at once; ``"fail"`` in a prompt fails the request;
    ``endless`` never finishes an answer.
    """

    answer: str = "Hello"
    company: int = 1
    endless: bool = False
    calls: list[Call] = field(default_factory=list)
    conversations: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    running: int = 0
    most_running: int = 0
    alive: bool = True
    loads: int = 0
    lock: threading.Condition = field(default_factory=threading.Condition)

    def enter(self, count: int) -> None:
        with self.lock:
            self.threads.add(threading.get_ident())
            self.running += count
            self.most_running = max(self.most_running, self.running)
            self.lock.notify_all()

    def leave(self, count: int) -> None:
        with self.lock:
            self.running -= count

    def wait_for_company(self) -> None:
        with self.lock:
            assert self.lock.wait_for(lambda: self.most_running >= self.company, WAIT), "never that many at once"

    async def wait_for_company_async(self) -> None:
        await eventually(lambda: self.most_running >= self.company)


class FakeLLM:
    """The front of a :class:`FakeEngine`, with the methods of ``pagedlc.LLM``."""

    max_model_len = 4096

    def __init__(self, engine: FakeEngine, model: str) -> None:
        self.engine = engine
        self.model_name = model
        self.tokenizer = FakeTokenizer()
        self.chat_template = FakeChatTemplate()
        self.running = RunningAnswers()
        self.beside = Beside()

    def load(self) -> FakeLLM:
        self.engine.loads += 1
        return self

    def __del__(self) -> None:
        self.engine.alive = False

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Any = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        must_fit: bool = False,
    ) -> list[int]:
        assert not tools
        assert add_generation_prompt
        assert not continue_final_message
        text = _flat(messages)
        self.engine.conversations[text] = messages, chat_template_kwargs
        return self.tokenizer.encode(text, add_special_tokens=False)

    def abort(self, request_id: str) -> None:
        self.engine.aborted.append(request_id)

    def interrupt(self, name: str) -> int:
        return self.running.interrupt(name)

    def generate(self, prompts: Any, params: SamplingParams, **options: Any) -> list[RequestOutput]:
        return self._all("generate", _listed(prompts), params, options)

    async def agenerate(self, prompts: Any, params: SamplingParams, **options: Any) -> list[RequestOutput]:
        return await self._all_async("agenerate", _listed(prompts), params, options)

    def generate_stream(self, prompt: str, params: SamplingParams, **options: Any) -> Iterator[CompletionChunk]:
        return self._pieces("generate_stream", prompt, params, options)

    def agenerate_stream(self, prompt: str, params: SamplingParams, **options: Any) -> AsyncIterator[CompletionChunk]:
        return self._pieces_async("agenerate_stream", prompt, params, options)

    def _note(self, method: str, prompts: list[Any], params: SamplingParams, options: dict[str, Any]) -> None:
        """Prompts that were rendered are recorded as the conversations they came from."""
        assert not options.keys() - {"priority", "cache_salt", "request_id", "whole"}
        noted = dict(options)
        for position, prompt in enumerate(prompts):
            if _flat(prompt) in self.engine.conversations:
                prompts[position], noted["chat_template_kwargs"] = self.engine.conversations[_flat(prompt)]
        self.engine.calls.append(Call(method, prompts, params, noted))

    def _all(self, method: str, prompts: list[Any], params: SamplingParams, options: Any) -> list[RequestOutput]:
        self._note(method, prompts, params, options)
        self.engine.enter(len(prompts))
        try:
            self.engine.wait_for_company()
            return [_output(self.engine.answer, prompt, params) for prompt in prompts]
        finally:
            self.engine.leave(len(prompts))

    async def _all_async(
        self, method: str, prompts: list[Any], params: SamplingParams, options: Any
    ) -> list[RequestOutput]:
        self._note(method, prompts, params, options)
        self.engine.enter(len(prompts))
        try:
            await self.engine.wait_for_company_async()
            if self.engine.endless:
                await asyncio.Event().wait()
            return [_output(self.engine.answer, prompt, params) for prompt in prompts]
        except asyncio.CancelledError:
            self.engine.aborted.append(method)
            raise
        finally:
            self.engine.leave(len(prompts))

    def _pieces(self, method: str, prompt: Any, params: SamplingParams, options: Any) -> Iterator[CompletionChunk]:
        self._note(method, [prompt], params, options)
        self.engine.enter(1)
        open_answers = params.n
        try:
            self.engine.wait_for_company()
            for chunk in _chunks(self.engine.answer, prompt, params, self.engine.endless):
                open_answers -= chunk.finish_reason is not None
                yield chunk
        finally:
            self.engine.leave(1)
            if open_answers:
                self.engine.aborted.append(method)

    async def _pieces_async(
        self, method: str, prompt: Any, params: SamplingParams, options: Any
    ) -> AsyncIterator[CompletionChunk]:
        self._note(method, [prompt], params, options)
        self.engine.enter(1)
        open_answers = params.n
        try:
            await self.engine.wait_for_company_async()
            for chunk in _chunks(self.engine.answer, prompt, params, self.engine.endless):
                await asyncio.sleep(0)
                open_answers -= chunk.finish_reason is not None
                yield chunk
        finally:
            self.engine.leave(1)
            if open_answers:
                self.engine.aborted.append(method)


class FakeRegistry:
    """The same engine for the same model and options while anyone holds it, as ``pagedlc.registry``."""

    def __init__(self) -> None:
        self.engines: dict[tuple[str, str], FakeEngine] = {}
        self._llms: weakref.WeakValueDictionary[tuple[str, str], FakeLLM] = weakref.WeakValueDictionary()

    def shared_llm(self, model: str, **options: Any) -> FakeLLM:
        if model == "missing":
            raise ModelNotFoundError("There is no model 'missing'.")
        engine_options = {name: value for name, value in options.items() if name not in LLM_OPTIONS}
        EngineConfig.create(model=model, **engine_options)
        key = (model, repr(sorted(options.items())))
        if key not in self._llms:
            self.engines[key] = FakeEngine()
            llm = self._llms[key] = FakeLLM(self.engines[key], model)
            return llm
        return self._llms[key]

    @property
    def engine(self) -> FakeEngine:
        (engine,) = self.engines.values()
        return engine


async def eventually(condition: Callable[[], object]) -> None:
    """Lets the loop run until ``condition`` holds."""
    async with asyncio.timeout(WAIT):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def _listed(prompts: Any) -> list[Any]:
    return prompts if isinstance(prompts, list) else [prompts]


def _flat(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt[0], int):
        return "".join(map(chr, prompt))
    return "".join(f"{message['role']}:{message['content']}\n" for message in prompt)


def _check(prompt: Any) -> None:
    if "fail" in _flat(prompt):
        raise InvalidRequestError("This request was bound to fail.")


def _output(answer: str, prompt: Any, params: SamplingParams) -> RequestOutput:
    _check(prompt)
    return RequestOutput(
        request_id="r-1",
        prompt=None,
        prompt_token_ids=[ord(char) for char in _flat(prompt)],
        prompt_logprobs=None,
        outputs=[
            CompletionOutput(
                index=index,
                text=answer,
                token_ids=[ord(char) for char in answer],
                logprobs=None if params.logprobs is None else [_logprobs(char, params.logprobs) for char in answer],
                finish_reason="stop",
            )
            for index in range(params.n)
        ],
        finished=True,
        num_cached_tokens=CACHED_TOKENS,
        timings=TIMINGS,
    )


def _chunks(answer: str, prompt: Any, params: SamplingParams, endless: bool) -> Iterator[CompletionChunk]:
    """For each answer a chunk per character; the first character is held back and comes with the second."""
    _check(prompt)
    for index in range(params.n):
        texts = itertools.chain(["", answer[:2]], itertools.cycle(answer) if endless else answer[2:])
        for count, text in enumerate(texts, start=1):
            last = not endless and count == len(answer)
            yield CompletionChunk(
                request_id="r-1",
                index=index,
                text=text,
                token_ids=[ord(char) for char in text[-1:] or answer[0]],
                logprobs=None if params.logprobs is None else [_logprobs(text[-1:] or answer[0], params.logprobs)],
                finish_reason="stop" if last else None,
                stop_reason=None,
                num_prompt_tokens=len(_flat(prompt)),
                num_cached_tokens=CACHED_TOKENS,
                num_generated_tokens=count,
                timings=TIMINGS,
            )


def _logprobs(char: str, top: int) -> TokenLogprobs:
    """The chosen token is the second likeliest."""
    likeliest = {ord("?"): Logprob(-0.25, 1)} if top else {}
    return {ord(char): Logprob(-1.5, 2), **likeliest}
