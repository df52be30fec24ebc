"""State of modules beside parameters and buffers goes with a save, or is named as not saved."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_unickpt
import unickpt
from torch_unickpt.held_state import module_states
from torch_unickpt.held_state.module_states import own_entries
from torch_unickpt.held_state.names import names_of
from unickpt.checkpoint.load.report import LoadReport


class Counting(torch.nn.Module):
    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.inner, self.state = torch.nn.Linear(2, 2), state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Local:
    """A value that only pickle can store."""


def outcomes(report: LoadReport) -> dict[str, tuple[str, str]]:
    """Return what became of extra states and of the entries of a state dict."""
    others = ("rng", "engine", "lr_scheduler", "stateful", "client_state", "module_extra_state")
    found = [each for each in report.entries if each.state == "object" and each.name not in others]
    return {each.name: (each.outcome, each.reason) for each in found}


@pytest.mark.parametrize("wrap", [torch.nn.Identity, torch.compile], ids=["plain", "compiled"])
def test_extra_states_are_restored(tmp_path: Path, wrap: Any) -> None:
    wrap = (lambda module: module) if wrap is torch.nn.Identity else wrap
    states = [{"n": 3, "scale": torch.tensor([1.5])}, (1, "a"), None]
    model = torch.nn.Sequential(*map(Counting, states), torch.nn.Linear(2, 2))
    again = torch.nn.Sequential(*map(Counting, [0, 0, 0]), torch.nn.Linear(2, 2))
    for step in (1, 2):  # a description, and one that an earlier save has made
        model[1].state = (step, "a")
        unickpt.save_training(wrap(model), None, tmp_path / f"step{step}", step=step)
        start = torch_unickpt.load_training(wrap(again), None, tmp_path / f"step{step}")
        torch.testing.assert_close(again[0].state, states[0], rtol=0, atol=0)
        assert (again[1].state, again[2].state) == ((step, "a"), None)
        assert outcomes(start.report) == {f"module_extra_state.{at}": ("restored", "") for at in range(3)}


def test_the_extra_state_of_the_model_itself(tmp_path: Path) -> None:
    model = Counting(5)
    unickpt.save_training(model, None, tmp_path / "step1", step=1)
    again = Counting(0)
    start = torch_unickpt.load_training(again, None, tmp_path / "step1")
    assert again.state == 5
    assert outcomes(start.report) == {"module_extra_state.": ("restored", "")}


def test_what_only_one_side_has_is_told(tmp_path: Path) -> None:
    without = torch.nn.Sequential(torch.nn.Sequential())
    without[0].inner = torch.nn.Linear(2, 2)
    unickpt.save_training(without, None, tmp_path / "without", step=1)
    unickpt.save_training(torch.nn.Sequential(Counting(5)), None, tmp_path / "with", step=1)
    again = torch.nn.Sequential(Counting(7))
    start = torch_unickpt.load_training(again, None, tmp_path / "without")
    assert again[0].state == 7
    assert outcomes(start.report) == {"module_extra_state.0": ("left out", "none was saved: the module keeps its own")}
    start = torch_unickpt.load_training(without, None, tmp_path / "with")
    assert outcomes(start.report) == {"module_extra_state.0": ("left out", "this job has no such module")}


@pytest.mark.parametrize("state", [Local(), {"a": 1, "b": [Local()]}], ids=["whole", "part"])
def test_a_state_that_needs_pickle_is_set_whole_or_not_at_all(tmp_path: Path, state: Any) -> None:
    unickpt.save_training(torch.nn.Sequential(Counting(state), Counting(6)), None, tmp_path / "step1", step=1)
    again = torch.nn.Sequential(Counting(7), Counting(7))
    start = torch_unickpt.load_training(again, None, tmp_path / "step1")
    assert (again[0].state, again[1].state) == (7, 6)
    told = outcomes(start.report)
    assert told["module_extra_state.0"][0] == "left out"
    assert told["module_extra_state.0"][1].endswith(": the module keeps its own")
    torch_unickpt.load_training(again, None, tmp_path / "step1", allow_pickle=True)
    assert type(again[0].state) is type(state)


class OwnEntry(torch.nn.Linear):
    """A tensor that only its own code for a state dict gives."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.count, self.asked = torch.ones(1), 0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = self.count
        self.asked += 1


def test_what_only_a_state_dict_has_is_told_once_at_the_save_and_at_the_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Sequential(OwnEntry(), torch.nn.Linear(2, 2))
    for step in (1, 2, 3):
        unickpt.save_training(model, None, tmp_path / f"step{step}", step=step)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert "0.count: only the module's own code for a state dict gives this, so it is NOT saved." in told[0]
    assert model[0].asked == 1
    start = torch_unickpt.load_training(model, None, tmp_path / "step3")
    assert outcomes(start.report)["0.count"][0] == "left out"


def test_code_for_a_state_dict_that_adds_nothing_is_no_loss() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), Counting(1))
    model.append(model[2])  # under a second name
    torch.nn.utils.spectral_norm(model[0])
    torch.nn.utils.parametrizations.weight_norm(model[2].inner)
    model._register_state_dict_hook(lambda _, entries, __, ___: entries)
    assert own_entries(model, names_of(model)) == []
    added = functools.partial(lambda key, *args: args[1].update({key: torch.ones(1)}), "more")
    model._register_state_dict_hook(added)
    assert own_entries(model, names_of(model)) == ["more"]

    def fails(*_: Any) -> None:
        raise KeyError("no")

    model[1].register_state_dict_pre_hook(fails)
    assert own_entries(model[1], names_of(model[1])) == ["state_dict of BatchNorm1d (KeyError: 'no')"]


def test_deepspeed_stores_them_under_the_same_key() -> None:
    pytest.importorskip("deepspeed")
    from ds_unickpt.held_state.engine_view import EXTRA_STATE

    assert EXTRA_STATE == module_states.EXTRA_STATE
    assert list(module_states.shared({"a": 1})) == [f"{EXTRA_STATE}/a"]


class Refusing(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return {"version": 2}

    def set_extra_state(self, state: Any) -> None:
        raise ValueError(f"version {state['version']}")


def test_a_module_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Refusing(2, 2))
    unickpt.save_training(model, None, tmp_path / "step1", step=1)
    with pytest.raises(unickpt.MismatchError, match=r"module 1: set_extra_state of Refusing .*ValueError: version 2"):
        torch_unickpt.load_training(model, None, tmp_path / "step1")
