"""What every save and load decides alike: the same cases for the public API, DeepSpeed and Megatron.

A framework has a ``Subject``; ``run`` runs all cases on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from tests.jobs.deepspeed.logs import Log
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.report import LoadReport

ODD = "held"  # key of the setting that no checkpoint stores


class Subject(Protocol):
    """A job with an optimizer of the family of Adam. Some of its parameters may be frozen.

    Attributes:
        refused: what a load that does not fit raises.
        settings: the live settings of its optimizer.
    """

    refused: type[BaseException]
    settings: Any

    def train(self) -> None:
        """Make one step."""

    def save(self, folder: Path) -> Path:
        """Save, and return the folder of the checkpoint."""

    def load(self, folder: Path, **options: Any) -> LoadReport:
        """Load what ``save`` has written. ``options``: ``missing_state``."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights."""

    def moments(self) -> dict[str, torch.Tensor]:
        """Return copies of the first moments by parameter. A parameter without state may be absent."""


Making = Callable[..., Subject]  # of ``seed`` and ``frozen``


def a_parameter_that_was_frozen_at_the_save_is_refused_or_begins_anew(make: Making, folder: Path) -> None:
    source = make(seed=1, frozen=True)
    source.train()
    source.save(folder)
    weights, moments = source.weights(), source.moments()
    job = make(seed=2, frozen=False)
    before = job.weights()
    with pytest.raises(job.refused, match="missing_state"):
        job.load(folder)
    assert all(torch.equal(value, before[name]) for name, value in job.weights().items())
    report = job.load(folder, missing_state="fresh")
    assert all(torch.equal(value, weights[name]) for name, value in job.weights().items())
    found = job.moments()
    assert moments
    assert all(torch.equal(value, found[name]) for name, value in moments.items())
    assert not any(value.any() for name, value in found.items() if name not in moments)
    assert any(entry.outcome == "re-seeded" for entry in report.entries)


def a_setting_that_cannot_be_stored_is_named_and_left_out(make: Making, folder: Path) -> None:
    source = make(seed=1)
    source.train()
    source.settings[ODD] = threading.Lock()
    with Log() as log:
        place = source.save(folder)
    assert any(ODD in line for line in log.lines), log.lines
    assert (place / "manifest.json").is_file()
    assert Checkpoint.open(place).manifest.step == 1
    job = make(seed=2)
    own = job.settings[ODD] = threading.Lock()
    report = job.load(folder)
    assert job.settings[ODD] is own
    left_out = [entry for entry in report.entries if ODD in entry.name and entry.outcome == "left out"]
    assert len(left_out) == 1, report.entries
    assert all(torch.equal(value, job.weights()[name]) for name, value in source.weights().items())


def run(make: Making, folder: Path) -> None:
    """Run all cases in a folder."""
    for case in (
        a_parameter_that_was_frozen_at_the_save_is_refused_or_begins_anew,
        a_setting_that_cannot_be_stored_is_named_and_left_out,
    ):
        case(make, folder / case.__name__)
