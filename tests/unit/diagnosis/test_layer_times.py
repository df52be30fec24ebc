"""Times of layers against layers that take a known time, on a clock that only they move."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from unickpt.diagnosis.layer_costs.measured import LAYER
from unickpt.diagnosis.recording import layer_times
from unickpt.diagnosis.recording.layer_times import LayerTimes, TimedLayer
from unickpt.planning.plan.layers import layers_of_ranks

FORWARD_S, BACKWARD_S, WIDTH = 0.01, 0.02, 8
now_ns = 0


def take(seconds: float) -> None:
    global now_ns
    now_ns += round(seconds * 1e9)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_times, "time", SimpleNamespace(monotonic_ns=lambda: now_ns))


class Busy(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        take(FORWARD_S)
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        take(BACKWARD_S)
        return grad


class Layer(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Busy.apply(x)).relu_()  # in place: nothing may make a view of it


class Job:
    """Two layers, three calls in a step, as of three microbatches of 1F1B with two in flight."""

    def __init__(self, path: Path, *, every: int = 1, again: bool = False) -> None:
        self.layers = [Layer(WIDTH, WIDTH) for _ in range(2)]
        self.times = LayerTimes(path, every, {"rank": 0, "world": 1, "host": "here"})
        self._again = again
        found = [TimedLayer(at + 3, f"layers.{at + 3}", LAYER, layer, 6) for at, layer in enumerate(self.layers)]
        for _ in range(2):  # the second call for a model changes nothing
            self.times.add(self, lambda: found)

    def forward(self) -> torch.Tensor:
        x = torch.ones(4, WIDTH, requires_grad=True)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self._again else layer(x)
        return x.sum()

    def step(self) -> None:
        first, second = self.forward(), self.forward()
        first.backward()
        third = self.forward()
        second.backward()
        third.backward()
        self.times.stepped()


def hooks(layer: torch.nn.Module) -> int:
    return len(layer._forward_hooks) + len(layer._forward_pre_hooks)


def rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["layers"]
    return found


def test_times_are_those_of_the_layers(tmp_path: Path) -> None:
    path = tmp_path / "00000.layers.json"
    job = Job(path)
    for _ in range(4):
        job.step()
    for row in rows(path):
        assert row["forward_s"] == pytest.approx(FORWARD_S)
        assert row["backward_s"] == pytest.approx(BACKWARD_S)
        assert row["calls"] == 6  # three of each step after the warm-up
        assert row["parameters"] == WIDTH * (WIDTH + 1)
        assert row["shape"] == [4, WIDTH]
        assert row["activation_bytes"] == 2 * 4 * WIDTH * 4  # the input, and the output of relu
    assert [row["number"] for row in rows(path)] == [3, 4]
    model = layers_of_ranks({"rank 0": json.loads(path.read_text())})
    assert [each.forward_s > 0 for each in model] == [False, False, False, True, True, False]


def test_the_newest_samples_show_the_time_of_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "00000.layers.json"
    job = Job(path)
    for _ in range(6):
        job.step()
    monkeypatch.setitem(globals(), "FORWARD_S", 0.03)
    for _ in range(2):
        job.step()
    row = rows(path)[0]
    assert row["forward_s"] == pytest.approx(0.01)
    assert row["recent_s"] == pytest.approx(0.03 + BACKWARD_S)  # two of the three newest samples are slow


def test_recomputation_is_part_of_the_backward_time(tmp_path: Path) -> None:
    path = tmp_path / "00000.layers.json"
    job = Job(path, again=True)
    for _ in range(3):
        job.step()
    for row in rows(path):
        assert row["forward_s"] == pytest.approx(FORWARD_S)
        assert row["backward_s"] == pytest.approx(FORWARD_S + BACKWARD_S)
        assert row["calls"] == 3
        assert row["activation_bytes"] == 4 * WIDTH * 4  # the input


def test_only_sampled_steps_have_hooks(tmp_path: Path) -> None:
    path = tmp_path / "00000.layers.json"
    job = Job(path, every=3)
    seen = []
    for _ in range(9):
        job.step()
        seen.append(hooks(job.layers[0]))
    assert seen == [0, 2, 2, 2, 2, 0, 0, 2, 0]  # three at first, then one out of three
    assert json.loads(path.read_text())["steps"] == 5
    assert rows(path)[0]["calls"] == 15
    job.times.stop()
    job.times.stepped()
    assert not job.layers[0].weight._backward_hooks


def test_an_error_in_a_layer_leaves_no_hooks_on_saved_tensors(tmp_path: Path) -> None:
    job = Job(tmp_path / "00000.layers.json")
    for _ in range(2):
        job.times.stepped()
    with pytest.raises(RuntimeError):
        job.layers[0](torch.ones(1, WIDTH + 1))
    job.times.stop()
    saved = (torch.ones(3, requires_grad=True) ** 2).grad_fn
    assert not isinstance(torch._C._autograd._top_saved_tensors_default_hooks(False), tuple)
    assert saved is not None


def test_gradients_are_the_same(tmp_path: Path) -> None:
    job = Job(tmp_path / "00000.layers.json")
    job.step()
    job.step()
    before = [layer.weight.grad.clone() / 2 for layer in job.layers if layer.weight.grad is not None]
    for layer in job.layers:
        layer.weight.grad = None
    job.step()  # with hooks
    for layer, expected in zip(job.layers, before, strict=True):
        torch.testing.assert_close(layer.weight.grad, expected)


def test_the_data_type_is_that_of_autocast_or_of_the_parameters(tmp_path: Path) -> None:
    for number, (autocast, cast) in enumerate(((False, torch.float32), (True, torch.float32), (False, torch.bfloat16))):
        job = Job(tmp_path / f"{number:05d}.layers.json")
        for each in job.layers:
            each.to(cast)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for _ in range(4):
                x = torch.ones(4, WIDTH, dtype=cast)
                job.layers[1](job.layers[0](x)).sum().backward()
                job.times.stepped()
        rows = json.loads((tmp_path / f"{number:05d}.layers.json").read_text())["layers"]
        assert [row["dtype"] for row in rows] == ["bfloat16" if number else "float32"] * 2
