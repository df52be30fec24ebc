"""Something that goes on behind training, on one rank, until its outcome is known."""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar

from unickpt.errors import CoordinationError


class Outcome(Protocol):
    """How it ended."""

    @property
    def committed(self) -> bool:
        """What was to come into being is there."""


OutcomeT = TypeVar("OutcomeT", bound=Outcome)


class Pending(Generic[OutcomeT]):
    """One save or upload of this rank, which may still be going on.

    Attributes:
        written: set when this rank has done its own part, or never will.
        result: None until it is known.
        error: the ranks could not agree (one of them is gone, or did not come in time).
    """

    def __init__(self) -> None:
        self.written = threading.Event()
        self.result: OutcomeT | None = None
        self.error: CoordinationError | None = None
        self._over = threading.Event()

    @property
    def done(self) -> bool:
        return self._over.is_set()

    @property
    def committed(self) -> bool:
        return self.result is not None and self.result.committed

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it is over, after waiting for it."""
        return self._over.wait(timeout_s)

    def _known(self, result: OutcomeT | None, error: CoordinationError | None) -> None:
        self.result, self.error = result, error
        self.written.set()
