"""The only object that a module of the adapter holds.

Programs call functions and torch calls hooks without a handle. They take the adapter's state from here and pass it on. No other
module of this package keeps state.
"""

from __future__ import annotations

from torch_unickpt.runtime import Runtime

RUNTIME = Runtime()
