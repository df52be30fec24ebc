"""The scenarios of ``scenarios.py``, each on real process groups; one torchrun per world size."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from tests.launch import torchrun
from tests.megatron.scenario_worker import declared

pytest.importorskip("megatron.core")

CASES = [(name, world) for name, worlds in declared().items() for world in worlds]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron-scenarios")


@cache
def outcomes(root: Path, world: int) -> dict[str, dict[str, str]]:
    """Run all scenarios on one world size; failures by scenario and rank."""
    torchrun(world, "tests.megatron.scenario_worker", str(root), timeout_s=600)
    found: dict[str, dict[str, str]] = json.loads((root / f"w{world}.json").read_text())
    return found


@pytest.mark.parametrize(("name", "world"), CASES, ids=[f"{name}-{world}" for name, world in CASES])
def test_scenario(root: Path, name: str, world: int) -> None:
    failures = outcomes(root, world)[name]
    assert failures == {}, "\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items())
