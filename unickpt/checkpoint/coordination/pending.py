"""Handle of background work on one rank."""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar

from unickpt.base.errors import CoordinationError


class Committable(Protocol):
    """Result of background work."""

    @property
    def committed(self) -> bool:
        """Whether the checkpoint exists."""


OutcomeT = TypeVar("OutcomeT", bound=Committable)


class Pending(Generic[OutcomeT]):
    """One save or upload of this rank, which may be unfinished.

    Attributes:
        written: set when this rank has finished its own part or has given it up.
        result: the result; None until it is known.
        error: the ranks could not agree, because a rank is gone or did not arrive in time.
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
        """Wait until the work ends. Return False after the timeout."""
        return self._over.wait(timeout_s)

    def _known(self, result: OutcomeT | None, error: CoordinationError | None) -> None:
        self.result, self.error = result, error
        self.written.set()
