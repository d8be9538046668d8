"""What 64 people who chat through LangChain see.

python -m benchmarks.h200_users MODEL_FOLDER OUT.json [--users 64] [--runs 'caching:astream,threads'] [--options '{}']

Everybody has the same system prompt and a conversation of their own: a question, the streamed answer, the next
question at once. All begin together, with an empty cache. ``VLLMChat`` is used as anybody would use it: by tasks of one
event loop (``astream``; ``ainvoke`` where nobody reads along) or by a thread a person (``stream``, ``invoke``). Weights
are random, answers have set lengths, and one word is one token, so that the consumer can count. Times are the
consumer's: from the call to the first text, and from one piece of text to the next, which holds several tokens when the
consumer lags behind the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from benchmarks.workload_adapter import with_tokenizer
from langchain_pagedlc import VLLMChat

VARIANTS: dict[str, dict[str, Any]] = {
    "caching": {"engine_host": "thread"},
    "no-caching": {"engine_host": "thread", "enable_prefix_caching": False},
    "process": {"engine_host": "process"},
}

RUNS = "caching:astream,astream,threads,threads no-caching:astream,threads process:astream,astream,threads,threads"


@dataclass
class Turn:
    """One answer as its reader saw it: when it was asked for, and every piece's time and number of tokens."""

    number: int
    begin: float
    pieces: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def see(self, chunk: AIMessage) -> str:
        """Take a chunk, or a whole answer, in; returns its text."""
        text = chunk.text
        if count := len(text.split()):
            self.pieces.append((time.perf_counter(), count))
        if usage := chunk.usage_metadata:
            self.prompt_tokens = usage["input_tokens"]
            self.cached_tokens = usage["input_token_details"]["cache_read"]
        return text


@dataclass(frozen=True)
class Workload:
    """Who asks what.

    Args:
        users: Conversations at once.
        turns: Questions of each.
        system_tokens: Length of everybody's system prompt.
        question_tokens: Length of a question.
        answer_tokens: Mean length of an answer; they vary by half of it, so that people do not stay in step.
        vocab_size: Words to write prompts with.
    """

    users: int
    turns: int
    system_tokens: int
    question_tokens: int
    answer_tokens: int
    vocab_size: int

    def words(self, count: int, seed: object) -> str:
        """Random words, the same for the same seed."""
        rng = random.Random(f"{seed}")
        return " ".join(f"t{rng.randrange(10, self.vocab_size)}" for _ in range(count))

    @cached_property
    def system(self) -> SystemMessage:
        """What every conversation starts with; the template adds one token."""
        return SystemMessage(self.words(self.system_tokens - 1, "system"))

    def question(self, user: int, turn: int) -> HumanMessage:
        """What somebody asks."""
        return HumanMessage(self.words(self.question_tokens, f"{user}/{turn}"))

    def length(self, user: int, turn: int) -> int:
        """Tokens of the answer to that."""
        return self.answer_tokens // 2 + random.Random(f"{user}/{turn}").randrange(self.answer_tokens + 1)


def converse(pieces: Pieces, chat: VLLMChat, work: Workload, user: int) -> list[Turn]:
    """One conversation in a thread."""
    messages: list[BaseMessage] = [work.system]
    turns = []
    for number in range(work.turns):
        messages.append(work.question(user, number))
        turn = Turn(number, time.perf_counter())
        answer = pieces(chat, messages, work.length(user, number))
        messages.append(AIMessage("".join([turn.see(piece) for piece in answer])))
        turns.append(turn)
    return turns


async def converse_async(pieces: AsyncPieces, chat: VLLMChat, work: Workload, user: int) -> list[Turn]:
    """One conversation as a task."""
    messages: list[BaseMessage] = [work.system]
    turns = []
    for number in range(work.turns):
        messages.append(work.question(user, number))
        turn = Turn(number, time.perf_counter())
        answer = pieces(chat, messages, work.length(user, number))
        messages.append(AIMessage("".join([turn.see(piece) async for piece in answer])))
        turns.append(turn)
    return turns


#: The pieces of an answer of so many tokens.
Pieces = Callable[[VLLMChat, list[BaseMessage], int], Iterator[AIMessage]]
AsyncPieces = Callable[[VLLMChat, list[BaseMessage], int], AsyncIterator[AIMessage]]


def stream(chat: VLLMChat, messages: list[BaseMessage], length: int) -> Iterator[AIMessage]:
    """As they come."""
    return chat.stream(messages, max_tokens=length)


def invoke(chat: VLLMChat, messages: list[BaseMessage], length: int) -> Iterator[AIMessage]:
    """One, the whole answer."""
    yield chat.invoke(messages, max_tokens=length)


def astream(chat: VLLMChat, messages: list[BaseMessage], length: int) -> AsyncIterator[AIMessage]:
    """:func:`stream` for asyncio."""
    return chat.astream(messages, max_tokens=length)


async def ainvoke(chat: VLLMChat, messages: list[BaseMessage], length: int) -> AsyncIterator[AIMessage]:
    """:func:`invoke` for asyncio."""
    yield await chat.ainvoke(messages, max_tokens=length)


def with_tasks(talk: Callable[..., Awaitable[list[Turn]]], chat: VLLMChat, work: Workload) -> list[Turn]:
    """All conversations on one event loop."""

    async def run() -> list[list[Turn]]:
        return await asyncio.gather(*(talk(chat, work, user) for user in range(work.users)))

    return list(chain.from_iterable(asyncio.run(run())))


