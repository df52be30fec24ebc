"""A host that computes wrongly is out, and the job goes on from a state before its first wrong step."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tests.jobs.steering.agents import Agents
from tests.jobs.steering.witness_worker import STEPS
from tests.support.repository import REPO
from unickpt.checkpoint.witness_faults import read_faults
from unickpt.testing.launch import command, environment

WORKER = REPO / "tests" / "jobs" / "steering" / "witness_worker.py"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights of a job in which nothing is wrong. It starts again after step 6: DDP has other buckets in a first step, and
    gloo adds in another order then."""
    folder = tmp_path_factory.mktemp("sound")
    for last in (6, STEPS):
        words = command(3, str(WORKER), str(folder), str(last))
        subprocess.run(words, cwd=REPO, env=environment(REPO), check=True, timeout=240)
    found: dict[str, torch.Tensor] = torch.load(folder / "final.pt")
    return found


def test_a_host_that_computes_wrongly_is_out_and_leaves_no_trace(tmp_path: Path, sound: dict[str, torch.Tensor]) -> None:
    """n2 computes wrongly from step 7 on. The check of step 8 finds it, and a spare takes its place from step 6 on."""
    (tmp_path / "sick").write_text(f"n2 7 {STEPS}")
    agents = Agents(tmp_path, "3", worker=str(WORKER))
    try:
        for name in ("n1", "n2", "n3", "n4"):
            agents.start(name)
        agents.until_said("order: park n2: WITNESS_OUT: SDC_COMPUTE step 8, micro-batch 0: rank 1 (on n2) computes ")
        agents.finish()
    finally:
        agents.close()
    rounds = sorted({(each.round, each.step) for each in agents.starts()})
    assert [step for _, step in rounds] == [0, 6], agents.text()
    (fault,) = read_faults(tmp_path / "out")
    assert (fault.after, fault.found, fault.gone_back) == (6, 8, True)
    final = torch.load(tmp_path / "final.pt")
    assert all(torch.equal(final[name], sound[name]) for name in sound)
