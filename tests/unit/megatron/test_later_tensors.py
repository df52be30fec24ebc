"""Sharded tensors that are described when somebody looks at one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from megatron_unickpt.held_state.sharded_tensors import LaterTensors, common, walk

DESCRIBED = {"0": "first", "1": "second"}
LOOKS: dict[str, Callable[[Any], Any]] = {
    "iteration": lambda later: {key: later[key] for key in later},
    "items": lambda later: dict(later.items()),
    "keys and values": lambda later: dict(zip(later.keys(), later.values(), strict=True)),
    "get": lambda later: {key: later.get(key) for key in DESCRIBED},
    "pop": lambda later: {key: later.pop(key) for key in DESCRIBED},
    "dict": dict,
    "copy": lambda later: later.copy(),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda later: pickle.loads(pickle.dumps(later)),
    "unpacked": lambda later: {**later},
    "joined": lambda later: later | {},
    "joined to another": lambda later: {} | later,
    "walk": lambda later: dict(zip(DESCRIBED, walk([later]), strict=True)),
}


def later(calls: list[int]) -> Any:
    return LaterTensors(lambda: calls.append(1) or DESCRIBED)  # type: ignore[func-returns-value, return-value, arg-type]


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_finds_them_all(look: str) -> None:
    calls: list[int] = []
    found = LOOKS[look](later(calls))
    assert (found, type(found), calls) == (DESCRIBED, dict, [1])


def test_they_are_described_once() -> None:
    calls: list[int] = []
    found = later(calls)
    assert len(found) == 2
    assert "1" in found
    assert found == DESCRIBED
    assert calls == [1]


def test_a_save_that_knows_them_does_not_look() -> None:
    calls: list[int] = []
    found = later(calls)
    assert list(walk({"optimizer": {"tensors": found, "step": 3}}, later=False)) == [found, 3]
    calls.clear()
    unseen = later(calls)
    assert common({"optimizer": {"tensors": unseen, "step": 3}}) == {"optimizer": {"step": 3}}
    assert not calls
