"""A repetition draws the same random numbers as the first time, and leaves generators and attributes as they are."""

from __future__ import annotations

import io
import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch

from unickpt.training.witness import attributes
from unickpt.training.witness.attributes import attributes_kept
from unickpt.training.witness.cases import loaded
from unickpt.training.witness.repeating import Tap
from unickpt.training.witness.surroundings import Generators


class Drawing(torch.nn.Module):
    """Draws random numbers from everywhere, and counts."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layer, self.own = torch.nn.Linear(4, 4), torch.Generator().manual_seed(seed)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", None)
        self.count, self.seen, self.hidden = 0, [torch.zeros(3, 4)], torch.zeros(3, 4)
        self.written = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.mean = 0.9 * self.mean + x.mean(0)
        self.written += 1
        found: torch.Tensor = self.layer(x) * random.random() * float(np.random.rand()) * torch.rand(1, generator=self.own)
        self.hidden = found.detach()
        self.seen.append(self.hidden)
        self.extra = self.hidden
        return found * torch.rand(1)

    def state(self) -> list[Any]:
        tensors = [self.mean, self.hidden, self.written, self.own.get_state()]
        return [self.count, len(self.seen), hasattr(self, "extra"), *(each.tolist() for each in tensors)]


def everything() -> list[Any]:
    numpys = np.random.get_state()
    assert isinstance(numpys, tuple)
    return [torch.get_rng_state().tolist(), random.getstate(), numpys[1].tolist(), *numpys[2:]]


def test_a_model_with_random_numbers_and_state_of_its_own_is_repeated_without_a_trace() -> None:
    model = Drawing()
    tap = Tap(model, dict(model.named_parameters()))
    tap.arm()
    model(torch.ones(3, 4)).sum().backward()
    case, why = tap.take()
    assert case is not None, why
    model(torch.ones(3, 4)).sum().backward()
    other = Drawing(1)
    other.load_state_dict(model.state_dict())
    before, hidden = (everything(), model.state()), model.hidden
    assert tap.repeat(case.data) == Tap(other, dict(other.named_parameters())).repeat(case.data) == case.values
    assert (everything(), model.state()) == before
    assert model.hidden is hidden
    assert other.state()[:3] == [0, 1, False]


@pytest.mark.parametrize("generator", [np.random.PCG64, np.random.Philox, np.random.MT19937, np.random.SFC64])
def test_states_can_be_loaded_without_numpy_and_pickles(generator: Any) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(generator(1))
    try:
        generators, buffer = Generators(torch.device("cpu"), Drawing()), io.BytesIO()
        torch.save(generators.states(), buffer)
        first = [np.random.rand(), np.random.randn(), random.random()]
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        generators.restore(loaded(buffer.getvalue(), torch.device("cpu")))
        assert [np.random.rand(), np.random.randn(), random.random()] == first
    finally:
        np.random.set_bit_generator(before)


def test_what_containers_hold_is_as_before() -> None:
    class Holding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sums = {"n": 0, "load": torch.zeros(2), "all": [torch.zeros(1), (torch.zeros(1), {"a": 1})]}
            self.sums["itself"] = self.sums

    holding, counted = Holding(), []
    with attributes_kept(holding, lambda: counted.append(1)):
        holding.sums["n"] += 1
        holding.sums["load"].add_(1)
        first, (second, names) = holding.sums["all"]
        first.add_(1)
        second.add_(1)
        names["b"] = 2
        holding.sums["all"].append(3)
    assert holding.sums.pop("itself") is holding.sums
    assert holding.sums == {"n": 0, "load": holding.sums["load"], "all": [first, (second, {"a": 1})]}
    assert [first.item(), second.item(), *holding.sums["load"].tolist()] == [0, 0, 0, 0]
    assert counted == [1]


def test_tensors_in_containers_are_copied_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    for child in model:
        child.cache = [torch.zeros(4), torch.zeros(4)]  # type: ignore[assignment]
    monkeypatch.setattr(attributes, "MOST_HELD_BYTES", 48)
    with attributes_kept(model):
        for child in model:
            for each in child.cache:  # type: ignore[union-attr]
                each.add_(1)
    assert [each[0].item() for child in model for each in child.cache] == [0, 0, 0, 1]  # type: ignore[union-attr]


def test_containers_and_new_attributes_are_as_before() -> None:
    class Holding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all: list[Any] = [
                [1], {"a": 1}, {1}, deque([1], maxlen=2), OrderedDict(a=1), defaultdict(int, a=1), Counter(a=1)
            ]  # fmt: skip
            for at, each in enumerate(self.all):
                setattr(self, f"own{at}", each)
            self.gone, self.layer = 1, torch.nn.Linear(2, 2)
            self.register_buffer("one", torch.ones(2))

    holding = Holding()
    parameter, one, handle = holding.layer.weight, holding.get_buffer("one"), object()
    with attributes_kept(holding):
        for each in holding.all:
            each.append(2) if isinstance(each, (list, deque)) else each.add(2) if isinstance(each, set) else each.update(
                a=2, b=3
            )
        del holding.gone
        holding.new = handle
        holding.one = torch.zeros(3)
        holding.register_buffer("two", one)
        holding.eval()
        hook = holding.register_forward_hook(lambda *_: None)
        holding.layer.weight = torch.nn.Parameter(torch.ones(2, 2))
    assert holding.all == [[1], {"a": 1}, {1}, deque([1]), {"a": 1}, {"a": 1}, {"a": 1}]
    assert (holding.gone, holding.training, hasattr(holding, "new")) == (1, True, False)
    assert list(holding.buffers()) == [one]
    assert holding.layer.weight is not parameter  # what is none of its matter
    assert hook.id in holding._forward_hooks
