"""The scenarios of ``scenarios_*.py``, each on real process groups; one torchrun per module.

``UNICKPT_FULL_MATRIX=1`` adds those of optimizers for whose sake alone DeepSpeed would compile more.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from tests.deepspeed.scenario_worker import scenarios
from tests.launch import torchrun

MODULES = (
    "scenarios_state",
    "scenarios_promises",
    "scenarios_errors",
    "scenarios_unsupported",
    "scenarios_surgery",
    "scenarios_placement",
    "scenarios_fidelity",
)
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
def outcomes(root: Path, module: str) -> dict[tuple[str, int], dict[str, str]]:
    """Run all scenarios of a module on all their world sizes; failures by rank, of a scenario and a world."""
    folder = root / module
    folder.mkdir()
    worlds = sorted({world for where, world, _ in CASES if where == module})
    # The first use of DeepSpeed's C++ optimizers compiles them, which takes minutes.
    torchrun(
        worlds[-1], "tests.deepspeed.scenario_worker", f"tests.deepspeed.{module}", str(folder),
        "--worlds", ",".join(map(str, worlds)), timeout_s=1500, env={"TORCH_FR_BUFFER_SIZE": "4000"},
    )  # fmt: skip
    found = {world: json.loads((folder / f"w{world}.json").read_text()) for world in worlds}
    return {(name, world): failures for world in worlds for name, failures in found[world].items()}


@pytest.mark.parametrize(("module", "world", "name"), CASES, ids=[f"{name}-{world}" for _, world, name in CASES])
def test_scenario(root: Path, module: str, world: int, name: str) -> None:
    failures = outcomes(root, module)[name, world]
    assert failures == {}, "\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items())
