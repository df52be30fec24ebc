"""A training that is saved and loaded goes on bit for bit as one that was not, whatever the kind of its state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

import torch_unickpt
import unickpt
from torch_unickpt.held_state import listed_states


def train(model: torch.nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):

        def loss() -> torch.Tensor:
            model.zero_grad()
            found: torch.Tensor = model(torch.randn(3, 4)).abs().pow(2).sum()
            found.backward()  # type: ignore[no-untyped-call]
            return found

        for each in optimizer if isinstance(optimizer, list) else [optimizer]:
            each.step(loss)


def resumed(
    make: Callable[[], tuple[torch.nn.Module, Any]], folder: Path, options: unickpt.SaveOptions | None = None
) -> tuple[Any, Any, torch_unickpt.StartingPoint]:
    """Return a training that went on, and one that was loaded: model and optimizer of both, after the same steps."""
    torch.manual_seed(1)
    first = make()
    train(*first, 3)
    saved = unickpt.save_training(*first, folder / "step3", step=3, options=options)
    train(*first, 3)
    if not isinstance(saved, unickpt.SaveResult):
        saved.wait()
    second = make()
    start = torch_unickpt.load_training(*second, folder / "step3")
    train(*second, 3)
    return first, second, start


def assert_equal(first: Any, second: Any) -> None:
    torch.testing.assert_close(second[0].state_dict(), first[0].state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(second[1].state_dict(), first[1].state_dict(), rtol=0, atol=0)


class Kinds(torch.nn.Module):
    """Parameters that are complex, have no element, and are integers that nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.table = torch.nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.complex64) @ self.weight + self.empty.sum()


@pytest.mark.parametrize("kind", [optim.Adam, optim.ASGD, optim.Rprop, optim.NAdam, optim.SGD])
def test_complex_and_integer_parameters(tmp_path: Path, kind: Any) -> None:
    options = {"momentum": 0.9} if kind is optim.SGD else {}

    def job() -> tuple[torch.nn.Module, Any]:
        model = Kinds()
        return model, kind(model.parameters(), lr=0.01, **options)

    first, second, start = resumed(job, tmp_path)
    assert_equal(first, second)
    assert {entry.outcome for entry in start.report.entries} == {"restored"}


def lbfgs() -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    return model, optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=5)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_lists_of_tensors_of_lbfgs(tmp_path: Path, asynchronous: bool) -> None:
    first, second, start = resumed(lbfgs, tmp_path, unickpt.SaveOptions(asynchronous=asynchronous))
    assert_equal(first, second)
    assert {entry.outcome for entry in start.report.entries} == {"restored"}
    kept = {key: value for key, value in second[1].state_dict()["state"][0].items() if isinstance(value, list)}
    assert {key: len(value) for key, value in kept.items()} == {"old_dirs": 5, "old_stps": 5, "ro": 5, "al": 5}


def test_a_checkpoint_of_lbfgs_without_its_lists_is_refused_or_starts_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = lbfgs()
    train(model, optimizer, 2)
    with monkeypatch.context() as earlier:
        earlier.setattr(listed_states, "flat", lambda state: state)
        unickpt.save_training(model, optimizer, tmp_path / "step2", step=2)
    again, fresh = lbfgs()
    with pytest.raises(unickpt.MismatchError, match=r"lacks states that this job's LBFGS needs: all states of 0\.weight"):
        unickpt.load_training(again, fresh, tmp_path / "step2")
    start = unickpt.load_training(again, fresh, tmp_path / "step2", missing_state="fresh")
    assert [entry.name for entry in start.report.entries if entry.outcome == "re-seeded"] == ["0.weight"]
    assert not fresh.state_dict()["state"]
    train(again, fresh, 1)


def test_the_states_of_a_list_of_tensors() -> None:
    one, two = torch.ones(2), torch.zeros(())
    state = {"step": 1, "Q": [one, [], None, two], "none": [None, None], "plain": [1, 2], "mixed": [one, 3]}
    found = listed_states.flat(state)
    assert list(found) == ["step", "Q[]", "Q[0]", "Q[3]", "none", "plain", "mixed"]
    assert found["Q[]"] == [True, [], None, True]
    assert listed_states.nested(found) == state
    assert listed_states.flat({"step": 1}) == {"step": 1}
    assert listed_states.missing({"Q[]": [True, None, True], "Q[2]": 1.0}, ()) == ["Q[0]"]


def test_a_parameter_of_two_optimizers_is_refused_at_the_save_and_at_the_load(tmp_path: Path) -> None:
    def job() -> tuple[torch.nn.Module, list[optim.Optimizer]]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        return model, [
            optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
            optim.Adam(model[1].parameters()),
            optim.Adam(model.parameters(), lr=0.01),
        ]

    model, optimizers = job()
    train(model, optimizers, 2)
    told = r"0\.weight: SGD \(optimizer\[0\]\) and Adam \(optimizer\[2\]\) hold this parameter.*stateful="
    with pytest.raises(unickpt.SaveFailedError, match=told):
        unickpt.save_training(model, optimizers, tmp_path / "shared", step=2)
    assert not (tmp_path / "shared" / "manifest.json").exists()
    other = {"other": optimizers[2]}
    unickpt.save_training(model, optimizers[:2], tmp_path / "step2", step=2, stateful=other)
    again, fresh = job()
    with pytest.raises(unickpt.UnsupportedLayoutError, match=told):
        unickpt.load_training(again, fresh, tmp_path / "step2")
    unickpt.load_training(again, fresh[:2], tmp_path / "step2", stateful={"other": fresh[2]})
    for each, saved in zip(fresh, optimizers, strict=True):
        torch.testing.assert_close(each.state_dict(), saved.state_dict(), rtol=0, atol=0)


def test_a_parameter_that_one_optimizer_lists_twice_is_saved(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = optim.SGD([model.weight, model.weight, model.bias], lr=0.1, momentum=0.9)
    train(model, optimizer, 1)
    unickpt.save_training(model, optimizer, tmp_path / "step1", step=1)
    unickpt.load_training(model, optimizer, tmp_path / "step1")
