"""The GPU path gives what the plain one gives: compiled on a GPU, interpreted elsewhere."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from pagedlc_engine.request import SamplingParams
from tests.cuda.cuda_engines import answers, make_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{seed}/{length}")
    return [rng.randint(0, 255) for _ in range(length)]


@pytest.mark.parametrize("model", [{}, QWEN3])
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_greedy_answers(tmp_path: Path, device: torch.device, model: dict[str, Any], run_ahead: int) -> None:
    prompts = [prompt(length) for length in (1, 5, 17, 40, 90)]
    params = [GREEDY] * len(prompts)
    expected = answers(make_engine(tmp_path, device, plain=True, **model), prompts, params)
    assert answers(make_engine(tmp_path, device, run_ahead=run_ahead, **model), prompts, params) == expected
