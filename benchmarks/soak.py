"""Minutes of random load on one engine, and what must be true of it afterwards.

python -m benchmarks.soak OUT.json [--model MODEL_FOLDER] [--seconds 300] [--options '{}']

Callers come and go: prompts of all lengths, many with a beginning in common, answers short and long, greedy and drawn,
several answers to one prompt, priorities, structured outputs, salts, and callers who leave in three different ways. The
KV cache is too small for them, so that answers are preempted all the time. It fails when

- a request hangs, fails, or ends otherwise than it was asked to;
- blocks, requests or memory are missing in the end;
- an answer given under load is not what the model says: when all is quiet, prompt and answer are computed again in one
  go, without cached blocks, and every token must get the log-probability it had, and if it was chosen greedily be the
  likeliest, up to the precision of the type.

Weights are random (the folder's config, or a tiny model); the tokenizer is made here, a token a byte.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import gc
import json
import random
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pagedlc import LLM, SamplingParams
from pagedlc.outputs import CompletionChunk
from tests.engine.tiny_models import write_byte_tokenizer

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
#: How far log-probabilities may be apart, by type.
TOLERANCES = {"float32": 2e-3, "bfloat16": 0.15, "float16": 0.05}
#: Forms an answer can be held to, and how to see that it was.
FORMS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"choice": ["yes", "no", "perhaps"]}, r"yes|no|perhaps"),
    ({"regex": r"[a-f]{3,9}-[0-9]{2,5}"}, r"[a-f]{3,9}-[0-9]{2,5}"),
    ({"json": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}}, r"(?s)\{.*\}"),
)
#: Tokens the KV cache holds, by callers and scale of lengths: fewer than the callers would need.
SHARE = 0.15
#: A request that takes longer hangs.
PATIENCE = 120.0
#: Bytes by which memory may grow after the first quarter.
GROWTH = 96 << 20


@dataclass
class Job:
    """One request: what is asked, how its caller behaves, and what came."""

    number: int
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    salt: str | None = None
    leaves: str | None = None
    leaves_after: int = 0
    form: str | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)

    def see(self, chunk: CompletionChunk) -> None:
        """Take a chunk in."""
        self.tokens.setdefault(chunk.index, []).extend(chunk.token_ids)
        self.texts[chunk.index] = self.texts.get(chunk.index, "") + chunk.text
        for token, entry in zip(chunk.token_ids, chunk.logprobs or (), strict=False):
            self.logprobs.setdefault(chunk.index, []).append(entry[token].logprob)
        if chunk.finish_reason is not None:
            self.reasons[chunk.index] = chunk.finish_reason

    def problems(self) -> list[str]:
        """What is wrong with how it ended."""
        if self.leaves is not None:
            fine = self.leaves != "abort" or set(self.reasons.values()) <= {"abort", "length", "stop"}
            return [] if fine else [f"request {self.number} was aborted and ended with {self.reasons}"]
        found = []
        for index in range(self.params.n):
            tokens, reason = self.tokens.get(index, []), self.reasons.get(index)
            if self.form is None and (reason != "length" or len(tokens) != self.params.max_tokens):
                found.append(f"answer {self.number}/{index}: {reason} after {len(tokens)} tokens")
            if self.form is not None and reason == "stop" and not re.fullmatch(self.form, self.texts[index]):
                found.append(f"answer {self.number}/{index}: {self.texts[index]!r} has not the form {self.form}")
        return found


class Callers:
    """Makes requests at random, the same for the same seed."""

    def __init__(self, seed: int, longest: int) -> None:
        self._random = random.Random(seed)
        self._longest = longest
        self._number = 0
        self._beginnings = [self._tokens(self._random.randrange(longest // 16, longest // 3)) for _ in range(12)]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(256) for _ in range(count)]

    def next(self) -> Job:
        """The next request."""
        rng = self._random
        self._number += 1
        prompt = self._tokens(1 + int(rng.random() ** 3 * self._longest / 4))
        if rng.random() < 0.6:
            beginning = rng.choice(self._beginnings)
            prompt = beginning[: rng.randrange(1, len(beginning) + 1)] + prompt
        values: dict[str, Any] = {"max_tokens": 1 + int(rng.random() ** 2 * self._longest), "ignore_eos": True}
        values |= {"temperature": 0.0} if rng.random() < 0.5 else {"temperature": 0.9, "seed": self._number}
        values |= {"top_k": 20} if rng.random() < 0.3 else {}
        values |= {"logprobs": 0} if rng.random() < 0.4 else {}
        values |= {"n": rng.randrange(2, 5)} if rng.random() < 0.08 else {}
        job = Job(self._number, prompt, SamplingParams(**values), priority=rng.choice((0, 0, 0, 1, 2)))
        job.salt = "mine" if rng.random() < 0.1 else None
        if rng.random() < 0.04:
            form, job.form = rng.choice(FORMS)
            job.params = SamplingParams(max_tokens=64, temperature=values["temperature"], structured_outputs=form)
        elif rng.random() < 0.2:
            job.leaves = rng.choice(("close", "abort", "cancel"))
            job.leaves_after = rng.randrange(1, 2 + (job.params.max_tokens or 1))
        return job

    def pause(self) -> float:
        """Seconds until a caller calls again."""
        return self._random.random() ** 4 * 0.3


async def carry_out(llm: LLM, job: Job) -> None:
    """One request, as its caller makes it."""
    name = f"soak-{job.number}"
    stream = llm.agenerate_stream(job.prompt, job.params, request_id=name, priority=job.priority, cache_salt=job.salt)
    seen = 0
    async with contextlib.aclosing(stream) as chunks:
        async for chunk in chunks:
            job.see(chunk)
            seen += len(chunk.token_ids)
            if job.leaves is None or seen < job.leaves_after:
                continue
            if job.leaves == "close":
                return
            if job.leaves == "cancel":
                raise asyncio.CancelledError
            llm.abort(name)


@dataclass
class Soak:
    """A run.

    Args:
        llm: Loaded.
        callers: Who comes.
        at_once: Requests on their way at once.
        kept: Answers to look at again in the end.
    """

    llm: LLM
    callers: Callers
    at_once: int
    kept: int
    seed: int = 0
    problems: list[str] = field(default_factory=list)
    spots: list[Job] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    usage: list[float] = field(default_factory=list)
    minutes: list[dict[str, Any]] = field(default_factory=list)

    async def run(self, seconds: float, interval: float) -> None:
        """Load for so many seconds; a line of figures every ``interval``."""
        end = time.monotonic() + seconds
        watching = asyncio.create_task(self._watch(interval))
        await asyncio.gather(*(self._call_until(end) for _ in range(self.at_once)))
        watching.cancel()
        self._note()

    async def _call_until(self, end: float) -> None:
        while time.monotonic() < end and not self.problems:
            job = self.callers.next()
            task = asyncio.create_task(carry_out(self.llm, job))
            done, _ = await asyncio.wait([task], timeout=PATIENCE)
            if not done:
                self.problems.append(f"request {job.number} hangs: {self.llm.stats()}")
                faulthandler.dump_traceback()
                return
            if not task.cancelled() and (error := task.exception()) is not None:
                self.problems.append(f"request {job.number}: {error!r}")
            self._keep(job)
            await asyncio.sleep(self.callers.pause())

    def _keep(self, job: Job) -> None:
        self.problems += job.problems()
        self.counts["requests"] += 1
        self.counts["left early"] += job.leaves is not None
        self.counts["several answers"] += job.params.n > 1
        self.counts["with a form"] += job.form is not None
        if job.logprobs and job.leaves is None:
            self.counts["candidates"] += 1
            at = random.Random(job.number).randrange(self.counts["candidates"])
            if len(self.spots) < self.kept:
                self.spots.append(job)
            elif at < self.kept:
                self.spots[at] = job

    async def _watch(self, interval: float) -> None:
        begin = time.monotonic()
        while True:
            self.usage.append(self.llm.stats().kv_cache_usage)
            await asyncio.sleep(0.05)
            if time.monotonic() - begin > interval * (1 + len(self.minutes)):
                self._note()

    def _note(self) -> None:
        stats = self.llm.stats()
        line = {
            "requests": self.counts["requests"],
            "tokens": stats.generation_tokens,
            "tokens_per_s": round(stats.tokens_per_second),
            "preemptions": stats.num_preemptions,
            "host_mib": resident() >> 20,
            "gpu_mib": torch.cuda.memory_allocated() >> 20 if torch.cuda.is_available() else 0,
            "gpu_reserved_mib": torch.cuda.memory_reserved() >> 20 if torch.cuda.is_available() else 0,
        }
        self.minutes.append(line)
        print(line, flush=True)


def resident() -> int:
    """Bytes of this process in memory."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def settle(llm: LLM) -> list[str]:
    """Wait until nothing runs; what is missing then."""
    deadline = time.monotonic() + 30
    while (stats := llm.stats()).num_running or stats.num_waiting or stats.num_free_blocks != stats.num_blocks:
        if time.monotonic() > deadline:
            return [f"not everything came back: {stats}"]
        time.sleep(0.05)
    unread = llm._ready()._pending
    return [f"{len(unread)} requests are still known to the client"] if unread else []


