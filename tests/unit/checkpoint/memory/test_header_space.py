"""The space in front of the data of a generation holds the header of every data file with these shards."""

from __future__ import annotations

import pytest
import torch

from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.tensor_info import TensorInfo
from unickpt.checkpoint.memory import mapped_staging
from unickpt.checkpoint.memory.mapped_staging import header_space
from unickpt.checkpoint.save.shards import Shard
from unickpt.checkpoint.storage.direct_io import BLOCK_BYTES

LARGE = 10**19


@pytest.mark.parametrize("name", ["w", 'with "quotes" \\ and \n', "é\U0001f600", "\udc80", "", "layer." * 40 + "weight"])
@pytest.mark.parametrize("ndim", [0, 1, 2, 32])
@pytest.mark.parametrize("count", [0, 1, 400])
def test_a_header_fits(name: str, ndim: int, count: int) -> None:
    box = Box((LARGE,) * ndim, (LARGE // 1000,) * ndim if ndim == 1 else (1,) * ndim)  # some exabytes in a file
    shards = [
        Shard(TensorInfo(f"{name}{at}", "exp_avg_sq", "F8_E4M3FNUZ", (3 * LARGE,) * ndim, "optimizer"), box, torch.empty(0))
        for at in range(count)
    ]
    space = header_space(shards)
    assert space >= mapped_staging._exact_space(shards)
    assert space % BLOCK_BYTES == 0


def test_a_header_near_the_limit_of_the_format_gets_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [Shard(TensorInfo("w", "master", "F32", (8,), "parameter"), Box.whole((8,)), torch.empty(8))] * 1
    monkeypatch.setattr(mapped_staging, "MAX_HEADER_BYTES", 300)
    assert header_space(shards) == mapped_staging._exact_space(shards)
