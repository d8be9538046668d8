"""pagedlc beside transformers and llama.cpp on a CPU: the same weights, in one process, in turns.

    python benchmarks/cpu_peers.py [--repeats 3] [--threads 2] [--only decode,prefill,prefix,chat]

Workloads (SmolLM2-135M-Instruct, greedy, end-of-sequence ignored):

- ``decode``: 1 and 8 requests of 64 random prompt tokens, 64 new tokens each; tokens per second of the whole call.
- ``prefill``: one prompt of 1,024 random tokens, one new token; prompt tokens per second.
- ``prefix``: the same after another prompt with the same first 1,024 tokens (plus 16 of its own): time to first
  token, cold and warm; pagedlc only.
- ``chat``: 8 questions on one document of about 1,000 tokens through LangChain, 32 new tokens each: ``VLLMChat.batch``
  beside ``ChatHuggingFace(HuggingFacePipeline)``.

Peers that are not installed are left out and the table says so. Writes ``benchmarks/results/cpu_peers.json`` and
``.png``. Every figure is a median over the repeats; repeats go round the peers, so that drift hits all alike.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from pagedlc import LLM, SamplingParams
from pagedlc.models import resolve_model

RESULTS = Path(__file__).parent / "results"
NEW_TOKENS = 64
PROMPT_TOKENS = 64
PREFILL_TOKENS = 1024
CHAT_TOKENS = 32
QUESTIONS = [
    "Who may use the laboratory?",
    "When is it open?",
    "What does the first rule say?",
    "How are visitors registered?",
    "Who keeps the keys?",
    "What must be worn?",
    "Where are reports kept?",
    "What happens after an accident?",
]


def random_tokens(seed: str, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randint(100, 40_000) for _ in range(count)]


class Peer(Protocol):
    """Something that can complete prompts of token ids, greedily, to an exact length."""

    name: str

    def complete(self, prompts: list[list[int]], new_tokens: int) -> None: ...


class PagedLC:
    """pagedlc; the prefix cache is cleared by prompts that differ, not by a reset."""

    def __init__(self, quantization: str | None) -> None:
        self.name = f"pagedlc {quantization or 'fp32'}"
        self.llm = LLM("smollm2", quantization=quantization).load()

    def complete(self, prompts: list[list[int]], new_tokens: int) -> None:
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        assert all(len(output.outputs[0].token_ids) == new_tokens for output in outputs)


class Transformers:
    """transformers' ``generate`` in float32 on a static batch."""

    name = "transformers fp32"

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        path = resolve_model("smollm2").path
        self.model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()

    def complete(self, prompts: list[list[int]], new_tokens: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        assert out.shape[1] == ids.shape[1] + new_tokens


class LlamaCpp:
    """llama.cpp's Python binding on the same GGUF; it has no batching, so prompts run one after another."""

    name = "llama.cpp Q4_1"

    def __init__(self, threads: int) -> None:
        from llama_cpp import Llama

        path = str(resolve_model("smollm2").path)
        self.model = Llama(path, n_ctx=4096, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)

    def complete(self, prompts: list[list[int]], new_tokens: int) -> None:
        for prompt in prompts:
            self.model.reset()
            tokens = self.model.generate(prompt, temp=0.0, reset=True)
            assert sum(1 for _, _token in zip(range(new_tokens), tokens, strict=False)) == new_tokens


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(peers: list[Peer], repeats: int, work: Callable[[Peer, str], object]) -> dict[str, list[float]]:
    """Seconds per peer: one round that does not count, then ``repeats`` rounds over all peers."""
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for repeat in range(-1, repeats):
        for peer in peers:
            taken = timed(partial(work, peer, f"{peer.name}/{repeat}"))
            if repeat >= 0:
                seconds[peer.name].append(taken)
    return seconds


def bench_decode(peers: list[Peer], repeats: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for batch in (1, 8):

        def work(peer: Peer, seed: str, batch: int = batch) -> None:
            peer.complete([random_tokens(f"{seed}/{row}", PROMPT_TOKENS) for row in range(batch)], NEW_TOKENS)

        for name, seconds in in_turns(peers, repeats, work).items():
            rates = [batch * NEW_TOKENS / taken for taken in seconds]
            figures.setdefault(f"decode, batch {batch} (tokens/s)", {})[name] = rates
    return figures


def bench_prefill(peers: list[Peer], repeats: int) -> dict[str, Any]:
    seconds = in_turns(peers, repeats, lambda peer, seed: peer.complete([random_tokens(seed, PREFILL_TOKENS)], 1))
    rates = {name: [PREFILL_TOKENS / taken for taken in values] for name, values in seconds.items()}
    return {"prefill (tokens/s)": rates}


def bench_prefix(peers: list[Peer], repeats: int) -> dict[str, Any]:
    cold: dict[str, list[float]] = {}
    warm: dict[str, list[float]] = {}
    for peer in (peer for peer in peers if isinstance(peer, PagedLC)):
        for repeat in range(repeats):
            shared = random_tokens(f"prefix/{peer.name}/{repeat}", PREFILL_TOKENS)
            for part, figures in (("cold", cold), ("warm", warm)):
                prompt = shared + random_tokens(f"{part}/{peer.name}/{repeat}", 16)
                taken = timed(partial(peer.complete, [prompt], 1))
                figures.setdefault(peer.name, []).append(taken * 1e3)
    return {"first token, cold 1,040 tokens (ms)": cold, "first token, warm prefix (ms)": warm}


def bench_chat(repeats: int, peer: Transformers | None) -> dict[str, Any]:
    from langchain_core.language_models import BaseChatModel

    from langchain_pagedlc import VLLMChat

    models: dict[str, BaseChatModel] = {
        "pagedlc VLLMChat": VLLMChat(model="smollm2", temperature=0, max_tokens=CHAT_TOKENS).load()
    }
    if peer is not None and importlib.util.find_spec("langchain_huggingface"):
        models["ChatHuggingFace"] = _chat_huggingface(peer)
    figures: dict[str, list[float]] = {name: [] for name in models}
    for repeat in range(repeats):
        document = " ".join(f"Rule {n} of laboratory {repeat}: keep item {n * 7} in room {n % 9}." for n in range(55))
        prompts = [[("system", f"Answer from this document.\n{document}"), ("human", text)] for text in QUESTIONS]
        for name, model in models.items():
            figures[name].append(timed(partial(model.batch, prompts)))
    return {"8 questions on one document, LangChain batch (s)": figures}


def _chat_huggingface(peer: Transformers) -> Any:
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
    from transformers import AutoTokenizer, pipeline

    path = resolve_model("smollm2").path
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    pipe = pipeline(
        "text-generation",
        model=peer.model,
        tokenizer=tokenizer,
        max_new_tokens=CHAT_TOKENS,
        do_sample=False,
        return_full_text=False,
    )
    return ChatHuggingFace(llm=HuggingFacePipeline(pipeline=pipe), tokenizer=tokenizer)


def medians(figures: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    return {title: {name: statistics.median(v) for name, v in row.items()} for title, row in figures.items()}


def print_table(figures: dict[str, dict[str, list[float]]]) -> None:
    for title, row in medians(figures).items():
        print(title)
        for name, value in row.items():
            low, high = min(figures[title][name]), max(figures[title][name])
            print(f"  {name:<22} {value:10.1f}   ({low:.1f} to {high:.1f})")


def save_chart(figures: dict[str, dict[str, list[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = medians(figures)
    fig, axes = plt.subplots(1, len(rows), figsize=(3.2 * len(rows), 3.6), squeeze=False)
    for axis, (title, row) in zip(axes[0], rows.items(), strict=True):
        axis.bar(range(len(row)), list(row.values()), color=[f"C{n}" for n in range(len(row))])
        axis.set_xticks(range(len(row)), list(row), rotation=40, ha="right", fontsize=8)
        axis.set_title(title, fontsize=8)
    fig.tight_layout()
    fig.savefig(path, dpi=130)


def machine() -> dict[str, Any]:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    packages = ("pagedlc", "torch", "transformers", "llama-cpp-python", "langchain-core", "langchain-huggingface")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "cpu": cpu,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="decode,prefill,prefix,chat")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_peers.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    wanted = options.only.split(",")
    transformers_peer = Transformers()
    peers: list[Peer] = [PagedLC("int8"), PagedLC("fp16"), PagedLC(None), transformers_peer]
    if importlib.util.find_spec("llama_cpp"):
        peers.append(LlamaCpp(options.threads))
    figures: dict[str, dict[str, list[float]]] = {}
    if "decode" in wanted:
        figures |= bench_decode(peers, options.repeats)
    if "prefill" in wanted:
        figures |= bench_prefill(peers, options.repeats)
    if "prefix" in wanted:
        figures |= bench_prefix(peers, options.repeats)
    if "chat" in wanted:
        figures |= bench_chat(options.repeats, transformers_peer)
    print(json.dumps(machine(), indent=1))
    print_table(figures)
    options.out.parent.mkdir(exist_ok=True)
    report = {"machine": machine(), "repeats": options.repeats, "medians": medians(figures), "all": figures}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    save_chart(figures, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
