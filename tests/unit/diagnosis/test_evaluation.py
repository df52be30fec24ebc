"""When a rank counts as evaluating: real modules, in evaluation mode or without gradients."""

from __future__ import annotations

import copy
import io

import torch
from torch import nn

from unickpt.diagnosis.recording.phases import outside
from unickpt.diagnosis.recording.phases import watch_evaluation as watch
from unickpt.diagnosis.recording.records import Phase


class Adapter(nn.Module):
    """A wrapper whose ``generate`` calls the model inside, as that of peft does."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x)


def test_only_runs_outside_of_training_count() -> None:
    seen: list[int] = []
    model, x = Adapter(), torch.ones(1, 2)
    handles = watch(model, lambda: seen.append(1))
    model(x).sum().backward()
    torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=True).sum().backward()
    assert len(seen) <= 2, "a repetition in a backward pass is training; its first pass runs without gradients"
    seen.clear()
    with torch.no_grad():
        model(x)
        assert seen
        seen.clear()
        model.generate(x)
    assert seen
    seen.clear()
    model.eval()
    model(x)
    assert seen
    for handle in handles:
        handle.remove()
    seen.clear()
    model(x)
    assert not seen


class Whole(nn.Module):
    """A model of which no part holds most parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def test_a_watched_model_can_be_pickled_copied_and_compiled() -> None:
    seen: list[int] = []
    model, x = Whole(), torch.ones(1, 2)
    watch(model, lambda: seen.append(1))
    file = io.BytesIO()
    torch.save(model, file)
    assert b"unickpt" not in file.getvalue()
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert torch.equal(read.eval()(x), model(x))
    assert seen == []
    torch.compile(model, backend="eager", fullgraph=True)(x)
    copy.deepcopy(model).eval()(x)
    assert seen == [1], "a copy, such as an average of the weights, is evaluated as the model is"


def test_training_ends_an_evaluation() -> None:
    assert outside(Phase.EVALUATION, Phase.FORWARD) == Phase.UNKNOWN
    assert outside(Phase.CHECKPOINT, Phase.FORWARD) == Phase.UNKNOWN, "as in a program that writes files of its own"
    assert outside(Phase.EVALUATION, Phase.DATA) == Phase.EVALUATION
    assert outside(Phase.FORWARD, Phase.OPTIMIZER) == Phase.FORWARD
