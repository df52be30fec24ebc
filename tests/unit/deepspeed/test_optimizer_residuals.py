"""Slices of DeepSpeed's 1-bit optimizers, and their residuals for another number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("deepspeed")

from ds_unickpt.compressing.optimizer_residuals import _padded, _well_formed, _without_padding, sizes_of, slice_of
from unickpt.training.compression.carried import resized


@pytest.mark.parametrize("elements", [1, 7, 64, 179, 1000])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_slices_are_those_of_deepspeed(elements: int, world: int) -> None:
    whole, chunk = sizes_of(elements, world)
    divider = int(world * 8 / np.gcd(world, 8))  # deepspeed/runtime/fp16/onebit/adam.py
    rest = elements % (world * divider)
    assert whole == (elements if rest == 0 else elements + world * divider - rest)
    assert chunk == whole // world
    slices = [slice_of(elements, rank, world) for rank in range(world)]
    assert [at for lo, hi in slices for at in range(lo, hi)] == list(range(elements))


@pytest.mark.parametrize("world", [1, 2, 5])
def test_another_number_of_ranks_owes_as_much(world: int) -> None:
    elements, before = 179, 3
    whole, chunk = sizes_of(elements, before)
    sent, back = torch.randn(before, whole), torch.randn(before, chunk)
    saved = [
        {"rank": r, "world": before, "elements": {"k": elements},
         "sent": {"worker_error:k": sent[r]}, "returned": {"server_error:k": back[r]}}
        for r in range(before)
    ]  # fmt: skip
    found = [_padded(resized(map(_without_padding, saved), rank, world, slice_of), world) for rank in range(world)]
    new_whole, new_chunk = sizes_of(elements, world)
    for each in found:
        assert each.sent["worker_error:k"].shape == (new_whole,)
        assert each.returned["server_error:k"].shape == (new_chunk,)
        torch.testing.assert_close(each.sent["worker_error:k"][:elements], sent.mean(0)[:elements])
        assert not each.sent["worker_error:k"][elements:].any()
    after = torch.cat([each.returned["server_error:k"] for each in found])[:elements]
    assert torch.equal(after, back.reshape(-1)[:elements])


@pytest.mark.parametrize("change", [
    {"elements": None}, {"elements": {"k": "179"}}, {"loco": []}, {"loco": {"p": [1, 2]}}, {"loco": {"p": [[], [], []]}},
    {"sent": {"worker_error": torch.zeros(1)}}, {"returned": 1},
])  # fmt: skip
def test_other_objects_are_refused(change: dict[str, Any]) -> None:
    value = {"rank": 0, "world": 1, "sent": {}, "returned": {}, "elements": {"k": 179}, "loco": {"p": [[torch.zeros(1)], []]}}
    assert _well_formed(value)
    assert not _well_formed(value | change)
    assert not _well_formed(None)
