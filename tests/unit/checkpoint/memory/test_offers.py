"""The order in which a load tries checkpoints in memory and on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

import unickpt
from unickpt.checkpoint.load.resume import Offer
from unickpt.checkpoint.memory.finding import FoundGeneration
from unickpt.checkpoint.memory.offers import MemoryOffers
from unickpt.checkpoint.memory.tier import MemoryLoad

_NOTHING = Offer()


def tried(memory: list[int], disk: list[Offer], *, native: int = -1) -> list[tuple[str, int, bool]]:
    """Return name, generation and check of the offers until nothing is left."""
    left: Iterator[Offer] = iter(disk)
    load = MemoryLoad([FoundGeneration(step, step, f"iter_{step}") for step in memory])
    offers = MemoryOffers(load, "/c", lambda: next(left, _NOTHING), lambda: native)
    found = []
    while (offer := offers.next()).directory and len(found) < 20:
        found.append(("native" if offer.native else offer.name, offer.generation, offer.checked))
        if offer.native:
            break
    return found


def on_disk(step: int, *, explicit: bool = False) -> Offer:
    return Offer(f"/c/iter_{step}", f"iter_{step}", step, explicit=explicit)


def test_a_newer_generation_is_tried_first_and_again_without_damaged_files() -> None:
    assert tried([5], [on_disk(3), on_disk(1)]) == [
        ("iter_5", 5, False), ("iter_5", 5, True), ("iter_3", 0, False), ("iter_1", 0, False),
    ]  # fmt: skip


def test_the_checkpoint_on_disk_is_taken_if_it_is_not_older() -> None:
    assert tried([5], [on_disk(5)])[0] == ("iter_5", 0, False)
    assert [name for name, _, _ in tried([6, 2], [on_disk(4), on_disk(1)])] == [
        "iter_6", "iter_6", "iter_4", "iter_2", "iter_2", "iter_1",
    ]  # fmt: skip


def test_the_step_of_a_checkpoint_on_disk_is_read_if_its_finder_does_not_know_it(tmp_path: Path) -> None:
    unickpt.save_checkpoint({"a": torch.zeros(1)}, tmp_path / "last", step=5)
    for damaged, first in ((False, "last"), (True, "iter_5")):
        if damaged:
            (tmp_path / "last" / "manifest.json").write_text("{}")
        assert tried([5], [Offer(str(tmp_path / "last"), "last")])[0][0] == first


def test_a_checkpoint_that_the_user_names_is_not_replaced() -> None:
    assert tried([5], [on_disk(3, explicit=True)])[0] == ("iter_3", 0, False)


def test_the_frameworks_own_checkpoint_counts_by_its_step() -> None:
    assert tried([5], [], native=6) == [], "the framework loads it"
    assert tried([5], [], native=4) == [("iter_5", 5, False), ("iter_5", 5, True), ("native", 0, False)]
    assert tried([], [], native=4) == []
