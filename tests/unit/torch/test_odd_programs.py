"""Sound programs with plain torch that do something unusual beside saves: the program goes on as without unickpt."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_unickpt
import unickpt


def job(width: int = 4, layers: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()


@pytest.fixture
def another_default_device() -> Iterator[None]:
    """Such as ``cuda``: a tensor on it cannot be read in host memory."""
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("another_default_device")
def test_a_default_device_has_no_effect_on_saves_loads_and_the_witness(tmp_path: Path) -> None:
    model, optimizer = job()
    x = torch.randn(3, 4)
    torch.set_default_device("meta")
    for number, asynchronous in enumerate((False, True, True)):
        options = unickpt.SaveOptions(asynchronous=asynchronous)
        saved: Any = unickpt.save_training(model, optimizer, tmp_path / f"s{number}", step=number, options=options)
        if asynchronous:
            saved.wait()
        assert saved.committed
    weights = [each.detach().clone() for each in model.parameters()]
    step(model, optimizer)
    start = unickpt.load_training(model, optimizer, tmp_path / "s2")
    assert start.step == 2
    assert all(torch.equal(own, value) for own, value in zip(model.parameters(), weights, strict=True))
    watching = torch_unickpt.witness(model, optimizer, {"every": 1, "checks": ["nonfinite", "outlier", "rest"]})
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    assert watching.verdicts == []
    watching.close()


def test_a_program_may_swap_tensors_after_a_save(tmp_path: Path) -> None:
    model, optimizer = job()
    for number in range(2):
        unickpt.save_training(model, optimizer, tmp_path / f"s{number}", step=number)
        gc.collect()
    weight: Any = model[0].weight  # type: ignore[index]
    torch.utils.swap_tensors(weight, torch.nn.Parameter(torch.full((4, 4), 3.0)))
    unickpt.save_training(model, optimizer, tmp_path / "s2", step=2)
    other, _ = job()
    unickpt.load_training(other, None, tmp_path / "s2")
    assert torch.equal(other[0].weight, torch.full((4, 4), 3.0))  # type: ignore[index]


def test_a_forked_child_may_step_while_a_save_copies(tmp_path: Path) -> None:
    model, optimizer = job(512, 16)
    options = unickpt.SaveOptions(asynchronous=True)
    unickpt.save_training(model, optimizer, tmp_path / "s0", step=0, options=options).wait()
    for number in range(1, 4):
        step(model, optimizer)
        saved = unickpt.save_training(model, optimizer, tmp_path / f"s{number}", step=number, options=options)
        child = os.fork()
        if not child:
            signal.alarm(20)
            step(*job())
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        saved.wait()
        assert saved.committed


def test_counters_may_be_integers_of_numpy(tmp_path: Path) -> None:
    model, optimizer = job()
    step_, samples, seed = np.array([4, 8, 3])
    unickpt.save_training(model, optimizer, tmp_path / "s4", step=step_, samples=samples)
    start = unickpt.load_training(model, optimizer, tmp_path)
    assert (start.step, start.samples) == (4, 8)
    orders = [list(unickpt.GlobalOrderSampler(5, rank=0, ranks=1, per_device=1, epochs=1, seed=each)) for each in (3, seed)]
    assert orders[0] == orders[1]


@pytest.mark.parametrize("step", [2**62, 2**80, -1, True, 3.0])
def test_a_step_that_no_load_accepts_is_refused_by_the_save(step: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(unickpt.SaveFailedError, match=r"rank 0: step .* expected an integer from 0 to 2\*\*62 - 1"):
        unickpt.save_training(model, None, tmp_path / "refused", step=step)
    assert not (tmp_path / "refused").exists()
    unickpt.save_training(model, None, tmp_path / "last", step=2**62 - 1)
    assert unickpt.load_training(model, None, tmp_path / "last").step == 2**62 - 1


def test_a_sparse_tensor_is_refused_by_name(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].register_buffer("mask", torch.eye(2).to_sparse())
    for asynchronous in (False, True):
        options = unickpt.SaveOptions(asynchronous=asynchronous)
        with pytest.raises(unickpt.SaveFailedError, match=r"0\.mask \(weight\): has the layout sparse_coo"):
            unickpt.save_training(model, None, tmp_path / "step1", step=1, options=options)


def test_a_model_without_shapes_is_refused_by_name(tmp_path: Path) -> None:
    model, empty = (torch.nn.Sequential(torch.nn.LazyLinear(2)) for _ in range(2))
    with pytest.raises(unickpt.SaveFailedError, match=r"0\.weight, 0\.bias: no shape yet"):
        unickpt.save_training(model, None, tmp_path / "step1", step=1)
    model(torch.zeros(1, 3))
    unickpt.save_training(model, None, tmp_path / "step1", step=1)
    with pytest.raises(unickpt.UnickptError, match=r"0\.weight, 0\.bias: no shape yet"):
        torch_unickpt.resume_or_start(empty, None, tmp_path)
    empty(torch.zeros(1, 3))
    assert torch_unickpt.resume_or_start(empty, None, tmp_path).step == 1
    torch.testing.assert_close(empty[0].weight, model[0].weight, rtol=0, atol=0)
