"""SmolLM2 with its real weights on a GPU, against transformers in float32 and against itself.

python -m benchmarks.h200_smollm2 reference REFERENCE.npz          (needs transformers, runs on the CPU)
python -m benchmarks.h200_smollm2 check REFERENCE.npz OUT.json [--model FILE.gguf] [--options '{}']

``reference`` lets transformers read 50 conversations, prompt and greedy answer. ``check`` computes the same tokens in
one go (is the likeliest token the same, how far apart are the log-probabilities) and then answers the prompts in every
way the engine has: cached or not, in chunks, preempted, with graphs and without, in blocks of 16 and of 64 tokens.
Answers may part only where the two likeliest tokens are nearly as likely; the margins are reported.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedlc import LLM, RequestOutput, SamplingParams

SYSTEM = (
    "You are a patient teacher. You explain things in plain words, with one example, and you never write more than "
    "a few sentences. If you do not know something, you say so."
)
TOPICS = (
    *("comets", "bread", "tides", "bees", "glass", "maps", "sleep", "rust", "volcanoes", "chess", "rivers", "magnets"),
    *("clouds", "paper", "bridges", "salt", "owls", "clocks", "rice", "mirrors", "ants", "thunder", "wool", "islands"),
    "coins",
)
FORMS = ("What should a child know about {}?", "Write three sentences about the history of {}.")
ANSWER = 96
#: Where the two likeliest tokens are closer than this, in log-probability, bf16 may choose either.
NEAR = 0.25

VARIANTS: dict[str, dict[str, Any]] = {
    "cached": {},
    "not cached": {"enable_prefix_caching": False},
    "chunks of 48": {"max_num_batched_tokens": 48},
    "preempted": {"num_blocks": 160},
    "without graphs": {"enforce_eager": True},
    "blocks of 64": {"block_size": 64},
}


@dataclass(frozen=True)
class Reference:
    """What transformers said, a row a conversation."""

    tokens: list[np.ndarray]
    prompt_lens: list[int]
    likeliest: list[np.ndarray]
    logprobs: list[np.ndarray]
    margins: list[np.ndarray]

    def save(self, path: Path) -> None:
        """Write a file."""
        lengths = np.array([len(row) for row in self.tokens])
        columns = {name: np.concatenate(getattr(self, name)) for name in ("tokens", "likeliest", "logprobs", "margins")}
        np.savez_compressed(path, lengths=lengths, prompt_lens=np.array(self.prompt_lens), **columns)

    @classmethod
    def load(cls, path: Path) -> Reference:
        """Read it."""
        file = np.load(path)
        ends = np.cumsum(file["lengths"])
        tokens = np.split(file["tokens"], ends[:-1])
        # What follows a token: one entry less than tokens, in every conversation.
        others = [
            np.split(file[name], (ends - np.arange(1, len(ends) + 1))[:-1])
            for name in ("likeliest", "logprobs", "margins")
        ]
        return cls(tokens, file["prompt_lens"].tolist(), *others)


def greedy(**options: Any) -> SamplingParams:
    """As the answers are written."""
    return SamplingParams(temperature=0.0, max_tokens=ANSWER, **options)


def make_reference(path: Path) -> None:
    """Conversations from the CPU engine, read by transformers."""
    from transformers import AutoModelForCausalLM

    with LLM("smollm2", quantization=None, device="cpu") as llm:
        questions = [form.format(topic) for topic in TOPICS for form in FORMS]
        talks = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}] for text in questions]
        prompts = [llm.render_chat(talk) for talk in talks]
        outputs = llm.generate(prompts, greedy())
        file = llm._files.path
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    rows = []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = np.array([*prompt, *output.outputs[0].token_ids], dtype=np.int32)
        with torch.inference_mode():
            scores = model(torch.from_numpy(tokens)[None].long()).logits[0].float().log_softmax(-1)[:-1]
        best = scores.topk(2)
        chosen = scores.gather(1, torch.from_numpy(tokens[1:])[:, None].long())[:, 0]
        rows.append((tokens, best.indices[:, 0].int().numpy(), chosen.numpy(), (best.values @ _LEAD).numpy()))
    reference = Reference(
        [row[0] for row in rows], [len(p) for p in prompts], *([r[i] for r in rows] for i in (1, 2, 3))
    )
    reference.save(path)
    own = [(r[1][n - 1 :] == r[0][n:]).mean() for r, n in zip(rows, reference.prompt_lens, strict=True)]
    print(f"{len(rows)} conversations, {sum(len(r[0]) for r in rows)} tokens; answers greedy in {np.mean(own):.4%}")


_LEAD = torch.tensor([1.0, -1.0])


def teacher_forcing(llm: LLM, reference: Reference) -> dict[str, Any]:
    """The reference's tokens in one go: how often the likeliest token differs, and how far log-probabilities do."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    outputs = llm.generate([row.tolist() for row in reference.tokens], params, use_tqdm=False)
    same, apart, margins = [], [], []
    for row, output in enumerate(outputs):
        entries = (output.prompt_logprobs or [])[1:]
        for place, (token, entry) in enumerate(zip(reference.tokens[row][1:].tolist(), entries, strict=True)):
            assert entry is not None
            likeliest = min(entry, key=lambda item: entry[item].rank)
            same.append(likeliest == reference.likeliest[row][place])
            apart.append(abs(entry[token].logprob - float(reference.logprobs[row][place])))
            if not same[-1]:
                margins.append(float(reference.margins[row][place]))
    return {
        "positions": len(same),
        "same_likeliest": round(float(np.mean(same)), 5),
        "margin_where_not_max": round(max(margins, default=0.0), 4),
        "logprob_apart_mean": round(float(np.mean(apart)), 5),
        "logprob_apart_p99": round(float(np.quantile(apart, 0.99)), 4),
        "logprob_apart_max": round(max(apart), 4),
    }