def with_threads(talk: Callable[..., list[Turn]], chat: VLLMChat, work: Workload) -> list[Turn]:
    """All conversations in threads of their own."""
    with ThreadPoolExecutor(work.users) as threads:
        return list(chain.from_iterable(threads.map(lambda user: talk(chat, work, user), range(work.users))))


WAYS: dict[str, Callable[[VLLMChat, Workload], list[Turn]]] = {
    "astream": partial(with_tasks, partial(converse_async, astream)),
    "threads": partial(with_threads, partial(converse, stream)),
    "ainvoke": partial(with_tasks, partial(converse_async, ainvoke)),
    "invoke": partial(with_threads, partial(converse, invoke)),
}


@contextmanager
def collections_timed() -> Iterator[list[float]]:
    """Seconds of each pass of Python's garbage collector, in which every thread stands still."""
    passes: list[float] = []
    begin = 0.0

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal begin
        if phase == "start":
            begin = time.perf_counter()
        else:
            passes.append(time.perf_counter() - begin)

    gc.callbacks.append(note)
    try:
        yield passes
    finally:
        gc.callbacks.remove(note)


def measure(chat: VLLMChat, work: Workload, way: str) -> dict[str, Any]:
    """One run from an empty cache."""
    chat.llm.reset_prefix_cache()
    assert work.system.text  # made before the clock starts
    begin, busy = time.perf_counter(), time.process_time()
    with collections_timed() as passes:
        turns = WAYS[way](chat, work)
    wall, busy = time.perf_counter() - begin, time.process_time() - busy
    tokens = sum(count for turn in turns for _, count in turn.pieces)
    wanted = sum(work.length(user, turn) for user in range(work.users) for turn in range(work.turns))
    assert tokens == wanted, f"{tokens} tokens came, {wanted} were asked for"
    return {
        "tokens_per_s": round(tokens / wall),
        "cached_share": round(sum(t.cached_tokens for t in turns) / sum(t.prompt_tokens for t in turns), 4),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "first_text_ms": spread([1e3 * (turn.pieces[0][0] - turn.begin) for turn in turns]),
        "first_text_later_turns_ms": spread([1e3 * (turn.pieces[0][0] - turn.begin) for turn in turns if turn.number]),
        "between_pieces_ms": spread([1e3 * gap for turn in turns for gap in gaps(turn)]),
        "per_token_ms": spread([1e3 * per_token(turn) for turn in turns]),
        "tokens_per_piece": round(tokens / sum(len(turn.pieces) for turn in turns), 2),
        "wall_s": round(wall, 2),
        "busy_cores": round(busy / wall, 2),
        "collector_share": round(sum(passes) / wall, 3),
        "collector_longest_ms": round(1e3 * max(passes, default=0.0), 1),
    }


def gaps(turn: Turn) -> list[float]:
    """Seconds from each piece to the next."""
    times = [at for at, _ in turn.pieces]
    return [later - earlier for earlier, later in pairwise(times)]


def per_token(turn: Turn) -> float:
    """Seconds a token after the first piece."""
    (begin, _), (end, _) = turn.pieces[0], turn.pieces[-1]
    return (end - begin) / max(1, sum(count for _, count in turn.pieces[1:]))


def spread(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and largest; nothing of nothing."""
    if not values:
        return {}
    ordered = sorted(values)
    at = min(len(ordered) - 1, int(0.99 * len(ordered)))
    return {"p50": round(statistics.median(ordered), 2), "p99": round(ordered[at], 2), "max": round(ordered[-1], 2)}


def run_variant(
    arguments: argparse.Namespace, folder: Path, options: dict[str, Any], ways: list[str]
) -> dict[str, Any]:
    """One engine, run after run."""
    settings = {"load_format": "dummy", "max_num_seqs": arguments.users, **json.loads(arguments.options), **options}
    work = Workload(
        arguments.users,
        arguments.turns,
        arguments.system,
        arguments.question,
        arguments.answer,
        json.loads((folder / "config.json").read_text())["vocab_size"],
    )
    begin = time.perf_counter()
    chat = VLLMChat(model=str(folder), temperature=0, ignore_eos=True, engine_options={**settings, "seed": 0})
    chat.load()
    start = time.perf_counter() - begin
    WAYS["astream"](chat, Workload(arguments.users, 1, 64, 16, 16, work.vocab_size))
    runs: dict[str, list[dict[str, Any]]] = {}
    for way in ways:
        runs.setdefault(way, []).append(measure(chat, work, way))
        print(way, runs[way][-1], flush=True)
    chat.close()
    return {"engine_options": settings, "engine_start_s": round(start, 1), "runs": runs}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with a config.json")
    parser.add_argument("out", type=Path)
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--system", type=int, default=2048, help="tokens of the system prompt")
    parser.add_argument("--question", type=int, default=32)
    parser.add_argument("--answer", type=int, default=128, help="mean tokens of an answer")
    parser.add_argument("--runs", default=RUNS, help="engines and what to do with each, in order")
    parser.add_argument("--options", default="{}", help="JSON of further engine options")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s: %(message)s")
    folder = with_tokenizer(arguments.model)
    report: dict[str, Any] = {
        "model": arguments.model.name,
        "command": " ".join(sys.argv),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cpus": os.cpu_count(),
        "variants": {},
    }
    for name, _, ways in (part.partition(":") for part in arguments.runs.split()):
        report["variants"][name] = run_variant(arguments, folder, VARIANTS[name], ways.split(","))
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
