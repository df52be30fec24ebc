"""What a verdict does to the job: its checkpoints become suspect, and the agents are asked to take a host out."""

from __future__ import annotations

import time
from collections.abc import Sequence

from unickpt.base.errors import UnickptError
from unickpt.base.logs import logger
from unickpt.base.round_folder import Accused, note_accused
from unickpt.checkpoint.checkpoint_folder import manifests_in
from unickpt.checkpoint.format.witnessed import WitnessFault, passed_until, suspicion
from unickpt.checkpoint.witness_faults import add_fault, read_faults
from unickpt.training.witness import words
from unickpt.training.witness.vote import Verdict


def accused_of(verdict: Verdict, at_ns: int) -> Accused:
    """Return what the agents are asked. A rank is accused if two other hosts agree against its host."""
    ranks = tuple(rank for rank, host in zip(verdict.ranks, verdict.hosts, strict=True) if host in verdict.blamed)
    return Accused(ranks, words.text(verdict), at_ns)


def act(verdict: Verdict, passed: int, folders: Sequence[str]) -> None:
    """Note the fault in the folders of the checkpoints, then ask the agents. One rank calls it. Never raises UnickptError.

    Args:
        verdict: what was found.
        passed: last step that passed on all ranks in this process.
        folders: into which the model is saved.
    """
    for folder in folders:
        try:
            after = max(passed, _passed_before(folder))
            add_fault(folder, WitnessFault(after, verdict.subject.step, words.text(verdict)))
            logger.error(
                "unickpt: witness: checkpoints in %s after step %d are suspect: a resume leaves them out. With %s removed they "
                "count again",
                folder, after, "witness.json",
            )  # fmt: skip
        except UnickptError as err:
            logger.error(
                "unickpt: witness: checkpoints in %s are not marked as suspect, and a resume may load one: %s", folder, err
            )
    note_accused(accused_of(verdict, time.time_ns()))


def _passed_before(folder: str) -> int:
    """Return until which step the checkpoints of a folder say that the job had passed."""
    faults = read_faults(folder)
    found = [manifest for _, manifest in manifests_in(folder)]
    return passed_until(each.witness for each in found if suspicion(each.step, each.witness, faults) is None)