def answer(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    """All prompts at once."""
    return llm.generate(prompts, greedy(logprobs=2), use_tqdm=False)


def compare(outputs: list[RequestOutput], others: list[list[int]]) -> dict[str, Any]:
    """Answers against other answers to the same prompts, and how close it was where they part."""
    margins = []
    for output, other in zip(outputs, others, strict=True):
        mine = output.outputs[0]
        at = next((at for at, pair in enumerate(zip(mine.token_ids, other, strict=False)) if len(set(pair)) > 1), None)
        if at is not None:
            assert mine.logprobs is not None
            values = sorted((entry.logprob for entry in mine.logprobs[at].values()), reverse=True)
            margins.append(values[0] - values[1])
    same = len(others) - len(margins)
    return {"same": same, "part": len(margins), "margin_max": round(max(margins, default=0.0), 4)}


def check(arguments: argparse.Namespace) -> dict[str, Any]:
    """All variants."""
    reference = Reference.load(arguments.reference)
    lens = reference.prompt_lens
    prompts = [row[:length].tolist() for row, length in zip(reference.tokens, lens, strict=True)]
    texts = [row[length:].tolist() for row, length in zip(reference.tokens, lens, strict=True)]
    report: dict[str, Any] = {"command": " ".join(sys.argv), "torch": torch.__version__, "variants": {}}
    first: list[list[int]] = []
    for name, options in VARIANTS.items():
        begin = time.monotonic()
        # Blocks of 16: the prompts are shorter than a block of 64, and would find nothing in the cache.
        base: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 2048, "block_size": 16, "seed": 0}
        settings = {**base, **json.loads(arguments.options), **options}
        with LLM(arguments.model, **settings).load() as llm:
            start = round(time.monotonic() - begin, 1)
            if not first:
                report["teacher_forcing"] = teacher_forcing(llm, reference)
                print(report["teacher_forcing"], flush=True)
            cold, warm = answer(llm, prompts), answer(llm, prompts)
            stats = llm.stats()
        first = first or [output.outputs[0].token_ids for output in cold]
        report["variants"][name] = {
            "transformers": compare(cold, texts),
            "first_variant": compare(cold, first),
            "second_time": compare(warm, [output.outputs[0].token_ids for output in cold]),
            "preemptions": stats.num_preemptions,
            "cached_share": round(stats.prefix_cache_hit_rate, 3),
            "engine_start_s": start,
        }
        print(name, report["variants"][name], flush=True)
    report["problems"] = problems(report)
    return report


def problems(report: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    forced = report["teacher_forcing"]
    found = [] if forced["same_likeliest"] >= 0.99 else [f"the likeliest token differs too often: {forced}"]
    found += [
        f"{name} parts from {other} by a margin of {figures[other]['margin_max']}"
        for name, figures in report["variants"].items()
        for other in ("transformers", "first_variant", "second_time")
        if figures[other]["margin_max"] > NEAR
    ]
    if not report["variants"]["preempted"]["preemptions"]:
        found.append("nothing was preempted")
    return found


def main() -> int:
    """Make a reference or check against one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("reference", "check"))
    parser.add_argument("reference", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--options", default="{}", help="JSON of further engine options")
    arguments = parser.parse_args()
    if arguments.what == "reference":
        make_reference(arguments.reference)
        return 0
    report = check(arguments)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(report["problems"] or "as it should be")
    return bool(report["problems"])


if __name__ == "__main__":
    sys.exit(main())
