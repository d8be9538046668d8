"""What only a GPU shows: graphs, memory, two engines on one card. ``pytest -m gpu``."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from pagedlc import LLM, SamplingParams
from pagedlc_engine.errors import OutOfMemoryError
from tests.cuda.cuda_engines import answers, make_engine
from tests.engine.tiny_models import make_tiny_model

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny", **SHAPE)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def _card_alone() -> None:
    if os.environ.get("PYTEST_XDIST_WORKER"):
        pytest.skip("compares the card's free memory, which other processes change meanwhile: run without -n")


def make(folder: Path, **options: Any) -> LLM:
    settings = {"load_format": "dummy", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64, "seed": 1}
    return LLM(str(folder), **{**settings, "engine_host": "thread", **options}).load()


def prompts(count: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [(7 * row + 3 * at) % 250 for at in range(10 + 40 * row)]} for row in range(count)]


def tokens(llm: LLM, count: int = 4) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts(count), PARAMS)]


@pytest.mark.parametrize(
    "options",
    [{"enforce_eager": True}, {"enable_prefix_caching": False}, {"max_num_batched_tokens": 16}, {"block_size": 64}],
)
def test_every_way_gives_the_same_answers(folder: Path, options: dict[str, Any]) -> None:
    with make(folder, attention_backend="torch") as plain:
        expected = tokens(plain)
    with make(folder, **options) as llm:
        assert tokens(llm) == expected
        assert tokens(llm) == expected
        assert tokens(llm, 1) == expected[:1]


@pytest.mark.usefixtures("_card_alone")
def test_two_engines_share_a_card_and_give_everything_back(folder: Path) -> None:
    make(folder).close()  # what libraries keep for the process is taken now
    gc.collect()
    torch.cuda.empty_cache()
    before, total = torch.cuda.mem_get_info()
    first = make(folder, gpu_memory_utilization=0.3, max_num_seqs=4096, cudagraph_capture_sizes=(1, 4))
    second = make(folder, gpu_memory_utilization=0.3, max_num_seqs=4096, cudagraph_capture_sizes=(1, 4))
    assert before - torch.cuda.mem_get_info()[0] <= 0.6 * total
    assert tokens(first) == tokens(second)
    first.close()
    second.close()
    gc.collect()
    assert before - torch.cuda.mem_get_info()[0] < 64 << 20


@pytest.mark.usefixtures("_card_alone")
def test_a_process_of_its_own_answers_the_same_and_gives_everything_back(folder: Path) -> None:
    with make(folder) as llm:
        expected = tokens(llm)
    gc.collect()
    torch.cuda.empty_cache()
    before, _total = torch.cuda.mem_get_info()
    llm = make(folder, engine_host="process")
    assert tokens(llm) == expected
    llm.close()
    assert before - torch.cuda.mem_get_info()[0] < 16 << 20


def test_an_engine_starts_while_another_one_generates(folder: Path) -> None:
    options = {"gpu_memory_utilization": 0.3, "num_blocks": 400}
    with make(folder, **options) as first:
        expected = tokens(first)
        stop = threading.Event()
        answers: list[list[list[int]]] = []

        def generate() -> None:
            while not stop.is_set():
                answers.append(tokens(first))

        busy = threading.Thread(target=generate)
        busy.start()
        try:
            with make(folder, **options) as second:
                assert tokens(second) == expected
        finally:
            stop.set()
            busy.join()
        assert answers
        assert all(found == expected for found in answers)


def test_launches_that_overlap_change_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are in the same order with and without, so a token that differs was computed from what was not there yet.
    Prompts beside answers, chains of few rows and of many, and a prefix that is read once for all."""
    shape = {
        "hidden_size": 3200,
        "intermediate_size": 3200,
        "num_attention_heads": 25,
        "num_key_value_heads": 5,
        "max_position_embeddings": 1024,
    }
    beginning = [at * at % 250 for at in range(640)]
    prompts = [[*beginning, row] for row in range(40)] + [[row, 3, 5 * row % 250] for row in range(40)]
    params = [SamplingParams(temperature=0.0, max_tokens=4 + row % 37, ignore_eos=True) for row in range(80)]
    found = []
    for overlaps in (True, False):
        for name, module in list(sys.modules.items()):
            if name.startswith("pagedlc_engine.kernels.") and hasattr(module, "can_overlap") and not overlaps:
                monkeypatch.setattr(module, "can_overlap", lambda: False)
        engine = make_engine(
            tmp_path, torch.device("cuda:0"), run_ahead=3, dtype=torch.bfloat16, num_hidden_layers=3, max_num_seqs=96,
            max_num_batched_tokens=256, block_size=64, num_blocks=400, **shape,
        )  # fmt: skip
        found += [answers(engine, prompts, params) for _ in range(3)]
        engine.runner.close()
    assert all(len(tokens) == 4 + int(name[1:-2]) % 37 for name, tokens in found[0].items())
    assert found[1] == found[2]
    assert found[1] == found[4]
    assert found[0] == found[3]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("engine_host", ["thread", "process"])
def test_an_engine_on_each_card(folder: Path, engine_host: str) -> None:
    """They generate at the same time, each with its memory on its own card, and leave torch's current one alone."""
    options = {"engine_host": engine_host, "num_blocks": 400}
    before = [torch.cuda.mem_get_info(card)[0] for card in (0, 1)]
    with make(folder, device="cuda:1", **options) as second:
        used = [free - torch.cuda.mem_get_info(card)[0] for card, free in enumerate(before)]
        assert used[1] > 64 << 20
        assert engine_host == "thread" or used[0] < 16 << 20
        with make(folder, device="cuda:0", **options) as first, ThreadPoolExecutor(2) as pool:
            expected = tokens(first)
            answers = [pool.submit(tokens, llm) for _ in range(20) for llm in (first, second)]
            assert all(answer.result() == expected for answer in answers)
    assert torch.cuda.current_device() == 0


def test_a_cache_that_does_not_fit_names_the_settings(folder: Path) -> None:
    with pytest.raises(OutOfMemoryError, match="kv_cache_memory_bytes"):
        make(folder, kv_cache_memory_bytes=1 << 50)
