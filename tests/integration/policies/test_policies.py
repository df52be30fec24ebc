"""The decisions that every save and load makes alike (docs/guides/loading.md), in each framework."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forked_jobs import fork_ranks


@pytest.mark.parametrize(
    ("job", "framework"), [("public_api", "torch"), ("deepspeed", "deepspeed"), ("megatron", "megatron.core")]
)
def test_a_framework_decides_as_the_others(job: str, framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    fork_ranks(1, f"tests.jobs.policies.{job}", str(tmp_path), framework=framework.partition(".")[0].replace("torch", ""))
