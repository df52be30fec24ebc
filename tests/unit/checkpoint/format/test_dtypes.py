"""Every dtype of the format: what is saved is what is loaded, and a dtype without a name is refused with its tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import unickpt
from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.dtype_names import itemsize_bytes, names
from unickpt.checkpoint.format.dtypes import byte_view, name_of, torch_dtypes

SMALL_FLOATS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


def test_each_dtype_of_torch_has_its_name_and_size() -> None:
    assert set(torch_dtypes()) == set(names())
    assert all(dtype.itemsize == itemsize_bytes(name) for name, dtype in torch_dtypes().items())


def test_a_checkpoint_keeps_each_bit_of_each_dtype(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    state = {
        name: torch.randint(0, 2, (3, 5 * dtype.itemsize), generator=random, dtype=torch.uint8).view(dtype)
        for name, dtype in torch_dtypes().items()
    }
    unickpt.save_checkpoint(state, tmp_path / "step1", step=1)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    unickpt.load_checkpoint(tmp_path / "step1", found)
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(byte_view(found[name]), byte_view(tensor)), name


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_the_small_floats_of_torch_have_a_name(dtype: str) -> None:
    assert name_of(getattr(torch, dtype))


def test_a_dtype_that_cannot_be_stored_is_refused_with_its_tensor(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"freqs has dtype torch\.complex128"):
        name_of(torch.complex128, "freqs")
    with pytest.raises(unickpt.SaveFailedError, match=r"freqs \(weight\) has dtype torch.complex128, which cannot be stored"):
        unickpt.save_checkpoint({"freqs": torch.zeros(3, dtype=torch.complex128)}, tmp_path / "step1", step=1)
