"""When a rank counts as evaluating: real modules, in evaluation mode or without gradients."""

from __future__ import annotations

import torch
from torch import nn

from unickpt.diagnosis.recording.evaluation import watch
from unickpt.diagnosis.recording.phases import outside
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


def test_training_ends_an_evaluation() -> None:
    assert outside(Phase.EVALUATION, Phase.FORWARD) == Phase.UNKNOWN
    assert outside(Phase.EVALUATION, Phase.DATA) == Phase.EVALUATION
    assert outside(Phase.FORWARD, Phase.OPTIMIZER) == Phase.FORWARD
