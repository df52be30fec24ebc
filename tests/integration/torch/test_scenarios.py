"""The scenarios of ``tests/jobs/torch/scenarios_*.py`` on real process groups. One job runs all of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.jobs.torch import (  # noqa: F401
    scenarios_dcp,
    scenarios_late_copies,
    scenarios_libraries,
    scenarios_training,
    scenarios_witness,
    scenarios_writers,
)
from tests.jobs.torch.registry import REGISTRY
from tests.support import scenarios
from tests.support.forked_jobs import fork_ranks

CASES = [(name, world) for name, (worlds, _) in REGISTRY.items() for world in worlds]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torch-scenarios")


@cache
def outcomes(root: Path) -> dict[tuple[str, int], dict[str, str] | str]:
    """Run all scenarios on all their world sizes. See ``tests.support.scenarios.outcomes``."""
    worlds = sorted({world for _, world in CASES})
    chosen = ",".join(map(str, worlds))
    fork_ranks(worlds[-1], "tests.jobs.torch.scenario_worker", str(root), "--worlds", chosen, timeout_s=600)
    return scenarios.outcomes(root, worlds)


@pytest.mark.parametrize(("name", "world"), CASES, ids=[f"{name}-{world}" for name, world in CASES])
def test_scenario(root: Path, name: str, world: int) -> None:
    failures = outcomes(root)[name, world]
    if isinstance(failures, str):
        pytest.skip(failures)
    assert failures == {}, "\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items())
