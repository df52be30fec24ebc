"""What a verdict does to the job: its checkpoints become suspect, and the agents are asked to take a host out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from unickpt.base.errors import UnickptError
from unickpt.base.logs import logger
from unickpt.base.round_folder import Accused, folder_of_round, note_accused
from unickpt.checkpoint.checkpoint_folder import manifests_in
from unickpt.checkpoint.format.witnessed import Passed, WitnessFault, passed_until, suspicion
from unickpt.checkpoint.witness_faults import FaultFolders, add_fault, read_faults
from unickpt.diagnosis import session
from unickpt.training.witness import words
from unickpt.training.witness.vote import Verdict
from unickpt.training.witness.watching import Watching


class Recorded:
    """What the checkpoints of a model say of its witness, and what a verdict does to them.

    Args:
        watching: the witness.
        folders: of the checkpoints. Used on the first rank.
        of_run: returns the folders with the checkpoints of a run by one of them, if each has a folder of its own.
    """

    def __init__(
        self, watching: Watching, folders: FaultFolders, of_run: Callable[[str], Sequence[str]] = lambda folder: (folder,)
    ) -> None:
        self._watching, self.folders, self._of_run = watching, folders, of_run

    def passed(self, folder: str) -> Passed:
        """Return what a checkpoint that is saved into a folder now says."""
        return self.folders.passed(folder, *self._watching.passed())

    def act(self, verdict: Verdict) -> None:
        """See ``act``."""
        every = dict.fromkeys(folder for known in self.folders.known() for folder in self._of_run(known))
        act(verdict, self._watching.passed()[0], list(every))

    def may_act(self) -> None:
        """Let the first verdict about wrong numbers act, or say why it does not. Every rank calls it; the first one acts."""
        if not self._watching.job.leads:
            return
        if folder_of_round() is None:
            logger.warning("unickpt: witness: act needs torchrun --rdzv-backend unickpt: the witness reports and does not act")
        else:
            self._watching.wrongs.append(self.act)


def accused_of(verdict: Verdict, at_ns: int) -> Accused:
    """Return what the agents are asked. A rank is accused if two other hosts agree against its host."""
    ranks = tuple(rank for rank, host in zip(verdict.ranks, verdict.hosts, strict=True) if host in verdict.blamed)
    return Accused(ranks, words.text(verdict), at_ns)


def act(verdict: Verdict, passed: int, folders: Sequence[str]) -> None:
    """Note the fault in the folders of the checkpoints, then ask the agents. One rank calls it. Never raises.

    Args:
        verdict: what was found.
        passed: last step that passed on all ranks in this process.
        folders: into which the model is saved. They count as one: a checkpoint of one says what those of all have passed.
    """
    if not folders:
        logger.error("unickpt: witness: no folder of checkpoints is known yet: none is marked as suspect")
    after = passed
    for folder in folders:
        try:
            after = max(after, _passed_before(folder))
        except UnickptError as err:
            logger.error("unickpt: witness: nobody knows what the checkpoints in %s had passed: %s", folder, err)
    for folder in folders:
        try:
            add_fault(folder, WitnessFault(after, verdict.subject.step, words.text(verdict)))
            logger.error(
                "unickpt: witness: checkpoints in %s after step %d are suspect: a resume leaves them out. With %s removed they "
                "count again",
                folder, after, "witness.json",
            )  # fmt: skip
        except (UnickptError, OSError) as err:
            logger.error(
                "unickpt: witness: checkpoints in %s are not marked as suspect, and a resume may load one: %s", folder, err
            )
    if session.folder() is None:
        logger.error(
            "unickpt: witness: no agent sees the verdict, because collectives are not timed: no host is taken out, and the job "
            "goes on"
        )
    note_accused(accused_of(verdict, time.time_ns()))


def _passed_before(folder: str) -> int:
    """Return until which step the checkpoints of a folder say that the job had passed."""
    faults = read_faults(folder)
    found = [manifest for _, manifest in manifests_in(folder)]
    return passed_until(each.witness for each in found if suspicion(each.step, each.witness, faults) is None)
