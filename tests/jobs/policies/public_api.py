"""The cases of ``cases.py`` with the public API: a program without a framework."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import unickpt
from tests.jobs.policies import cases
from unickpt.checkpoint.load.report import LoadReport


class Job:
    refused = unickpt.MismatchError

    def __init__(self, *, seed: int, frozen: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        self.model[1].requires_grad_(not frozen)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad])
        self.settings = self.optimizer.param_groups[0]

    def train(self) -> None:
        self.model(torch.ones(2, 3)).square().sum().backward()
        self.optimizer.step()

    def _state(self, *, create: bool) -> dict[Any, torch.Tensor]:
        found: dict[Any, torch.Tensor] = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq") if parameter.requires_grad else ():
                state = self.optimizer.state[parameter]
                if create:
                    state.setdefault(key, torch.zeros_like(parameter))
                found[name, key] = state[key]
        return found

    def save(self, folder: Path) -> Path:
        settings = {key: value for key, value in self.settings.items() if key != "params"}
        unickpt.save_checkpoint(self._state(create=False), folder / "step1", step=1, objects={"settings": settings})
        return folder / "step1"

    def load(self, folder: Path, **options: Any) -> LoadReport:
        loaded = unickpt.load_checkpoint(folder, self._state(create=True), **options)
        self.settings.update(loaded.objects["settings"])
        return loaded.report

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def moments(self) -> dict[str, torch.Tensor]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {names[parameter]: state["exp_avg"].clone() for parameter, state in self.optimizer.state.items()}


def _make(**options: Any) -> cases.Subject:
    return Job(**options)


if __name__ == "__main__":
    cases.run(_make, Path(sys.argv[1]))
