"""``--exit-signal-handler`` of Megatron's scripts: all ranks save at the same iteration, without a collective in each one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from megatron_unickpt.framework import internals
from megatron_unickpt.framework.flags import options_of
from megatron_unickpt.pretraining.scripts import active
from megatron_unickpt.runtime import Runtime
from unickpt.api.preemption import Preemption


def signals_received(runtime: Runtime, wrapped: Callable[..., Any], handler: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``DistributedSignalHandler.signals_received``, which every rank calls once at the end of each iteration.

    Megatron then saves and leaves with exit code 0, which a launcher takes for the end of the training. The process ends by
    SIGTERM instead.
    """
    if not active() or internals.exit_signal(handler) != signal.SIGTERM:
        return wrapped(*args, **kwargs)
    if runtime.preemption is None:
        runtime.preemption = Preemption(grace_seconds=options_of(internals.global_arguments()).grace_seconds)
        if internals.has_received(handler):  # before the first iteration has ended
            runtime.preemption.tell()
    runtime.boundaries += 1
    due = runtime.preemption.due(runtime.boundaries)
    if due:
        runtime.preemption.leave_at_exit()
    return [due]
