"""Journeys of a training between frameworks: stations one after the other, and what has to be the same at their borders."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.language.families import huggingface_model, rows
from tests.language.station import SEED
from tests.launch import torchrun
from unickpt.cli.main import main
from unickpt.loading import Checkpoint
from unickpt.spellings import in_memory
from unickpt.translated import HUGGINGFACE, under_names_of

STEPS = 3


@dataclass(frozen=True)
class Station:
    """Attributes: framework, its layout, and how many ranks."""

    kind: str
    layout: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.kind} {self.layout} x{self.ranks}"


def of_transformers(folder: Path, family: str) -> tuple[Path, torch.Tensor]:
    """A model of transformers with random weights, in ``folder/model``; as a checkpoint, and its logits."""
    model = huggingface_model(family, seed=SEED)
    model.save_pretrained(folder / "model")
    assert main(["convert", str(folder / "model"), str(folder / "begin")]) == 0
    return folder / "begin", _logits(model)


def exported(checkpoint: Path, folder: Path, like: Path, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits of the model that ``from_pretrained`` makes of a checkpoint."""
    from transformers import AutoModelForCausalLM

    assert main(["export", str(checkpoint), str(folder), "--config", str(like), "--shard-gigabytes", "4e-5"]) == 0
    assert len(list(folder.glob("*.safetensors"))) > 1
    return _logits(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype))


def _logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(rows(0)[:, :-1]).logits.float()
    return found


def apart(one: Any, other: Any) -> float:
    """How far logits are apart, of the largest."""
    a, b = torch.as_tensor(one), torch.as_tensor(other)
    return float((a - b).abs().max() / max(float(a.abs().max()), 1.0))


def travelled(folder: Path, family: str, precision: str, stations: list[Station], begin: Path) -> list[dict[str, Any]]:
    """What the stations told; each begins with what the one before has saved, the first with ``begin``."""
    found, source, step = [], str(begin), 0
    for at, station in enumerate(stations):
        out = folder / str(at)
        out.mkdir(parents=True)
        arguments = (station.kind, station.layout, family, precision, source, str(out), str(STEPS), str(step))
        torchrun(station.ranks, "tests.language.station", *arguments)
        found.append(json.loads((out / "station.json").read_text()))
        source, step = str(out / "trained"), step + STEPS
    return found


def uninterrupted(folder: Path, family: str, precision: str, steps: int, begin: Path) -> list[float]:
    """Losses of one DeepSpeed job that makes all the steps."""
    folder.mkdir(parents=True)
    arguments = ("deepspeed", "zero1", family, precision, str(begin), str(folder), str(steps), "0")
    torchrun(2, "tests.language.station", *arguments)
    losses: list[float] = json.loads((folder / "station.json").read_text())["losses"]
    return losses


def differences(saved: Path, loaded: Path, family: str) -> tuple[int, list[str]]:
    """Tensors compared, under the names of transformers if one has them, and those that are not equal bit for bit."""
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
            state = "weight" if state == "master" else "master"  # a job in float32 has but one of them
        if other.info(name, state) is None:
            wrong.append(f"{name} ({state}) is gone")
            continue
        compared += 1
        a, b = one.read_tensor(*info.key), other.read_tensor(name, state)
        if a.dtype != b.dtype and other.info(name, "master") is not None:  # the job computes in another type than it began with
            b = other.read_tensor(name, "master")
        if not torch.equal(a, b):
            wrong.append(f"{name} ({state}): {int((a != b).sum())} of {a.numel()} elements differ")
    return compared, wrong


def steps_of(path: Path) -> set[float]:
    """Optimizer steps of all parameters."""
    record = Checkpoint.open(path).manifest.optimizer
    assert record is not None
    return {float(group.hyperparameters["step"]) for group in record.scalars if group.parameters}
