"""The DeepSpeed adapter: ``"unickpt": {"enabled": true}`` in the DeepSpeed JSON.

Importing this package installs hooks on DeepSpeed. ``_unickpt_autoload`` imports it when a program imports
DeepSpeed. The hooks do not change an engine whose configuration lacks the key or has ``"enabled": false``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ds_unickpt.hooks import install, uninstall
from ds_unickpt.measuring.timed_layers import stage_layers
from ds_unickpt.start import StartingPoint, resume_or_start
from unickpt.base.autoload import DEEPSPEED, unwatch

if TYPE_CHECKING:
    from ds_unickpt.trainer.preemption_callback import PreemptionCallback
    from ds_unickpt.witnessing.watch import witness_of

__all__ = ["PreemptionCallback", "StartingPoint", "install", "resume_or_start", "stage_layers", "uninstall", "witness_of"]

if "deepspeed.runtime.engine" not in sys.modules:
    # A program imports this package itself, before DeepSpeed. The hooks need DeepSpeed's classes.
    unwatch(DEEPSPEED)  # whatever the environment says of the hooks, they are installed below
    import deepspeed  # noqa: F401

install()


def __getattr__(name: str) -> Any:
    """Return a name whose module is imported only then."""
    if name == "witness_of":
        from ds_unickpt.witnessing.watch import witness_of

        return witness_of
    if name != "PreemptionCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ds_unickpt.trainer.preemption_callback import PreemptionCallback

    return PreemptionCallback
