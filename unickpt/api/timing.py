"""What a program tells the diagnosis by itself: its phases, and the steps of a loop without DeepSpeed and Megatron."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from unickpt.base.errors import ConfigError
from unickpt.base.options.job import TimingOptions


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

    phases = {"evaluate": Phase.EVALUATION, "checkpoint": Phase.CHECKPOINT, "data": Phase.DATA}
    if name not in tuple(phases):  # of any type
        raise ConfigError(f"phase {name!r} is unknown; expected one of {', '.join(phases)}")
    with session.in_phase(phases[name]):
        yield


def time_collectives(options: TimingOptions | None = None) -> bool:
    """Time the collectives of this process, and start the agent of the host, in a loop of plain torch.

    Call it on every rank once ``torch.distributed`` is initialized, before the model is wrapped. Each step of the optimizer
    that steps first counts as a training step. After a restart the count goes on from the step that ``resume_or_start`` has
    loaded, or else from the one in the state of the optimizer. A second call changes nothing. DeepSpeed and
    Megatron have options for timing, which also record their phases.

    Args:
        options: options of timing; default: enabled, all others as in the reference.

    Returns:
        Whether collectives are timed. Otherwise there is a warning, and training continues.

    Raises:
        ImportError: torch is not installed.

    Example:
        >>> dist.init_process_group("nccl")  # doctest: +SKIP
        >>> unickpt.time_collectives()  # doctest: +SKIP
        True
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from unickpt.base.logs import make_visible
    from unickpt.diagnosis import session

    make_visible()  # otherwise a program without logging of its own shows no verdict
    if session.folder() is not None:  # this function, or a framework's adapter, counts the steps already
        return True
    if session.start(options or TimingOptions(enabled=True), dict) is None:
        return False
    counted: Callable[[], Any] = _nothing  # the optimizer whose steps count, while there is one

    def stepped(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        nonlocal counted
        if counted() is None:
            counted = weakref.ref(optimizer)
            session.stands_at_least(steps_in(optimizer) - 1)
        if counted() is optimizer:
            session.stepped_on()

    register_optimizer_step_post_hook(stepped)
    return True


def _nothing() -> None:
    """There is no optimizer yet."""


def steps_in(optimizer: Any) -> int:
    """Return how many steps an optimizer has done by its own state; 0 if that is not known, or lies on a device."""
    with contextlib.suppress(Exception):  # of any class
        for state in optimizer.state.values():
            step = state.get("step", 0)
            near = isinstance(step, (int, float)) or (step.device.type == "cpu" and not hasattr(step, "full_tensor"))
            return int(step) if near else 0
    return 0
