"""Megatron-Bridge 0.6 with Megatron-core 0.19: the jobs of ``megatron_bridge``.

python -m evidence.libraries.megatron_bridge_06 [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import os
import sys

from evidence.libraries import trials
from evidence.libraries.megatron_bridge import TRIALS, load, looked_at, save

TEXT = """With Megatron-core 0.19.2, and its own queue of asynchronous saves (`async_strategy="mcore"`): the other one needs a
later resiliency extension of NVIDIA than 0.4.1. Megatron-Bridge asks for Python 3.12; it ran with 3.11. TransformerEngine
and Megatron-Energon, which reads data, are modules of names. Not tested: what the section on 0.3.1 lists."""

if __name__ == "__main__":
    tasks = trials.tasks_of(sys.argv)
    if tasks:
        os.environ["PYTORCH_JIT"] = "0"  # before torch is imported: TransformerEngine's names cannot be compiled
        from evidence.libraries import megatron_job

        megatron_job.run_all(tasks, save, load)
    sys.exit(trials.main("megatron_bridge_06", "Megatron-Bridge 0.6.2", TRIALS, TEXT, looked_at, together=True))
