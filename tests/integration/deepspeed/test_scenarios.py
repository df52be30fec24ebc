"""The scenarios of ``scenarios_*.py`` on real process groups. One torchrun runs a group of them.

``UNICKPT_FULL_MATRIX=1`` adds optimizers for which DeepSpeed compiles further operators.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from tests.integration.deepspeed.scenario_worker import GROUPS, scenarios
from unickpt.testing.launch import fork_ranks

CASES = [
    (group, world, name)
    for group in GROUPS
    if group != "object_store"  # ``tests/integration/storage`` runs it with a server
    for name, (worlds, _) in scenarios(group).items()
    for world in worlds
]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scenarios")


@cache
def outcomes(root: Path, group: str) -> dict[tuple[str, int], dict[str, str]]:
    """Run all scenarios of a group on all their world sizes. Returns the failures by rank, for each scenario and world size."""
    folder = root / group
    folder.mkdir()
    worlds = sorted({world for each, world, _ in CASES if each == group})
    # The first use of DeepSpeed's C++ optimizers compiles them, which takes minutes.
    fork_ranks(
        worlds[-1], "tests.integration.deepspeed.scenario_worker", group, str(folder),
        "--worlds", ",".join(map(str, worlds)), timeout_s=1500, env={"TORCH_FR_BUFFER_SIZE": "4000"},
    )  # fmt: skip
    found = {world: json.loads((folder / f"w{world}.json").read_text()) for world in worlds}
    return {(name, world): failures for world in worlds for name, failures in found[world].items()}


@pytest.mark.parametrize(("group", "world", "name"), CASES, ids=[f"{name}-{world}" for _, world, name in CASES])
def test_scenario(root: Path, group: str, world: int, name: str) -> None:
    failures = outcomes(root, group).get((name, world))
    if failures is None:
        pytest.skip("this DeepSpeed or this machine lacks the feature, such as libaio")
    assert failures == {}, "\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items())
