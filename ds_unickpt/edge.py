"""The only object that a module of the adapter holds.

DeepSpeed and transformers call hooks with their own arguments. The hooks take the adapter's state from here and pass it on.
No other module of this package keeps state.
"""

from __future__ import annotations

from ds_unickpt.runtime import EngineRuntime

RUNTIME = EngineRuntime()
