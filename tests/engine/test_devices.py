"""Which GPU an engine computes on, with torch's view of the machine replaced: no GPU is needed here."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model, tiny_llm

from pagedlc import LLM, ConfigError
from pagedlc_engine import engine as engine_module
from pagedlc_engine.config import EngineConfig
from pagedlc_engine.device import place, with_current_gpu
from pagedlc_engine.loop import run_loop
from pagedlc_engine.model import read_spec


class Machine:
    """Two GPUs as torch would show them."""

    def __init__(self) -> None:
        self.current = 0
        self.initialized = True

    def device(self, device: torch.device) -> Any:
        machine = self

        class Context:
            def __enter__(self) -> None:
                self.before, machine.current = machine.current, device.index

            def __exit__(self, *_: object) -> None:
                machine.current = self.before

        return Context()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    replaced = {
        "is_available": lambda: True,
        "is_initialized": lambda: found.initialized,
        "device_count": lambda: 2,
        "current_device": lambda: found.current,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=80 << 30, multi_processor_count=132),
        "device": found.device,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return found


def chosen(folder: Path, device: str) -> torch.device:
    path = make_tiny_model(folder / "tiny")
    return place(
        EngineConfig.create(model=path, device=device, attention_backend="torch"), read_spec(path, "dummy")
    ).device


@pytest.mark.parametrize(("wanted", "device"), [("cuda:1", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")])
@pytest.mark.usefixtures("machine")
def test_a_gpu_can_be_named(tmp_path: Path, wanted: str, device: str) -> None:
    assert chosen(tmp_path, wanted) == torch.device(device)


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_otherwise_it_is_torchs_current_one(tmp_path: Path, machine: Machine, wanted: str) -> None:
    machine.current = 1
    assert chosen(tmp_path, wanted) == torch.device("cuda:1")


@pytest.mark.usefixtures("machine")
def test_a_gpu_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'cuda:0', 'cuda:1'"):
        chosen(tmp_path, "cuda:2")


@pytest.mark.parametrize("wanted", ["gpu", "cuda:", "cuda:x", "cuda:01", "cuda:256", "CUDA", "mps", ""])
def test_other_names_are_refused_at_once(tmp_path: Path, wanted: str) -> None:
    with pytest.raises(ConfigError, match="'cuda:' and the number of a GPU"):
        tiny_llm(tmp_path, device=wanted)


@pytest.mark.parametrize(
    ("gpus", "options", "advice"),
    [
        (0, {"device": "cuda"}, "torch sees no CUDA device; use device='cpu' or 'auto'"),
        (0, {"device": "cuda:1"}, "torch sees no CUDA device"),
        (1, {"device": "cuda:1"}, "torch sees only 'cuda:0'"),
        (0, {"attention_backend": "triton"}, "needs a CUDA device; use 'torch' or 'auto'"),
        (1, {"device": "cpu", "attention_backend": "triton"}, "needs a CUDA device"),
        (1, {"device": "cuda", "quantization": "int8"}, "use quantization='none' here"),
        (0, {"device": "cpu", "quantization": "fp16", "dtype": "bfloat16"}, "needs a CPU with .* and dtype float32"),
    ],
    ids=str,
)
def test_what_this_machine_cannot_do_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, options: dict[str, Any], advice: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    path = make_tiny_model(tmp_path / "tiny")
    with pytest.raises(ConfigError, match=advice):
        LLM(path, load_format="dummy", **options)


def test_a_process_of_its_own_computes_where_this_one_would(tmp_path: Path, machine: Machine) -> None:
    config = EngineConfig.create(model=tmp_path)
    machine.current = 1
    assert with_current_gpu(config).device == "cuda:1"
    assert with_current_gpu(config.model_copy(update={"device": "cuda:0"})).device == "cuda:0"
    assert with_current_gpu(config.model_copy(update={"device": "cpu"})).device == "cpu"
    machine.initialized = False  # nothing here has chosen a GPU, and to ask would take memory on one
    assert with_current_gpu(config).device == "auto"


def test_loading_happens_on_the_engines_gpu(tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def stop(*_: Any) -> None:
        seen.append(machine.current)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_module, "_plain_runner", stop)
    path = make_tiny_model(tmp_path / "tiny")
    config = EngineConfig.create(model=path, device="cuda:1", attention_backend="torch")
    with pytest.raises(KeyboardInterrupt):
        engine_module.build_engine(config, read_spec(path, "dummy"))
    assert seen == [1]
    assert machine.current == 0


def test_steps_and_the_end_happen_on_the_engines_gpu(machine: Machine) -> None:
    seen: list[tuple[str, int]] = []
    work = [True, True, False]

    def step() -> list[Any]:
        seen.append(("step", machine.current))
        work.pop(0)
        return []

    engine = SimpleNamespace(
        runner=SimpleNamespace(device=torch.device("cuda:1")),
        has_work=lambda: work[0],
        step=step,
        stats=lambda: None,
        close=lambda: seen.append(("close", machine.current)),
    )
    run_loop([engine], SimpleQueue(), lambda output: bool(work[0]))  # type: ignore[list-item]
    assert seen == [("step", 1), ("step", 1), ("close", 1)]
    assert machine.current == 0
