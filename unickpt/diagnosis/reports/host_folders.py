"""Records of a job on all its hosts, from one folder of ring files per host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.detectors.places import MOST, with_places
from unickpt.diagnosis.detectors.verdicts import Reach, Verdict
from unickpt.diagnosis.hardware.kept import kept
from unickpt.diagnosis.recording.ring_folder import HostRings, read_folder
from unickpt.diagnosis.reports.verdict_text import VerdictText, render
from unickpt.diagnosis.snapshot.clocks import clock_offsets, on_one_clock
from unickpt.diagnosis.snapshot.snapshot import KEPT_STEPS, Snapshot, take_snapshot
from unickpt.diagnosis.snapshot.stacks import with_stacks


@dataclass(frozen=True, slots=True)
class Hosts:
    """The records of a job on all its hosts.

    Attributes:
        jobs: records of each folder.
        clock_offsets_ns: by host, offset of its wall clock behind the clock of the first folder, in ns. Estimated from common
            calls.
        clock_error_ns: largest known error of these offsets; 0 for one folder.
        folders: the folders.
    """

    jobs: list[HostRings]
    clock_offsets_ns: dict[str, int]
    clock_error_ns: int = 0
    folders: Sequence[Path] = ()

    def judged(self, *, after_s: float | None) -> list[tuple[Verdict, VerdictText]]:
        """Return the verdicts on the job with their texts; ``after_s`` is the number of seconds that a call may take."""
        told = [kept(folder) for folder in self.folders] or [{} for _ in self.jobs]
        taken = [take_snapshot(job, newest_steps=KEPT_STEPS, hardware=each) for job, each in zip(self.jobs, told, strict=True)]
        snapshot = on_one_clock(taken)
        found = examine(snapshot, after_s=after_s, reach=Reach(tuple(map(str, self.folders)))).with_end()
        verdicts, snapshot = placed(found.verdicts, snapshot, self.folders)
        return [(verdict, render(verdict, snapshot)) for verdict in verdicts]


def placed(verdicts: Sequence[Verdict], snapshot: Snapshot, folders: Sequence[Path]) -> tuple[list[Verdict], Snapshot]:
    """Return the verdicts with the places of their ranks, and the snapshot with their stacks, as the folders show them."""
    wanted = {rank for verdict in verdicts for rank in (*verdict.ranks[:MOST], *verdict.waiting)}
    snapshot = with_stacks(snapshot, folders, wanted)
    return [with_places(verdict, snapshot) for verdict in verdicts], snapshot


def read_hosts(folders: Sequence[Path]) -> Hosts:
    """Read all records of all folders.

    Raises:
        NotACheckpointError: a folder has no ring files.
    """
    jobs = [read_folder(folder) for folder in folders]
    offsets = clock_offsets([take_snapshot(job) for job in jobs]) if len(jobs) > 1 else []
    found: dict[str, int] = {}
    for job, offset in zip(jobs, offsets, strict=False):
        for ring in job.ranks.values():
            found.setdefault(ring.identity.host, offset.ns)
    return Hosts(jobs, found, max((offset.error_ns or 0 for offset in offsets), default=0), folders)
