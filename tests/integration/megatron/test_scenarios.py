"""The scenarios of ``scenarios_*.py`` on real process groups. One torchrun runs all of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.support.forked_jobs import fork_ranks
from tests.jobs.megatron.scenarios import declared
from tests.support import scenarios

pytest.importorskip("megatron.core")

CASES = [(name, world) for name, worlds in declared().items() for world in worlds]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron-scenarios")


@cache
def outcomes(root: Path) -> dict[tuple[str, int], dict[str, str] | str]:
    """Run all scenarios on all their world sizes. See ``tests.support.scenarios.outcomes``."""
    worlds = sorted({world for _, world in CASES})
    fork_ranks(
        worlds[-1],
        "tests.jobs.megatron.scenario_worker",
        str(root),
        "--worlds",
        ",".join(map(str, worlds)),
        timeout_s=900,
    )
    return scenarios.outcomes(root, worlds)


@pytest.mark.parametrize(("name", "world"), CASES, ids=[f"{name}-{world}" for name, world in CASES])
def test_scenario(root: Path, name: str, world: int) -> None:
    failures = outcomes(root)[name, world]
    if isinstance(failures, str):
        pytest.skip(failures)
    assert failures == {}, "\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items())
