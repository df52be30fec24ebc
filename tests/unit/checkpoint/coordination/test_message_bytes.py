"""What the ranks of a job send to its store, as a function of their number."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch.distributed as dist

from unickpt.checkpoint.coordination.host_peers import _verdicts
from unickpt.checkpoint.coordination.message_exchange import MessageExchange, Pauses


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pauses, "of", lambda _: Pauses(0.0, 0.0, 0.0))


class CountingStore:
    """A store that counts the bytes of the keys that it is asked for. At one of the questions something happens."""

    def __init__(self, questions: int, then: Callable[[], object]) -> None:
        self.store, self.asked_bytes = dist.HashStore(), 0
        self._left, self._then = questions, then

    def check(self, keys: list[str]) -> bool:
        self._left -= 1
        if self._left == 0:
            self._then()
        self.asked_bytes += sum(map(len, keys))
        return bool(self.store.check(keys))

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self.store.get(key))

    def delete_key(self, key: str) -> bool:
        return bool(self.store.delete_key(key))


def asked_bytes(step: str, world: int, late: int, questions: int) -> int:
    """Return what rank 0 asks for in a step in which one rank comes after some questions."""

    def take_part(rank: int) -> object:
        each = MessageExchange(store, rank=rank, world=world, prefix="t")
        return each.leave() if step == "leave" else each.gather("g", {"rank": rank})

    store = CountingStore(questions, lambda: take_part(late))
    for rank in range(world - 1, 0, -1):
        if rank != late:
            take_part(rank)
    found = take_part(0)
    assert step == "leave" or found == [{"rank": rank} for rank in range(world)]
    return store.asked_bytes


@pytest.mark.parametrize("step", ["gather", "leave"])
@pytest.mark.parametrize("late", [1, 30, -1])
def test_a_longer_wait_for_a_rank_costs_as_much_in_a_job_of_any_size(step: str, late: int) -> None:
    longer = {
        world: asked_bytes(step, world, late % world, 80) - asked_bytes(step, world, late % world, 40) for world in (64, 512)
    }
    assert longer[512] < 1.2 * longer[64]


def test_what_a_wait_asks_for_grows_as_the_number_of_ranks() -> None:
    found = {world: asked_bytes("gather", world, world - 1, 20) for world in (64, 512)}
    assert found[512] < 8 * found[64]


def test_what_the_ranks_of_a_host_are_told_does_not_grow_with_their_number() -> None:
    def told(world: int) -> int:
        same = {"failure": None, "host": "h", "identity": "i", "problem": None, "cached": True}
        return max(len(json.dumps(each)) for each in _verdicts([same] * world))

    assert told(512) <= told(8) + 4
