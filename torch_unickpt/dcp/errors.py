"""Errors of saves and loads of state dicts. They are those of unickpt, and the one that callers of DCP catch."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from torch.distributed.checkpoint.api import CheckpointException

from unickpt.base.errors import SaveFailedError, UnickptError
from unickpt.checkpoint.coordination.failure import Failure
from unickpt.checkpoint.load.failure import error_of

ByRank: TypeAlias = Mapping[int, tuple[BaseException, traceback.StackSummary]]


class DcpSaveError(SaveFailedError, CheckpointException):
    """A save of a state dict failed.

    Attributes:
        framework_saves: the save of torch itself may succeed.
    """

    def __init__(self, text: str, failures: ByRank | None = None, *, framework_saves: bool = False) -> None:
        Exception.__init__(self, text)  # so it is pickled by its text and its members
        self._failures, self.framework_saves = dict(failures or {}), framework_saves

    __str__ = BaseException.__str__


class DcpLoadError(UnickptError, CheckpointException):
    """A load into a state dict failed. Its cause is the error of this rank."""

    def __init__(self, text: str, failures: ByRank | None = None) -> None:
        Exception.__init__(self, text)
        self._failures = dict(failures or {})

    __str__ = BaseException.__str__


def by_rank(failures: Iterable[Failure], directory: str, what: str) -> ByRank:
    """Return the error of each rank that failed, as DCP has them. ``what``: of the message, such as ``could not load it``."""
    errors = ((each.rank, error_of((each,), where=directory, what=what)) for each in failures)
    return {rank: (error, traceback.StackSummary()) for rank, error in errors}
