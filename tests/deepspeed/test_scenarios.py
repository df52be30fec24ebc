"""The scenarios of ``scenarios_*.py``, each on real process groups; one torchrun per module and world size."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from tests.deepspeed.scenario_worker import scenarios
from tests.launch import torchrun

MODULES = ("scenarios_state", "scenarios_promises", "scenarios_errors", "scenarios_unsupported", "scenarios_surgery")
CASES = [
    (module, world, name)
    for module in MODULES
    for name, (worlds, _) in scenarios(f"tests.deepspeed.{module}").items()
    for world in worlds
]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scenarios")


@cache
def outcomes(root: Path, module: str, world: int) -> dict[str, dict[str, str]]:
    """Run all scenarios of a module on one world size; failures by scenario and rank."""
    folder = root / f"{module}-{world}"
    folder.mkdir()
    # The first use of DeepSpeed's C++ optimizers compiles them, which takes minutes.
    torchrun(
        world, "tests.deepspeed.scenario_worker", f"tests.deepspeed.{module}", str(folder), timeout_s=1500,
        env={"TORCH_FR_BUFFER_SIZE": "4000"},
    )  # fmt: skip
    found: dict[str, dict[str, str]] = json.loads((folder / f"w{world}.json").read_text())
    return found


@pytest.mark.parametrize(("module", "world", "name"), CASES, ids=[f"{name}-{world}" for _, world, name in CASES])
def test_scenario(root: Path, module: str, world: int, name: str) -> None:
    failures = outcomes(root, module, world)[name]
    assert failures == {}, "\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items())
