"""A program passes something else than a save or a load takes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_unickpt
import unickpt


def job() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters())


def test_arguments_in_another_order_are_named(tmp_path: Path) -> None:
    model, optimizer = job()
    calls: list[tuple[Any, str]] = [
        (partial(unickpt.save_training, step=1), "directory"), (unickpt.load_training, "directory"),
        (torch_unickpt.resume_or_start, "folder"),
    ]  # fmt: skip
    for call, name in calls:
        order = f"expected a path or a URL, got AdamW. The order is model, optimizer, {name}"
        with pytest.raises(unickpt.ConfigError, match=order):
            call(tmp_path, model, optimizer)
        with pytest.raises(unickpt.ConfigError, match="model: expected Module, got OrderedDict"):
            call(model.state_dict(), optimizer, tmp_path / "new")
    with pytest.raises(unickpt.ConfigError, match=r"got OrderedDict\. The order is state, directory"):
        unickpt.save_checkpoint(tmp_path, model.state_dict(), step=1)  # type: ignore[arg-type]
    with pytest.raises(unickpt.ConfigError, match=r"got OrderedDict\. The order is directory, state"):
        unickpt.load_checkpoint(model.state_dict(), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(unickpt.ConfigError, match="state: expected Mapping, got Linear"):
        unickpt.save_checkpoint(model, tmp_path / "new", step=1)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"scheduler": 3}, "scheduler: expected an object with {}, got int"),
        ({"scheduler": [torch.nn.Linear(1, 1), 3.0]}, "scheduler: expected an object with {}, got float"),
        ({"loader": [1]}, "loader: expected an object with {}, got list"),
        ({"stateful": {"ema": {}}}, "stateful['ema']: expected an object with {}, got dict"),
        ({"stateful": [1]}, "stateful: expected a dictionary, got list"),
        ({"client_state": [1]}, "client_state: expected a dictionary, got list"),
    ],
)
def test_what_is_no_state_is_named_and_the_save_before_it_stays(tmp_path: Path, arguments: dict[str, Any], found: str) -> None:
    model, optimizer = job()
    unickpt.save_training(model, optimizer, tmp_path / "a", step=1)
    with pytest.raises(unickpt.SaveFailedError) as failed:
        unickpt.save_training(model, optimizer, tmp_path / "b", step=2, **arguments)
    assert str(failed.value).count(found.format("state_dict")) == 1, "said once"
    assert not (tmp_path / "b").exists()
    if "client_state" not in arguments:
        with pytest.raises(unickpt.ConfigError) as refused:
            unickpt.load_training(model, optimizer, tmp_path, **arguments)
        assert found.format("load_state_dict") in str(refused.value)
    assert unickpt.load_training(model, optimizer, tmp_path).step == 1


@pytest.mark.parametrize("name", ["options", "memory"])
def test_options_are_objects(tmp_path: Path, name: str) -> None:
    model, optimizer = job()
    with pytest.raises(unickpt.ConfigError, match=f"{name}: expected (Save|Memory)Options, got dict"):
        unickpt.save_training(model, optimizer, tmp_path / "a", step=1, **{name: {"keep_last": 3}})


def test_a_word_that_is_no_choice_is_refused(tmp_path: Path) -> None:
    """Otherwise ``verify=True`` would check no data."""
    model, optimizer = job()
    unickpt.save_training(model, optimizer, tmp_path / "a", step=1)
    words: list[dict[str, Any]] = [{"verify": True}, {"verify": "all"}, {"missing_state": "anew"}]
    for each in words:
        ((name, value),) = each.items()
        with pytest.raises(unickpt.ConfigError, match=f"{name} must be .*, not {value!r}"):
            unickpt.load_training(model, optimizer, tmp_path, **each)
        with pytest.raises(unickpt.ConfigError, match=f"{name} must be .*, not {value!r}"):
            unickpt.load_checkpoint(tmp_path, {"weight": torch.zeros(2, 2)}, **each)
    with pytest.raises(unickpt.ConfigError, match="missing_state must be one of"):
        torch_unickpt.resume_or_start(model, optimizer, tmp_path, missing_state="anew")  # type: ignore[arg-type]
    with pytest.raises(unickpt.ConfigError, match="on_busy must be one of wait, skip, queue, not 'later'"):
        unickpt.SaveOptions(on_busy="later")
    with pytest.raises(unickpt.ConfigError, match="MemoryOptions: replicas must be a whole number, not '2'"):
        unickpt.MemoryOptions(replicas="2")  # type: ignore[arg-type]
    with pytest.raises(unickpt.ConfigError, match="staging_bytes must be a number, at least 0, not '1GB'"):
        unickpt.SaveOptions(staging_bytes="1GB")  # type: ignore[arg-type]
    with pytest.raises(unickpt.ConfigError, match="retention must be a Retention, not 3"):
        unickpt.SaveOptions(retention=3)  # type: ignore[arg-type]
    for wrong in (-1, "3", 1.5):
        with pytest.raises(unickpt.ConfigError, match="keep_last must be a whole number, at least 0, not "):
            unickpt.Retention(keep_last=wrong)  # type: ignore[arg-type]
    assert unickpt.MemoryOptions(folder=tmp_path).folder == str(tmp_path)  # type: ignore[arg-type]