def growth(minutes: list[dict[str, Any]]) -> list[str]:
    """Whether memory grew after the first quarter."""
    first, last = minutes[len(minutes) // 4], minutes[-1]
    return [
        f"{name} grew from {first[name]} to {last[name]}"
        for name in ("host_mib", "gpu_mib")
        if (last[name] - first[name]) << 20 > GROWTH
    ]


def check_again(llm: LLM, jobs: list[Job], tolerance: float) -> tuple[dict[str, Any], list[str]]:
    """Compute answers again, all at once from the prompt; figures, and what is wrong."""
    pairs = [(job, index) for job in jobs for index in job.tokens]
    prompts = [{"prompt_token_ids": job.prompt + job.tokens[index]} for job, index in pairs]
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    outputs = [output for prompt in prompts for output in llm.generate(prompt, params, use_tqdm=False)]
    apart, behind, problems = [0.0], [0.0], []
    for (job, index), output in zip(pairs, outputs, strict=True):
        rows = (output.prompt_logprobs or [])[len(job.prompt) :]
        tokens = job.tokens[index]
        for place, (row, token, logprob) in enumerate(zip(rows, tokens, job.logprobs[index], strict=True)):
            assert row is not None
            apart.append(abs(row[token].logprob - logprob))
            lead = max(entry.logprob for entry in row.values()) - row[token].logprob
            if job.params.greedy and job.form is None:
                behind.append(lead)
            if apart[-1] > tolerance or behind[-1] > tolerance:
                problems.append(
                    f"token {place} of answer {job.number}/{index}: log-probability {logprob:.4f} under load, "
                    f"{row[token].logprob:.4f} in one go, {lead:.4f} behind the likeliest (greedy: {job.params.greedy})"
                )
                break
    figures = {
        "answers": len(pairs),
        "tokens": len(apart) - 1,
        "logprob_apart_max": round(max(apart), 5),
        "logprob_apart_mean": round(sum(apart) / len(apart), 6),
        "greedy_behind_max": round(max(behind), 5),
        "tolerance": tolerance,
    }
    return figures, problems


def repeat(llm: LLM, jobs: list[Job]) -> dict[str, int]:
    """Ask the same again, one by one on the idle engine: how many answers are the same to the last token."""
    figures = {"asked": 0, "same": 0}
    for job in jobs:
        if job.form is None and (job.params.greedy or job.params.seed is not None):
            output = llm.generate({"prompt_token_ids": job.prompt}, job.params, use_tqdm=False)[0]
            figures["asked"] += len(output.outputs)
            figures["same"] += sum(answer.token_ids == job.tokens[answer.index] for answer in output.outputs)
    return figures


def folder_for(config: dict[str, Any]) -> Path:
    """A model folder with a tokenizer of a token a byte."""
    folder = Path(tempfile.mkdtemp(prefix="pagedlc-soak-"))
    (folder / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(folder)
    return folder


def soak(config: dict[str, Any], options: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, on one engine."""
    longest = arguments.longest
    block_size = options.get("block_size", 16)
    settings = {
        "load_format": "dummy",
        # Where its memory on the GPU can be seen from here.
        "engine_host": "thread",
        "max_model_len": longest * 2,
        "max_num_seqs": arguments.at_once,
        "block_size": block_size,
        "num_blocks": max(int(SHARE * arguments.at_once * longest), longest * 2) // block_size + 1,
        "seed": 0,
        **options,
    }
    with LLM(str(folder_for({**config, "eos_token_id": 257})), **settings).load() as llm:
        run = Soak(llm, Callers(arguments.seed, longest), arguments.at_once, arguments.spots)
        asyncio.run(run.run(arguments.seconds, arguments.interval))
        gc.collect()
        dtype = settings.get("dtype") or ("bfloat16" if torch.cuda.is_available() else "float32")
        problems = run.problems + settle(llm) + growth(run.minutes)
        stats = llm.stats()
        figures, wrong = check_again(llm, run.spots, TOLERANCES[dtype])
        again = repeat(llm, run.spots[: arguments.spots // 4])
        problems += wrong + settle(llm)
    late = sorted(run.usage[len(run.usage) // 10 :])
    return {
        "engine_options": settings,
        "counts": dict(run.counts),
        "kv_usage": {"median": round(late[len(late) // 2], 3), "over_95_percent": share_over(late, 0.95)},
        "preemptions": run.minutes[-1]["preemptions"],
        "cached_share": round(stats.prefix_cache_hit_rate, 3),
        "minutes": run.minutes,
        "checked_again": figures,
        "asked_again_when_idle": again,
        "problems": problems[:20],
    }


def share_over(values: list[float], bound: float) -> float:
    """Fraction of values above a bound."""
    return round(sum(value > bound for value in values) / max(1, len(values)), 3)


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Run, write, and say what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="folder with a config.json; without, a tiny model")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--interval", type=float, default=60, help="seconds between lines of figures")
    parser.add_argument("--at-once", type=int, default=64, help="callers")
    parser.add_argument("--longest", type=int, default=768, help="scale of prompts and answers in tokens")
    parser.add_argument("--spots", type=int, default=200, help="answers to compute again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", default="{}", help="JSON of further engine options")
    arguments = parser.parse_args(given)
    faulthandler.enable()
    config = json.loads((arguments.model / "config.json").read_text()) if arguments.model else TINY
    report = {"command": " ".join(sys.argv), "torch": torch.__version__}
    report |= soak(config, json.loads(arguments.options), arguments)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: value for key, value in report.items() if key != "minutes"}, indent=1))
    return report


if __name__ == "__main__":
    sys.exit(1 if main()["problems"] else 0)
