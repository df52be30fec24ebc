"""Trainings that move between frameworks: stations in sequence, and the state that must be equal between them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.jobs.journeys.families import huggingface_model, rows
from tests.jobs.journeys.station import SEED
from tests.support.rounding import limit_of
from tests.support.forked_jobs import fork_ranks
from unickpt.cli.main import main
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.transform.dialects.hf_layouts import in_memory
from unickpt.transform.dialects.translated_checkpoint import HUGGINGFACE, under_names_of

STEPS = 3


@dataclass(frozen=True)
class Station:
    """Attributes: framework, layout, and number of ranks."""

    kind: str
    layout: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.kind} {self.layout} x{self.ranks}"


def of_transformers(folder: Path, family: str) -> tuple[Path, torch.Tensor]:
    """Save a random transformers model in ``folder/model`` and as a checkpoint, and return its logits."""
    model = huggingface_model(family, seed=SEED)
    model.save_pretrained(folder / "model")
    assert main(["convert", str(folder / "model"), str(folder / "begin")]) == 0
    return folder / "begin", _logits(model)


def exported(checkpoint: Path, folder: Path, like: Path, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the logits of a checkpoint that ``from_pretrained`` loads."""
    from transformers import AutoModelForCausalLM

    assert main(["export", str(checkpoint), str(folder), "--config", str(like), "--shard-gigabytes", "4e-5"]) == 0
    assert len(list(folder.glob("*.safetensors"))) > 1
    return _logits(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype))


def rounding_of_logits(family: str) -> float:
    """Return how far rounding sets the logits of the initial model apart, as ``apart`` does.

    Float64 shows by how much float32 is off.
    """
    model = huggingface_model(family, seed=SEED)
    return limit_of(apart(_logits(model), _logits(model.double())), 1.0)


def _logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(rows(0)[:, :-1]).logits
    return found if found.dtype == torch.float64 else found.float()


def apart(one: Any, other: Any) -> float:
    """Return the largest difference of logits, relative to the largest logit."""
    a, b = torch.as_tensor(one), torch.as_tensor(other)
    return float((a - b).abs().max() / max(float(a.abs().max()), 1.0))


def travelled(folder: Path, family: str, precision: str, stations: list[Station], begin: Path) -> list[dict[str, Any]]:
    """Run the stations, and return their results. Each loads the checkpoint of the previous one, the first one ``begin``."""
    found, source, step = [], str(begin), 0
    for at, station in enumerate(stations):
        out = folder / str(at)
        out.mkdir(parents=True)
        arguments = (station.kind, station.layout, family, precision, source, str(out), str(STEPS), str(step))
        fork_ranks(
            station.ranks, "tests.jobs.journeys.station", *arguments, framework=station.kind.replace("pipeline", "deepspeed")
        )
        found.append(json.loads((out / "station.json").read_text()))
        source, step = str(out / "trained"), step + STEPS
    return found


def uninterrupted(folder: Path, family: str, precision: str, steps: int, begin: Path, *, ranks: int = 2) -> list[float]:
    """Return the losses of one DeepSpeed job with all steps."""
    folder.mkdir(parents=True)
    arguments = ("deepspeed", "zero1", family, precision, str(begin), str(folder), str(steps), "0")
    fork_ranks(ranks, "tests.jobs.journeys.station", *arguments, framework="deepspeed")
    losses: list[float] = json.loads((folder / "station.json").read_text())["losses"]
    return losses


def differences(saved: Path, loaded: Path, family: str) -> tuple[int, list[str]]:
    """Return the number of compared tensors, under transformers names if possible, and those that differ."""
    one, other = (in_memory(Checkpoint.open(path)) for path in (saved, loaded))
    if one.manifest.writer.dialect == HUGGINGFACE:
        other = under_names_of(other, one, chosen=family)
    else:
        one = under_names_of(one, other, chosen=family)
    compared, wrong = 0, []
    for info in one.index.tensors:
        if info.kind == "object":
            continue
        name, state = info.key
        if other.info(name, state) is None and state in ("weight", "master"):
            state = "weight" if state == "master" else "master"  # a job in float32 has only one of them
        if other.info(name, state) is None:
            wrong.append(f"{name} ({state}) is gone")
            continue
        compared += 1
        a, b = one.read_tensor(*info.key), other.read_tensor(name, state)
        if (
            a.dtype != b.dtype and other.info(name, "master") is not None
        ):  # the job computes in another dtype than the initial one
            b = other.read_tensor(name, "master")
        if not torch.equal(a, b):
            wrong.append(f"{name} ({state}): {int((a != b).sum())} of {a.numel()} elements differ")
    return compared, wrong


def steps_of(path: Path) -> set[float]:
    """Return the optimizer steps of all parameters."""
    record = Checkpoint.open(path).manifest.optimizer
    assert record is not None
    return {float(group.hyperparameters["step"]) for group in record.scalars if group.parameters}
