"""The hook that starts timing before the first collectives of an engine.

The other ranks wait there for a rank that hangs on its way to ``deepspeed.initialize``, such as in the load of its model. The
hook is installed with those of the engine, because its configuration says whether timing is enabled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_unickpt.framework.declaration import declared
from ds_unickpt.framework.versions import ENGINE
from unickpt.base.hooks import Hook


def _starts(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    from ds_unickpt.batch.config import valid_options
    from ds_unickpt.framework import internals

    options = valid_options(internals.config_of(instance))
    if options is not None and options.timing.enabled:  # imported only then
        from unickpt.base.logs import make_visible
        from unickpt.diagnosis import session

        make_visible()
        session.start(options.timing, lambda: internals.process_groups(instance))
    return wrapped(*args, **kwargs)


HOOK: Hook = declared(
    "deepspeed.timing.start", ENGINE, "DeepSpeedEngine._configure_distributed_model", _starts,
    why="no callback before the first collectives of an engine", until="DeepSpeed has callbacks for the phases of a step",
    strict=False,
)  # fmt: skip
