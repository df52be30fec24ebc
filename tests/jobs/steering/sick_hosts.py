"""Jobs of which a host becomes sick: what the agents do, and what the job has in the end."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.jobs.steering.agents import Agents
from tests.jobs.steering.witness_worker import EVERY, STEPS, WORKER
from tests.support.forked_jobs import fork_ranks
from tests.support.repository import REPO
from unickpt.checkpoint.format.witnessed import WitnessFault
from unickpt.checkpoint.witness_faults import read_faults

HOSTS = ("n1", "n2", "n3")
SPARE = "n4"
_PARKED = re.compile(r"order: park (\S+): WITNESS_OUT: (SDC_\w+)")
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sickness:
    """How a host is sick.

    Attributes:
        host: its name.
        first, last: steps.
        kind: ``activation``, or ``weight``: after the step.
    """

    host: str
    first: int
    last: int
    kind: str

    @property
    def resumes_at(self) -> int:
        """Return the step from which the job should go on: the last one that passed all checks before the fault was found.

        ``buddy`` finds an activation before the checked step ends. A weight that changes after a checked step is found by
        ``rest`` before the next step, and otherwise by ``replicas`` after the next checked step.
        """
        checked = -(-self.first // EVERY) * EVERY
        return checked - EVERY


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        parked: hosts that were taken out, and the verdicts.
        starts: steps from which its rounds went on.
        faults: what the folder of its checkpoints has.
        final: weights after the last step.
        text: what the agents have logged.
    """

    parked: tuple[tuple[str, str], ...]
    starts: tuple[int, ...]
    faults: tuple[WitnessFault, ...]
    final: Weights
    text: str


def sound(folder: Path, framework: str, at: int) -> Weights:
    """Return the weights of a job in which nothing is wrong, and which starts again after a step: 0: it does not.

    DDP has other buckets in a first step, and gloo adds in another order then.
    """
    for last in filter(None, (at, STEPS)):
        fork_ranks(
            len(HOSTS), "tests.jobs.steering.witness_worker", str(folder), str(last), framework, timeout_s=240, folder=REPO,
            framework="" if framework == "torch" else framework,
        )  # fmt: skip
    found: Weights = torch.load(folder / "final.pt")
    return found


def with_sick_host(folder: Path, framework: str, sick: Sickness) -> Outcome:
    """Run a job of three hosts and a spare, of which one becomes sick, to its end."""
    (folder / "sick").write_text(f"{sick.host} {sick.first} {sick.last} {sick.kind}")
    agents = Agents(folder, "3", worker=str(WORKER))
    agents.program += [str(STEPS), framework]
    try:
        for name in HOSTS:
            agents.start(name)
        agents.until_said(f"rank {len(HOSTS) - 1} of {len(HOSTS)}")
        agents.start(SPARE)
        agents.until_said("WITNESS_OUT: SDC_")
        agents.finish()
    finally:
        agents.close()
    text = agents.text()
    starts = [step for _, step in sorted({(each.round, each.step) for each in agents.starts()})]
    parked = tuple(dict.fromkeys((host, kind) for host, kind in _PARKED.findall(text)))
    return Outcome(parked, tuple(starts), read_faults(folder / "out"), torch.load(folder / "final.pt"), text)


def equal(some: Weights, others: Weights) -> bool:
    """Return whether all weights are equal in all bits."""
    return some.keys() == others.keys() and all(
        torch.equal(some[name], others[name]) for name in some if isinstance(some[name], torch.Tensor)
    )
