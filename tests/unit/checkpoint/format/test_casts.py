"""Is a weight the cast of its master, bit for bit: by itself, and during a copy of the master."""

from __future__ import annotations

import pytest
import torch

from unickpt.checkpoint.format import casts
from unickpt.checkpoint.format.casts import TensorCopy, available, cast_flags, copy_all, is_cast_of

with_extension = pytest.mark.parametrize("extension", [True, False])


def test_the_extension_is_installed() -> None:
    """The environment of the tests has a compiler."""
    assert available()


@with_extension
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("strided", [False, True])
def test_one_flipped_bit_is_detected(dtype: torch.dtype, strided: bool, extension: bool) -> None:
    master = torch.randn(64, 3)[:, ::2] if strided else torch.randn(64, 2)
    weight = master.to(dtype)
    assert is_cast_of(weight, master, extension=extension)
    changed = weight.clone()
    changed[-1, -1] = torch.nextafter(changed[-1, -1].float(), torch.tensor(9.0)).to(dtype) + 1
    assert not is_cast_of(changed, master, extension=extension)
    assert cast_flags([(weight, master), (changed, master)]) == [True, False]


@pytest.mark.parametrize("position", [0, 7, 8, 63, 64, None])
def test_the_comparison_on_a_device_in_parts_sees_every_element(position: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "_DEVICE_PART", 8)
    master = torch.randn(5, 13)
    weight = master.to(torch.bfloat16)
    if position is not None:
        weight.view(-1)[position] += 1
    assert bool(casts.equal_on_device(weight, master)) == (position is None)
    assert bool(casts.equal_on_device(weight.t(), master.t())) == (position is None)
    assert bool(casts.equal_on_device(weight.view(-1), master)) == (position is None)
    assert bool(casts.equal_on_device(weight[:0], master[:0]))


@with_extension
def test_empty_ones_equal_nans_and_signs_of_zero(extension: bool) -> None:
    nan, zero, minus = torch.tensor([float("nan")]), torch.tensor([0.0]), torch.tensor([-0.0])
    assert is_cast_of(torch.zeros(0), torch.zeros(0), extension=extension)
    assert is_cast_of(nan, nan, extension=extension)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert is_cast_of(minus.to(dtype), minus, extension=extension)
        assert not is_cast_of(zero.to(dtype), minus, extension=extension)


def test_a_flat_weight_of_a_master_with_strides() -> None:
    master = torch.randn(4, 6).t()
    weight = master.reshape(-1).to(torch.bfloat16)
    assert is_cast_of(weight, master)
    weight[5] += 1
    assert not is_cast_of(weight, master)


@with_extension
def test_every_bfloat16_and_what_lies_between(extension: bool) -> None:
    """All upper halves of a float with lower halves around each rule of rounding, infinities and overflow included."""
    upper = torch.arange(1 << 16, dtype=torch.int64)
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] << 16 | lower).reshape(-1)
    master = (bits - (bits >> 31 << 32)).to(torch.int32).view(torch.float32)
    master = master[~master.isnan()]
    weight = master.to(torch.bfloat16)
    assert is_cast_of(weight, master, extension=extension)
    for at in range(0, len(master), 9973):
        changed = weight.clone()
        changed.view(torch.int16)[at] ^= 1
        assert not is_cast_of(changed, master, extension=extension)


@with_extension
@pytest.mark.parametrize("threads", [1, 3])
def test_copies_of_any_size_at_any_place(extension: bool, threads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    copies, expected = [], []
    for number, count in enumerate((0, 1, 2, 15, 16, 17, 1023, 1024, 1025, 5000, 70_001)):
        for shift in (0, 1, 5):
            source = torch.randn(count + shift, generator=generator)[shift:]
            target = torch.full((count + 8,), 7.0)
            kind = (torch.float32, torch.bfloat16, None)[(number + shift) % 3]
            value = None if kind is None else source.to(kind).clone()
            changed = value is not None and bool(count) and number % 2 == 1
            if changed and value is not None:
                value.view(torch.uint8)[(number * 131) % (count * value.element_size())] ^= 1
            copies.append((TensorCopy(target[shift : shift + count], source, value), target, shift, count))
            expected.append(not changed)
    assert copy_all([each for each, *_ in copies], threads, extension=extension) == expected
    for each, target, shift, count in copies:
        assert torch.equal(target[shift : shift + count], each.source)
        assert (target[:shift] == 7).all()
        assert (target[shift + count :] == 7).all()
