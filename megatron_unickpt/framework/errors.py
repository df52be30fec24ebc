"""Errors of unickpt that are also Megatron's, so that callers that catch Megatron's error type see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.dist_checkpointing.mapping import CheckpointingException

from unickpt.base.errors import UnickptError
from unickpt.checkpoint.coordination.failure import Failure
from unickpt.checkpoint.load.resume import AgreedFailureError


class MegatronCheckpointError(CheckpointingException, UnickptError):  # type: ignore[misc]
    """An error of unickpt that is also Megatron's ``CheckpointingException``.

    Attributes:
        failures: failures of all ranks, if the ranks agreed on them; empty if only this rank raises.
    """

    failures: tuple[Failure, ...] = ()


class MegatronSaveError(MegatronCheckpointError):
    """A checkpoint was not saved. Every rank raises it; earlier checkpoints are intact.

    Attributes:
        directory: directory of the checkpoint; '' if this rank does not know it.
        framework_saves: another attempt would fail in the same way, so Megatron's own format should be used.
    """

    def __init__(self, text: str, *, directory: str = "", framework_saves: bool = False) -> None:
        super().__init__(text)
        self.directory, self.framework_saves = directory, framework_saves


@contextmanager
def as_megatron_errors() -> Iterator[None]:
    """Convert errors of unickpt that leave this block to ``MegatronCheckpointError``."""
    try:
        yield
    except UnickptError as err:
        if isinstance(err, CheckpointingException):
            raise
        raise MegatronCheckpointError(f"{type(err).__name__}: {err}") from err
    except AgreedFailureError as agreed:
        error = agreed.error
        if isinstance(error, UnickptError) and not isinstance(error, MegatronCheckpointError):
            error = MegatronCheckpointError(f"{type(error).__name__}: {error}")
            error.__cause__ = agreed.error
        if isinstance(error, MegatronCheckpointError):
            error.failures = agreed.failures
        raise error from error.__cause__


@contextmanager
def as_agreed_failures() -> Iterator[None]:
    """Convert an error that all ranks have agreed on, and that leaves this block, to ``AgreedFailureError``."""
    try:
        yield
    except MegatronCheckpointError as err:
        if err.failures:
            raise AgreedFailureError(err.failures, err) from None
        raise
