"""Products with few rows against float64, with everything that is fused into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from pagedlc_engine.kernels.few_rows import RowsConfig, few_rows_linear, few_rows_linear_reference
from pagedlc_engine.kernels.held_rows import can_hold, held_linear
from pagedlc_engine.kernels.launch import Card
from pagedlc_engine.kernels.streamed_rows import SplitSums, StreamConfig, choose_stream_config
from tests.kernels.support import relative_error


def check(
    rows: int,
    size: int,
    depth: int,
    dtype: torch.dtype,
    device: torch.device,
    tolerance: float,
    product: Callable[..., torch.Tensor] = few_rows_linear,
    **options: Any,
) -> None:
    """``options`` name what to fuse; tensors for them are made here."""
    height = size * (2 if options.get("gated") else 1)
    numbers = {
        name: torch.randn(shape, device=device).to(dtype)
        for name, shape in {"gain": (depth,), "bias": (height,), "residual": (rows, size)}.items()
        if options.pop(name, False)
    }
    x = torch.randn(rows, depth, device=device).to(dtype)
    weight = (torch.randn(height, depth, device=device) / depth**0.5).to(dtype)
    expected = few_rows_linear_reference(x, weight, gated=options.get("gated", False), **numbers)
    if "residual" in numbers:
        out = numbers["residual"]
    else:
        out = torch.full((rows, size), float("nan"), dtype=dtype, device=device)
    product(x, weight, out=out, **numbers, **options)
    assert relative_error(out, expected) <= tolerance


FUSED: list[dict[str, Any]] = [{}, {"residual": True}, {"gated": True, "bias": True}]


@pytest.mark.parametrize("depth", [576, 1536])
@pytest.mark.parametrize("fused", [*FUSED, {"gain": True}, {"gain": True, "gated": True}])
def test_one_row(device: torch.device, depth: int, fused: dict[str, Any]) -> None:
    check(1, 40, depth, torch.float32, device, 1e-5, **fused)


@pytest.mark.parametrize("rows", [2, 16])
@pytest.mark.parametrize("fused", FUSED)
def test_several_rows(device: torch.device, rows: int, fused: dict[str, Any]) -> None:
    check(rows, 80, 192, torch.float32, device, 1e-5, **fused)


@pytest.mark.parametrize(("rows", "size", "depth"), [(5, 80, 190), (17, 130, 320), (40, 72, 192), (150, 136, 96)])
@pytest.mark.parametrize("fused", FUSED)
def test_many_rows(device: torch.device, rows: int, size: int, depth: int, fused: dict[str, Any]) -> None:
    """Of the depths 190 is one that the bulk copy engine does not take."""
    for split_sums in (None, SplitSums(device)):
        check(rows, size, depth, torch.float32, device, 1e-5, split_sums=split_sums, **fused)


@pytest.mark.parametrize(("rows", "size", "depth"), [(2, 40, 192), (8, 2080, 64), (5, 24, 1024)])
@pytest.mark.parametrize("fused", FUSED)
def test_weights_held(device: torch.device, rows: int, size: int, depth: int, fused: dict[str, Any]) -> None:
    check(rows, size, depth, torch.float32, device, 1e-5, held_linear, **fused)


def test_weights_that_cannot_be_held_are_refused(device: torch.device) -> None:
    for rows, weight in (
        (1, torch.zeros(16, 64)),
        (9, torch.zeros(16, 64)),
        (2, torch.zeros(16, 96)),
        (2, torch.zeros(16, 4096)),
    ):
        weight = weight.to(device)
        assert not can_hold(rows, weight)
        with pytest.raises(ValueError, match="does not take"):
            held_linear(torch.zeros(rows, weight.shape[1], device=device), weight)


def test_split_sums_meet_and_can_be_used_again(device: torch.device) -> None:
    meeting = SplitSums(device)
    for rows in (3, 20):
        for fused in FUSED[:2]:
            options = {"split_sums": meeting, "config": StreamConfig(32, 64, 4, 2, 4), **fused}
            check(rows, 96, 512, torch.float32, device, 1e-5, **options)
    assert not meeting.locks.any()


@pytest.mark.parametrize(
    ("rows", "splits", "options"),
    [(3, 4, {}), (3, 5, {"split_sums": None}), (3, 5, {"gated": True}), (200, 5, {})],
)
def test_splits_that_are_not_possible_are_refused(
    device: torch.device, rows: int, splits: int, options: dict[str, Any]
) -> None:
    x, weight = torch.zeros(rows, 320, device=device), torch.zeros(32, 320, device=device)
    config = StreamConfig(16, 64, splits, 2, 4)
    with pytest.raises(ValueError, match="cannot be split"):
        few_rows_linear(x, weight, **{"split_sums": SplitSums(device), "config": config, **options})


def test_no_rows(device: torch.device) -> None:
    assert few_rows_linear(torch.zeros(0, 64, device=device), torch.zeros(16, 64, device=device)).shape == (0, 16)


@pytest.mark.parametrize("card", [Card(), Card(num_processors=170, shared_bytes=101376)])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("size", "depth"), [(24, 64), (1024, 3072), (4096, 12288), (14336, 4096), (151936, 1024)])
def test_launches_fit_the_card(card: Card, itemsize: int, size: int, depth: int) -> None:
    for rows in (2, 16, 17, 48, 64, 65, 128, 256):
        padded = min(128, max(16, 1 << (rows - 1).bit_length()))
        for gated in (False, True):
            for can_split in (False, True):
                config = choose_stream_config(rows, size, depth, gated, itemsize, can_split, card)
                tile = (padded + config.block * (2 if gated else 1)) * config.step * itemsize
                assert config.num_stages * tile <= card.shared_bytes
                assert config.splits == 1 or (can_split and not gated and depth % (config.splits * config.step) == 0)
                assert config.splits == 1 or SplitSums.holds(config.splits, rows, size, config.block)


def test_a_norm_over_several_rows_and_foreign_configs_are_refused(device: torch.device) -> None:
    weight = torch.zeros(16, 16, device=device)
    with pytest.raises(ValueError, match="StreamConfig"):
        few_rows_linear(torch.zeros(1, 16, device=device), weight, config=StreamConfig(16, 16, 1, 2, 4))
    with pytest.raises(ValueError, match="RowsConfig"):
        few_rows_linear(torch.zeros(2, 16, device=device), weight, config=RowsConfig(2, 4))
    with pytest.raises(ValueError, match="one row only"):
        few_rows_linear(torch.zeros(2, 16, device=device), weight, gain=torch.ones(16, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "depth"), [(4096, 1024), (1024, 3072), (960, 576), (4096, 12288), (2560, 9728), (96, 1020)]
)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16, 17, 33, 64, 100, 200])
@pytest.mark.parametrize("overlap", [False, True])
def test_sizes_of_models(size: int, depth: int, rows: int, overlap: bool) -> None:
    device = torch.device("cuda")
    meeting = SplitSums(device)
    every: list[dict[str, Any]] = [*FUSED, *([{"gain": True, "gated": True}] if rows == 1 else [])]
    for fused in every:
        for split_sums in (None, meeting):
            check(rows, size, depth, torch.bfloat16, device, 1e-2, split_sums=split_sums, overlap=overlap, **fused)
