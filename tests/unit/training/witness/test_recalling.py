"""Kept micro-batches are freed when a step begins, and do not fill the memory."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from unickpt.training.witness.counting import Counters
from unickpt.training.witness.nonfinite import Place
from unickpt.training.witness.recalling import Recalled
from unickpt.training.witness.repeating import Tap


def recalled_of(model: torch.nn.Module) -> Recalled:
    return Recalled(Tap(model, dict(model.named_parameters())))


class Layer(torch.nn.Module):
    def __init__(self, found: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.found = torch.nn.Parameter(torch.ones(4)), found

    def forward(self, x: torch.Tensor) -> Any:
        return self.found(x, self.weight)


@pytest.mark.parametrize("found", [lambda x, weight: (x, x * weight), lambda x, weight: (x.mul_(weight),)])
def test_an_input_that_the_model_returns_is_freed(found: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    """A tensor keeps its hooks, which Python's garbage collection does not see."""
    model = Layer(found)
    recalled, before = recalled_of(model), torch.nn.Linear(4, 4)
    x = before(torch.ones(3, 4))
    outputs = model(x)
    sum(each.sum() for each in outputs).backward()
    freed = weakref.ref(x)
    del x, outputs
    recalled.clear()
    gc.collect()
    assert freed() is None


def test_an_output_that_is_used_in_several_steps_collects_no_hooks() -> None:
    model, position = torch.nn.Sequential(torch.nn.Identity()), torch.ones(3, requires_grad=True) * 2
    recalled, counters = Recalled(Tap(model, {"": torch.ones(1)})), Counters(model)
    for _ in range(3):
        model(position)
        recalled.clear()
        counters.clear()
    assert not position._backward_hooks


def test_a_program_that_never_steps_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    recalled, counters = recalled_of(model), Counters(model)
    for _ in range(1500):
        model(torch.ones(1, 2))
    assert len(recalled._kept) == len(counters._rows) == 1024
    assert recalled.kept(1023) is not None
    recalled.clear()
    monkeypatch.setattr("unickpt.training.witness.recalling.MOST_BYTES", 50_000)  # of which random states take 5056 or more
    for _ in range(100):
        model(torch.ones(1, 2))
    assert 5 < sum(each.begun is not None for each in recalled._kept) < 10
    recalled.close()


def test_copies_of_buffers_that_are_written_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unickpt.training.witness.recalling.MOST_BYTES", 1 << 20)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model.register_buffer("queue", torch.zeros(1 << 17))  # 512 KiB
    model.register_buffer("still", torch.zeros(1 << 20))  # 4 MiB, whose only copy is always there
    recalled = recalled_of(model)
    for _ in range(2):
        for _ in range(6):
            model(torch.ones(1, 4))
            model.get_buffer("queue")[0] += 1
        kept = [each.begun.buffers for each in recalled._kept if each.begun is not None]
        assert [float(queue[0]) for queue, _ in kept] == [float(kept[0][0][0]) + at for at in range(2)]
        assert len({still.data_ptr() for _, still in kept}) == 1
        recalled.clear()


def test_an_input_keeps_nothing_of_the_forward_pass_of_another_model() -> None:
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.of = x * 2
            freed.append(weakref.ref(ctx.of))
            return ctx.of.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient * ctx.of

    freed: list[Any] = []
    model = Layer(lambda x, weight: x["given"][0] * weight)
    recalled = recalled_of(model)
    given = Hidden.apply(torch.ones(4, requires_grad=True))
    model({"given": [given]}).detach()
    begun = recalled._kept[0].begun
    assert begun is not None
    kept = begun.args[0]["given"][0]
    assert kept.requires_grad
    assert kept.data_ptr() == given.data_ptr()
    del given
    gc.collect()
    assert freed[0]() is None
    with torch.no_grad():
        kept += 1
    assert recalled.kept(0) is None  # the program has written to it


def test_a_buffer_that_is_replaced_is_not_taken_for_the_one_before() -> None:
    """The new one may lie where the old one was, with the same counter of writes."""
    model, memory = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.zeros(4)
    model.register_buffer("scale", memory.data)
    recalled = recalled_of(model)
    for value in range(3):
        model.scale = memory.fill_(value).data
        model(torch.ones(1, 4))
        begun = recalled._kept[-1].begun
        assert begun is not None
        assert begun.buffers[0].tolist() == [value] * 4


def test_a_watch_that_is_closed_keeps_nothing_of_copies_of_the_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    recalled, counters = recalled_of(model), Counters(model)
    model(torch.ones(1, 4)).sum().backward()
    copied = copy.deepcopy(model)
    recalled.close()
    counters.close()
    copied(torch.ones(1, 4)).sum().backward()
    with torch.no_grad():
        copied(torch.ones(1, 4))
    assert (recalled._kept, recalled._buffers, counters._rows) == ([], [], [])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_layer_that_is_called_again_and_again_fills_no_memory(bad: float) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Identity(), torch.nn.Identity())
    counters = Counters(model)
    model(torch.ones(1, 1)).sum().backward()
    with torch.no_grad():  # as reentrant checkpointing computes it
        for at in range(10_000):
            model[1](torch.tensor([bad if at == 5000 else 1.0]))
    assert [sum(map(len, row.of.values())) < 4100 for row in counters._rows] == [True]
    assert counters.found(lambda: False) == Place("1", False, 0)
    counters.clear()
    model(torch.ones(1, 1))
    for at in range(10_000):
        model[1](torch.tensor([-1e4 if at == 5000 else 1.0]))
    assert counters._rows[0].largest()[False, 2] == 1e4
