"""The DeepSpeed adapter: ``"unickpt": {"enabled": true}`` in the DeepSpeed JSON.

Importing this package (which ``_unickpt_autoload`` does by itself as soon as DeepSpeed is
imported) installs three hooks on ``DeepSpeedEngine``. An engine whose config lacks the key, or
has ``enabled: false``, runs through them unchanged.
"""

from __future__ import annotations

import sys

from ds_unickpt.hooks import install, uninstall

__all__ = ["install", "uninstall"]

if "deepspeed.runtime.engine" not in sys.modules:
    # An explicit import: bring DeepSpeed in first, so that its class is there to be hooked.
    import deepspeed  # noqa: F401

install()
