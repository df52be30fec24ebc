"""States of random generators that are made without touching the generators of the process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import unickpt
from unickpt.checkpoint.load import rng


def test_a_state_of_a_seed_is_that_of_generators_with_this_seed() -> None:
    before = rng.capture()
    try:
        made = rng.of_seed(77, before)
        assert rng.equal(rng.capture(), before), "a generator of the process has changed"
        random.seed(77)
        np.random.seed(77)
        torch.manual_seed(77)
        assert rng.equal(made, rng.capture())
        assert rng.is_state(made)
        assert rng.restore(made) == []
    finally:
        rng.restore(before)


KINDS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


@pytest.fixture
def own_numpy() -> Iterator[Callable[[str], None]]:
    """Choose the bit generator of NumPy's global generator, for one test."""
    before, state = np.random.get_bit_generator(), np.random.get_state(legacy=False)
    yield lambda kind: np.random.set_bit_generator(getattr(np.random, kind)(7))
    np.random.set_bit_generator(before)
    np.random.set_state(state)


@pytest.mark.parametrize("kind", KINDS)
def test_any_bit_generator_of_numpy(tmp_path: Path, own_numpy: Callable[[str], None], kind: str) -> None:
    own_numpy(kind)
    np.random.standard_normal(3)  # the second half of a pair is kept
    model = torch.nn.Linear(2, 2)
    for step in (1, 2):
        unickpt.save_training(model, None, tmp_path / f"step{step}", step=step)
    drawn = np.random.standard_normal(5).tolist()
    own_numpy(kind)
    start = unickpt.load_training(model, None, tmp_path / "step2")
    assert np.random.standard_normal(5).tolist() == drawn
    assert [each.outcome for each in start.report.entries if each.name == "rng"] == ["restored"]


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_of_new_ranks_with_any_bit_generator(own_numpy: Callable[[str], None], kind: str) -> None:
    own_numpy(kind)
    state = rng.capture()
    drawn = []
    for rank in (1, 2, 1):
        rng.reseed(state, rank)
        drawn.append(np.random.randint(2**30, size=3).tolist())
    assert drawn[0] == drawn[2] != drawn[1]
    made = rng.of_seed(5, state)
    assert made["numpy"]["kind"] == kind
    assert (rng.equal(made, rng.of_seed(5, state)), rng.equal(made, rng.of_seed(6, state))) == (True, False)
    assert rng.restore(made) == []


@pytest.mark.parametrize(("saved", "own"), [("PCG64", "MT19937"), ("MT19937", "PCG64"), ("PCG64", "SFC64")])
def test_a_state_of_another_bit_generator_is_told_and_the_job_keeps_its_own(
    own_numpy: Callable[[str], None], saved: str, own: str
) -> None:
    own_numpy(saved)
    state = rng.capture()
    own_numpy(own)
    torch.rand(1)
    before = rng.capture()["numpy"]
    assert rng.restore(state) == [f"NumPy {saved}"]
    assert rng.equal(rng.capture(), {**state, "numpy": before}), "the other generators are restored"


def test_a_cuda_state_is_the_seed_and_an_offset_of_zero() -> None:
    state = rng.cuda_of_seed(2**40 + 3)
    assert state.dtype == torch.uint8
    assert state.view(torch.int64).tolist() == [2**40 + 3, 0]


def test_a_seed_depends_on_every_part_of_the_stored_generators() -> None:
    state = {"a": [torch.arange(4, dtype=torch.uint8)], "b": (3, np.arange(2)), "c": {"d": 1.5}}
    others = (
        {**state, "a": [torch.tensor([0, 1, 2, 4], dtype=torch.uint8)]}, {**state, "b": (3, np.arange(1, 3))},
        {**state, "c": {"d": 2.5}}, {**state, "c": {"e": 1.5}},
    )  # fmt: skip
    seeds = {rng.seed_from(each) for each in (state, *others)}
    assert len(seeds) == 5
    assert rng.seed_from(dict(reversed(state.items()))) == rng.seed_from(state)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_seed_is_the_same_in_every_process() -> None:
    """The text of a generator contains its address."""
    kinds = (
        lambda seed: torch.Generator().manual_seed(seed), np.random.RandomState, np.random.default_rng, random.Random,
        np.random.PCG64, torch.tensor, lambda seed: np.array([seed, None], dtype=object), lambda seed: Holder(seed),
    )  # fmt: skip
    for kind in kinds:
        first, same, other = (rng.seed_from({"a": kind(seed)}) for seed in (3, 3, 4))
        assert first == same != other, kind


class Holder:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)


def test_the_report_says_what_changed() -> None:
    assert rng.change(rng.counted(1, "data parallel"), "2", rng.kept(1, 2)) == (
        "1 data parallel rank became 2: rank 0 keeps its generators"
    )
    assert rng.change(rng.counted(4), "2", rng.kept(4, 2)) == "4 ranks became 2: ranks 0 to 1 keep their generators"
