"""The only object that a module of the adapter holds.

Megatron calls hooks and registered strategies with its own arguments, and users call ``megatron_unickpt.save`` without a
handle. They take the adapter's state from here and pass it on. No other module of this package keeps state.
"""

from __future__ import annotations

from megatron_unickpt.runtime import Runtime

RUNTIME = Runtime()
