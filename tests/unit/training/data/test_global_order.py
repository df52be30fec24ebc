"""The global order: every step has the same samples on any number of ranks, and every epoch has every sample once."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from unickpt import ConfigError, GlobalOrderSampler

SIZE, BATCH = 62, 12  # the batch does not divide the data


def steps(ranks: int, per_device: int, start: int, count: int, **options: Any) -> list[Counter[int]]:
    """Return the samples of each step, over all ranks."""
    loaders = [
        iter(GlobalOrderSampler(SIZE, rank=rank, ranks=ranks, per_device=per_device, start=start, **options))
        for rank in range(ranks)
    ]
    share = BATCH // ranks
    return [Counter(index for loader in loaders for index in islice(loader, share)) for _ in range(count)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_job_that_changes_its_ranks_has_the_steps_of_an_uninterrupted_one(shuffle: bool) -> None:
    expected = steps(1, BATCH, 0, 14, shuffle=shuffle)
    found = [
        *steps(4, 3, 0, 3, shuffle=shuffle),
        *steps(2, 3, 3 * BATCH, 4, shuffle=shuffle),
        *steps(3, 2, 7 * BATCH, 5, shuffle=shuffle),
        *steps(6, 1, 12 * BATCH, 2, shuffle=shuffle),
    ]
    assert found == expected


def test_every_epoch_has_every_sample_once_in_an_order_of_its_own() -> None:
    stream = list(islice(GlobalOrderSampler(SIZE, rank=0, ranks=1, per_device=1, seed=3), 3 * SIZE))
    epochs = [stream[at : at + SIZE] for at in range(0, 3 * SIZE, SIZE)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(SIZE))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != sorted(epochs[2])
    other = list(islice(GlobalOrderSampler(SIZE, rank=0, ranks=1, per_device=1, seed=4), SIZE))
    assert other != epochs[0]


@pytest.mark.parametrize(("ranks", "per_device", "start"), [(1, 1, 0), (4, 3, 0), (2, 6, 36), (3, 4, 120), (5, 1, 200)])
def test_a_sampler_with_epochs_ends_and_gives_every_rank_the_same_number(ranks: int, per_device: int, start: int) -> None:
    samplers = [
        GlobalOrderSampler(SIZE, rank=rank, ranks=ranks, per_device=per_device, start=start, epochs=2) for rank in range(ranks)
    ]
    places = [list(sampler.places()) for sampler in samplers]
    assert {len(each) for each in places} == {len(sampler) for sampler in samplers}
    used = sorted(place for each in places for place in each)
    assert used == list(range(start, start + len(used)))
    assert max(2 * SIZE - start, 0) - len(used) < ranks * per_device


def test_the_batches_of_a_data_loader_are_micro_batches() -> None:
    sampler = GlobalOrderSampler(SIZE, rank=1, ranks=4, per_device=3, start=24, epochs=1)
    batches = list(DataLoader(torch.arange(SIZE), batch_size=3, sampler=sampler))  # type: ignore[arg-type]
    order = sampler.order(0).tolist()
    assert [batch.tolist() for batch in batches] == [order[27:30], order[39:42], order[51:54]]


def test_the_position_has_epoch_and_offset() -> None:
    position = GlobalOrderSampler(SIZE, rank=0, ranks=1, per_device=1, seed=7).position(150)
    assert (position.samples, position.epoch, position.offset, position.seed) == (150, 2, 26, 7)


def test_a_sampler_without_an_end_has_no_length() -> None:
    with pytest.raises(TypeError, match="has no length"):
        len(GlobalOrderSampler(SIZE, rank=0, ranks=1, per_device=1))


@pytest.mark.parametrize("wrong", [{"rank": 2}, {"rank": -1}, {"per_device": 0}, {"start": -1}, {"epochs": -1}, {"size": 0}])
def test_numbers_out_of_bounds_are_errors(wrong: dict[str, int]) -> None:
    given = {"size": SIZE, "rank": 0, "ranks": 2, "per_device": 3, **wrong}
    with pytest.raises(ConfigError, match="GlobalOrderSampler: "):
        GlobalOrderSampler(given.pop("size"), **given)
