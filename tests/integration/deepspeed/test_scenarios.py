"""The scenarios of ``scenarios_*.py`` on real process groups. One torchrun runs a group of them.

``UNICKPT_FULL_MATRIX=1`` adds optimizers for which DeepSpeed compiles further operators.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.jobs.deepspeed.scenario_worker import GROUPS, scenarios
from tests.support import scenarios as support
from tests.support.forked_jobs import fork_ranks

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
def outcomes(root: Path, group: str) -> dict[tuple[str, int], dict[str, str] | str]:
    """Run all scenarios of a group on all their world sizes. See ``tests.support.scenarios.outcomes``."""
    folder = root / group
    folder.mkdir()
    worlds = sorted({world for each, world, _ in CASES if each == group})
    # The first use of DeepSpeed's C++ optimizers compiles them, which takes minutes.
    fork_ranks(
        worlds[-1], "tests.jobs.deepspeed.scenario_worker", group, str(folder),
        "--worlds", ",".join(map(str, worlds)), timeout_s=1500, env={"TORCH_FR_BUFFER_SIZE": "4000"},
    )  # fmt: skip
    return support.outcomes(folder, worlds)


@pytest.mark.parametrize(("group", "world", "name"), CASES, ids=[f"{name}-{world}" for _, world, name in CASES])
def test_scenario(root: Path, group: str, world: int, name: str) -> None:
    failures = outcomes(root, group)[name, world]
    if isinstance(failures, str):
        pytest.skip(failures)
    assert failures == {}, "\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items())
