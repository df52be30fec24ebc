"""Run real Megatron jobs on CPU and gloo, and compare their states: for tests, benchmarks and examples.

Importing ``megatron_unickpt`` arms its hooks. A job that only needs this harness must not have them unless it asks, so with
``UNICKPT_AUTOLOAD=0`` the import of the harness disarms them again.
"""

from unickpt.base import autoload

if not autoload.asked():
    autoload.unwatch(autoload.MEGATRON)
