"""What a witness has found, for programs."""

from __future__ import annotations

import time

from unickpt.base.witness_notes import WitnessNote, note
from unickpt.checkpoint.format.witnessed import Passed
from unickpt.diagnosis import session
from unickpt.training.witness import words
from unickpt.training.witness.nonfinite import NonFinite
from unickpt.training.witness.vote import Verdict
from unickpt.training.witness.watching import Watching


class Witness:
    """What a witness has found on this rank."""

    def __init__(self, watching: Watching | None) -> None:
        self._watching = watching
        if watching is not None:
            watching.tells.append(_note)

    @property
    def verdicts(self) -> list[Verdict | NonFinite]:
        """What was found, oldest first. Those of ``nonfinite`` and ``outlier`` are of this rank, all others are the
        same on all ranks."""
        return [] if self._watching is None else list(self._watching.verdicts)

    @property
    def passed(self) -> Passed:
        """The last step that passed all checks but ``nonfinite`` and ``outlier``, as far as they see something in this job.
        After a verdict about wrong numbers nothing passes any more."""
        if self._watching is None:
            return Passed(0, ())
        return Passed(*self._watching.passed())

    def close(self) -> None:
        """Stop watching."""
        if self._watching is not None:
            self._watching.close()


def _note(found: Verdict | NonFinite) -> None:
    """Note what was found beside the rings of this host, if the job is timed."""
    folder = session.folder()
    if folder is not None:
        note(folder, note_of(found, time.time_ns()))


def note_of(found: Verdict | NonFinite, at_ns: int) -> WitnessNote:
    """Return what reports and metrics get of a verdict."""
    if isinstance(found, NonFinite):
        text, following = words.nonfinite(found), words.next_nonfinite(found)
        return WitnessNote(found.kind, found.step, (found.rank,), (found.host,), text, following, at_ns)
    text, following = words.text(found), words.next_steps(found)
    return WitnessNote(found.kind.value, found.subject.step, found.ranks, found.hosts, text, following, at_ns)
