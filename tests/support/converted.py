"""Fixtures and assertions for checkpoints that are converted from one of Megatron's formats. See ``conversions.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_jobs import fork_ranks
from unickpt.checkpoint.format.manifest import ParameterGroup
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main

ITERATION = "iter_0000002"
Sources = dict[str, str]  # saved layout -> layout that loads the checkpoint; "" for none


def fixtures(worker: str, sources: Sources) -> tuple[Any, Any]:
    """Return the fixtures ``folder`` (saved, converted and loaded jobs) and ``name`` (each of the jobs) for a test module."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        place = tmp_path_factory.mktemp("converted")
        fork_ranks(4, worker, str(place), *(f"{source}:{target}" for source, target in sources.items()))
        return place

    @pytest.fixture(params=list(sources))
    def name(request: pytest.FixtureRequest) -> str:
        found: str = request.param
        return found

    return folder, name


def opened(folder: Path, name: str) -> tuple[Checkpoint, Checkpoint]:
    """Return the converted checkpoint, and the one that unickpt saved of the same job."""
    return Checkpoint.open(folder / name / "converted"), Checkpoint.open(folder / name / "ours")


def assert_same_tensors(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, ours = opened(folder, name)
    tensors = [{info for info in each.index.tensors if info.kind != "object"} for each in (found, ours)]
    assert tensors[0] == tensors[1]
    assert main(["diff", str(folder / name / "converted"), str(folder / name / "ours")]) == 0
    assert "bit for bit" in capsys.readouterr().out
    assert main(["verify", str(folder / name / "converted")]) == 0


def assert_same_hyperparameters_and_steps(folder: Path, name: str) -> None:
    found, ours = (each.manifest.optimizer for each in opened(folder, name))
    assert found is not None
    assert ours is not None
    assert found.name == ours.name
    for what in ("groups", "scalars"):
        here, there = (_by_parameter(getattr(each, what)) for each in (found, ours))
        assert here == there
        assert here.keys() == {info.name for info in opened(folder, name)[0].index.tensors if info.state == "master"}


def _by_parameter(groups: tuple[ParameterGroup, ...]) -> dict[str, str]:
    return {name: json.dumps(group.hyperparameters, sort_keys=True) for group in groups for name in group.parameters}


def assert_loaded(folder: Path, source: str, target: str) -> None:
    result: dict[str, Any] = json.loads((folder / f"{source}-{target}.json").read_text())
    assert result["problems"] == []
    assert result["iteration"] == 2
    assert result["groups"]
    assert all(step == 2 and lr == 0.01 for _, lr, step in result["groups"])
