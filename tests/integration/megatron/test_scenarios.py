"""The scenarios of ``scenarios_*.py`` on real process groups. One torchrun runs all of them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from unickpt.testing.launch import fork_ranks
from tests.integration.megatron.scenarios import declared

pytest.importorskip("megatron.core")

CASES = [(name, world) for name, worlds in declared().items() for world in worlds]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron-scenarios")


@cache
def outcomes(root: Path) -> dict[tuple[str, int], dict[str, str] | str]:
    """Run all scenarios on all their world sizes.

    Returns, for each scenario and world size, the failures by rank, or the reason why it was skipped.
    """
    worlds = sorted({world for _, world in CASES})
    fork_ranks(
        worlds[-1],
        "tests.integration.megatron.scenario_worker",
        str(root),
        "--worlds",
        ",".join(map(str, worlds)),
        timeout_s=900,
    )
    files = [(world, root / f"w{world}{end}.json") for world in worlds for end in ("", "-skipped")]
    return {(name, world): outcome for world, file in files for name, outcome in json.loads(file.read_text()).items()}


@pytest.mark.parametrize(("name", "world"), CASES, ids=[f"{name}-{world}" for name, world in CASES])
def test_scenario(root: Path, name: str, world: int) -> None:
    failures = outcomes(root)[name, world]
    if isinstance(failures, str):
        pytest.skip(failures)
    assert failures == {}, "\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items())
