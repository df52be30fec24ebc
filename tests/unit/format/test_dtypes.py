"""Is a weight the cast of its master, bit for bit."""

from __future__ import annotations

import pytest
import torch

from unickpt.format.dtypes import is_cast_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("strided", [False, True])
def test_one_flipped_bit_is_detected(dtype: torch.dtype, strided: bool) -> None:
    master = torch.randn(64, 3)[:, ::2] if strided else torch.randn(64, 2)
    weight = master.to(dtype)
    assert is_cast_of(weight, master)
    changed = weight.clone()
    changed[-1, -1] = torch.nextafter(changed[-1, -1].float(), torch.tensor(9.0)).to(dtype) + 1
    assert not is_cast_of(changed, master)


def test_empty_ones_and_equal_nans() -> None:
    assert is_cast_of(torch.zeros(0), torch.zeros(0))
    assert is_cast_of(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not is_cast_of(torch.tensor([0.0]), torch.tensor([-0.0]))
