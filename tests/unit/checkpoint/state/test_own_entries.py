"""State that only the own code of a module or an optimizer gives is found; that of torch's own code is not asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unickpt.checkpoint.load.report import LoadReport
from unickpt.checkpoint.state import optimizer_entries
from unickpt.checkpoint.state.optimizer_entries import OPTIMIZERS
from unickpt.checkpoint.state.own_entries import of_module


class Counting(torch.optim.AdamW):
    count: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["count"] == "broken":
            raise RuntimeError("not now")
        self.count = state_dict["count"]


class Around(torch.optim.Optimizer):
    """Steps with another optimizer, whose state dict it returns, as some implementations of Lookahead do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


class Failing(torch.optim.AdamW):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not now")


def made(make: Any) -> Any:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = make([parameter])
    optimizer.step()
    return optimizer


def counting(count: Any) -> Counting:
    optimizer: Counting = made(Counting)
    optimizer.count = count
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [
        (made(torch.optim.AdamW), ""),
        (counting(3), ""),
        (counting({"a": [torch.ones(2)]}), "tensors of its own in its state dict (count)"),
        (made(lambda p: Around(torch.optim.AdamW(p))), "another optimizer inside (AdamW), with states of its own"),
        (made(Failing), "a state_dict that fails (RuntimeError: not now)"),
        (counting(torch.tensor(3.0)), ""),
    ],
)
def test_tensors_of_an_optimizer_without_a_place(optimizer: Any, found: str) -> None:
    assert optimizer_entries.unplaced(optimizer) == found


def test_entries_of_an_optimizer() -> None:
    hooked = made(torch.optim.AdamW)
    hooked.register_state_dict_post_hook(lambda _, found: {**found, "more": 1})
    found = optimizer_entries.captured([[counting(3)], [hooked], [made(Failing)], [made(torch.optim.SGD)]])
    assert found.stored == [
        {"class": "Counting", "entries": {"count": 3}}, {"class": "AdamW", "entries": {"more": 1}}, {"class": "Failing"},
        {"class": "SGD"},
    ]  # fmt: skip
    assert found.left_out == ["state_dict of Failing: RuntimeError: not now"]
    found = optimizer_entries.captured([[counting([torch.zeros(300_000)])], [made(torch.optim.AdamW)]])
    assert (found.stored, len(found.left_out)) == ([], 1)
    assert "Counting.count: it has large tensors" in found.left_out[0]


def test_states_that_belong_to_no_parameter() -> None:
    source, target, report = made(torch.optim.AdamW), made(torch.optim.AdamW), LoadReport()
    source.state["step"] = {"done": 3}
    target.state["step"], target.state["more"] = {"done": 1}, 5
    found = optimizer_entries.captured([[source]]).stored
    optimizer_entries.restore([[target]], found, report)
    assert (target.state["step"], target.state["more"]) == ({"done": 3}, 5)
    assert [(each.name, each.outcome) for each in report.entries] == [
        ("optimizer.state['step']", "restored"), ("optimizer.state['more']", "left out"),
    ]  # fmt: skip
    source.state["mean"] = torch.ones(2)
    assert optimizer_entries.unplaced(source) == "tensors of its own in its state dict (mean)"


def test_what_another_optimizer_had_is_told() -> None:
    optimizer, report = made(torch.optim.AdamW), LoadReport()
    optimizer_entries.restore([[optimizer]], _saved(3)[0][OPTIMIZERS], report)
    assert [(each.name, each.outcome) for each in report.entries] == [("Counting.count", "left out")]


def _saved(*counts: Any) -> dict[int, dict[str, Any]]:
    return {rank: {OPTIMIZERS: [{"class": "Counting", "entries": {"count": count}}]} for rank, count in enumerate(counts)}


@pytest.mark.parametrize(
    ("saved", "rank", "before", "world", "count", "reason"),
    [
        (_saved(3, 4), 1, 2, 2, 4, ""),
        (_saved(3, 3), 5, 2, 6, 3, ""),
        (_saved(3, 4), 0, 2, 3, 9, "the 2 ranks that saved have different values"),
        (_saved(3), 1, 1, 2, 3, ""),
        ({0: {}, 1: {}}, 1, 2, 2, 9, "none was saved"),
        (_saved("broken"), 0, 1, 1, 9, "its load_state_dict raised RuntimeError: not now"),
    ],
)
def test_what_a_rank_restores(saved: Any, rank: int, before: int, world: int, count: int, reason: str) -> None:
    optimizer, report = counting(9), LoadReport()
    states = dict(optimizer.state)
    found, why = optimizer_entries.of_rank(saved, rank, before, world)
    optimizer_entries.restore([[optimizer]], found, report, why)
    (entry,) = report.entries
    assert (optimizer.count, entry.name, entry.outcome) == (count, "optimizer.count", "left out" if reason else "restored")
    assert entry.reason.startswith(reason)
    assert dict(optimizer.state) == states


def test_own_entries_of_a_module_and_those_to_skip() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].register_state_dict_post_hook(lambda _, found, prefix, __: found.update({f"{prefix}more": 1}))
    tensors = dict(module.named_parameters())
    assert of_module(module, tensors, (), str) == ["1.more"]
    assert of_module(module, tensors, (), str, lambda child: child is module[1]) == []


class _Fused(torch.nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}upper"] = self.weight[:1]


def test_parts_of_a_weight_are_no_state_of_their_own() -> None:
    module = torch.nn.Sequential(_Fused(2, 2))
    assert of_module(module, dict(module.named_parameters()), (), str) == []


def test_entries_below_a_module_to_skip_do_not_count_for_one_above_it() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].register_state_dict_post_hook(lambda _, found, prefix, __: found.update({f"{prefix}more": 1}))
    module.register_state_dict_post_hook(lambda *_: None)
    assert of_module(module, dict(module.named_parameters()), (), str) == ["1.more"]
    assert of_module(module, dict(module.named_parameters()), (), str, lambda child: child is module[1]) == []
