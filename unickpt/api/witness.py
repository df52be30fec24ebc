"""What a witness has found, for programs."""

from __future__ import annotations

from unickpt.checkpoint.format.witnessed import Passed
from unickpt.training.witness.nonfinite import NonFinite
from unickpt.training.witness.vote import Verdict
from unickpt.training.witness.watching import Watching


class Witness:
    """What a witness has found on this rank."""

    def __init__(self, watching: Watching | None) -> None:
        self._watching = watching

    @property
    def verdicts(self) -> list[Verdict | NonFinite]:
        """What was found, oldest first. Those of ``nonfinite`` are of this rank, all others are the same on
        all ranks."""
        return [] if self._watching is None else list(self._watching.verdicts)

    @property
    def passed(self) -> Passed:
        """The last step that passed all checks but ``nonfinite``, as far as they see something in this job. After a verdict
        about wrong numbers nothing passes any more."""
        if self._watching is None:
            return Passed(0, ())
        return Passed(*self._watching.passed())

    def close(self) -> None:
        """Stop watching."""
        if self._watching is not None:
            self._watching.close()
