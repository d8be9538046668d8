"""What ``import pagedlc`` offers."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import pagedlc
from pagedlc_engine.device import max_num_seqs


def test_every_public_name_is_there() -> None:
    assert all(getattr(pagedlc, name) is not None for name in pagedlc.__all__)
    assert pagedlc.__version__ == version("pagedlc")
    with pytest.raises(AttributeError, match="Nothing"):
        _ = pagedlc.Nothing


def test_every_error_is_a_paged_lc_error() -> None:
    errors = [getattr(pagedlc, name) for name in pagedlc.__all__ if name.endswith("Error")]
    assert len(errors) >= 10
    assert all(issubclass(error, pagedlc.PagedLCError) for error in errors)


def test_a_gpu_takes_more_requests_at_once_unless_a_number_is_given() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda:0")
    default = pagedlc.EngineConfig.create(model=Path("model"))
    assert max_num_seqs(default, cpu) == 64
    assert max_num_seqs(default, cuda) == 256
    assert max_num_seqs(pagedlc.EngineConfig.create(model=Path("model"), max_num_seqs=7), cuda) == 7


def test_a_message_about_several_values_names_them_once() -> None:
    with pytest.raises(pagedlc.InvalidRequestError) as caught:
        pagedlc.SamplingParams(min_tokens=10, max_tokens=5)
    assert str(caught.value) == "Invalid sampling parameter: min_tokens (10) must not exceed max_tokens (5)"
