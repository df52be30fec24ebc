"""Phases of training that a program announces itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from unickpt.base.errors import ConfigError

_NAMES = ("evaluate", "checkpoint", "data")


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Tell the diagnosis what this rank does inside the ``with`` block, so that it names no rank for which others may wait.

    Without timing it does nothing.

    Args:
        name: ``evaluate`` (metrics, generation, everything that only some ranks do), ``checkpoint`` (the program writes files
            of its own) or ``data``.

    Returns:
        A context manager.

    Raises:
        ConfigError: another name.

    Example:
        >>> with unickpt.phase("evaluate"):
        ...     score = metric.compute()  # on rank 0 alone
    """
    from unickpt.diagnosis import session
    from unickpt.diagnosis.recording.records import Phase

    if name not in _NAMES:
        raise ConfigError(f"phase {name!r} is unknown; expected one of {', '.join(_NAMES)}")
    with session.in_phase({"evaluate": Phase.EVALUATION, "checkpoint": Phase.CHECKPOINT, "data": Phase.DATA}[name]):
        yield
