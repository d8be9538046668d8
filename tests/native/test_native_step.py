"""The compiled step computes what the model computes, and the same bits however the work is cut."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedlc_engine.native import Library
from pagedlc_engine.native.compiler import FLAGS, build
from tests.native.conftest import MODELS
from tests.native.native_helpers import NativeModel, Row, reference_logits

TinyModel = Callable[[str], tuple[Path, Any]]
LENGTH = 200
#: A number on the border of two steps may be rounded to either, which random weights make the most of.
ROUNDINGS = 0.03


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 199, (length,), generator=torch.Generator().manual_seed(seed))


def blocks(first: int, length: int, size: int = 16) -> list[int]:
    """A block table that does not run in order."""
    return [first + index for index in range(-(-length // size))][::-1]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_logits_are_those_of_the_same_arithmetic_in_torch(
    tiny_model: TinyModel, library: Library, name: str, block_size: int
) -> None:
    folder, _ = tiny_model(name)
    ids = tokens(LENGTH)
    native = NativeModel(folder, library, block_size=block_size)
    (found,) = native.step([Row(0, ids, blocks(1, LENGTH, block_size))])
    assert error(found, reference_logits(folder, ids)) < ROUNDINGS


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_close_to_those_of_transformers(tiny_model: TinyModel, library: Library, name: str) -> None:
    folder, model = tiny_model(name)
    with torch.inference_mode():
        expected = model(tokens(LENGTH)[None]).logits[0]
    (found,) = NativeModel(folder, library).step([Row(0, tokens(LENGTH), blocks(1, LENGTH))])
    assert error(found, expected) < 0.2


@pytest.mark.parametrize("name", MODELS)
def test_a_token_has_the_same_bits_whole_in_chunks_and_one_by_one(
    tiny_model: TinyModel, library: Library, name: str
) -> None:
    native = NativeModel(tiny_model(name)[0], library)
    ids = tokens(LENGTH)
    (whole,) = native.step([Row(0, ids, blocks(1, LENGTH))])
    for first, chunk in ((14, 1), (27, 7), (40, 64)):
        table = blocks(first, LENGTH)
        parts = [native.step([Row(at, ids[at : at + chunk], table)])[0] for at in range(0, LENGTH, chunk)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_request_has_the_same_bits_alone_and_among_others(tiny_model: TinyModel, library: Library, name: str) -> None:
    """A prompt, its continuation by one token over shared blocks, and other requests, in one step."""
    native = NativeModel(tiny_model(name)[0], library)
    ids, other = tokens(100), tokens(70, seed=1)
    table = list(range(1, 8))
    (alone,) = native.step([Row(0, ids, table)])
    shared = [*table[:6], 20]
    assert torch.equal(native.step([Row(96, ids[96:], shared)])[0], alone[96:])
    mixed = native.step(
        [
            Row(0, other, list(range(30, 35))),
            Row(0, ids, list(range(40, 47))),
            Row(99, ids[99:], table),
            Row(0, other[:1], [50]),
            Row(96, ids[96:99], [*table[:6], 21]),
        ]
    )
    assert torch.equal(mixed[1], alone)
    assert torch.equal(mixed[2], alone[99:])
    assert torch.equal(mixed[3], mixed[0][:1])
    assert torch.equal(mixed[4], alone[96:99])


def test_the_number_of_threads_changes_nothing(tiny_model: TinyModel, library: Library) -> None:
    folder, _ = tiny_model("qwen3")
    ids = tokens(LENGTH)
    row = Row(0, ids, blocks(1, LENGTH))
    one, many = (NativeModel(folder, library, threads=threads).step([row])[0] for threads in (1, 5))
    assert torch.equal(one, many)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_neither_waits_for_the_threads_it_has_not_nor_ends_them(
    tiny_model: TinyModel, library: Library
) -> None:
    native = NativeModel(tiny_model("llama")[0], library, threads=3)
    row = Row(0, tokens(40), [1, 2, 3])
    (before,) = native.step([row])
    child = os.fork()
    if not child:
        same = torch.equal(native.step([row])[0], before)
        del native
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert torch.equal(native.step([row])[0], before)


def test_copied_blocks_hold_the_same(tiny_model: TinyModel, library: Library) -> None:
    native = NativeModel(tiny_model("qwen2")[0], library)
    ids = tokens(40)
    (whole,) = native.step([Row(0, ids, [1, 2, 3])])
    native.attention.copy_blocks([(1, 7), (2, 8), (3, 9)])
    for cache in native.attention.caches:
        cache[1:4] = float("nan")
    assert torch.equal(native.step([Row(39, ids[39:], [7, 8, 9])])[0], whole[39:])


def test_numbers_that_are_not_finite_are_not_hidden(tiny_model: TinyModel, library: Library) -> None:
    native = NativeModel(tiny_model("llama")[0], library)
    with torch.inference_mode():
        native.decoder._weights.embedding[5] = float("nan")
    broken, sound = native.step([Row(0, torch.tensor([5]), [1]), Row(0, torch.tensor([6]), [2])])
    assert not torch.isfinite(broken).any()
    assert torch.isfinite(sound).all()


@pytest.mark.parametrize("architecture", ["x86-64-v3", "x86-64"])
def test_lesser_instruction_sets_give_nearly_the_same(
    tiny_model: TinyModel, library: Library, architecture: str
) -> None:
    if platform.machine() != "x86_64" or (architecture == "x86-64-v3" and not torch.cpu._is_avx2_supported()):
        pytest.skip(f"this CPU does not run code for {architecture}")
    folder, _ = tiny_model("llama")
    flags = (flag.replace("native", architecture).replace("-O3", "-O1") for flag in FLAGS)
    lesser = Library(str(build(tuple(flags))))
    row = Row(0, tokens(LENGTH), blocks(1, LENGTH))
    best, plain = (NativeModel(folder, made).step([row])[0] for made in (library, lesser))
    assert error(plain, best) < ROUNDINGS
