"""The DeepSpeed adapter: ``"unickpt": {"enabled": true}`` in the DeepSpeed JSON.

Importing this package installs hooks on DeepSpeed. ``_unickpt_autoload`` imports it when a program imports
DeepSpeed. The hooks do not change an engine whose configuration lacks the key or has ``"enabled": false``.
"""

from __future__ import annotations

import sys

from ds_unickpt.hooks import install, uninstall
from ds_unickpt.measuring.timed_layers import stage_layers
from ds_unickpt.start import StartingPoint, resume_or_start
from unickpt.base.autoload import DEEPSPEED, unwatch

__all__ = ["StartingPoint", "install", "resume_or_start", "stage_layers", "uninstall"]

if "deepspeed.runtime.engine" not in sys.modules:
    # A program imports this package itself, before DeepSpeed. The hooks need DeepSpeed's classes.
    unwatch(DEEPSPEED)  # whatever the environment says of the hooks, they are installed below
    import deepspeed  # noqa: F401

install()
