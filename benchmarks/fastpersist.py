"""DeepSpeed's FastPersist, its checkpoint writer on libaio, as a peer of the benchmarks.

DeepSpeed's CPU accelerator runs it with two aids: memory that DeepSpeed itself locks (``DS_PIN_MEMORY_BACKEND=native``), and
the builder of DeepSpeed's ``utils`` extension. The accelerator has no entry for this builder, although the extension is plain
C++, and its placeholder raises "This op had not been implemented on CPU backend".
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

ENVIRONMENT = {"DS_PIN_MEMORY_BACKEND": "native"}
BUILD = """
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.ops.op_builder.utils import UtilsBuilder
if not AsyncIOBuilder().is_compatible(verbose=True):
    raise SystemExit("libaio is not installed (Debian package libaio-dev)")
AsyncIOBuilder().load()
UtilsBuilder().load()
"""


def problem(env: dict[str, str]) -> str:
    """Build DeepSpeed's extensions, once per machine. Return why FastPersist cannot run; '' if it can."""
    env = {**env, **ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", BUILD], env=env, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return f"FastPersist was not measured: DeepSpeed's operator `async_io` cannot be built or loaded here ({last})."


def checkpoint_engine(engine: Any) -> Any:
    """Return DeepSpeed's ``FastCheckpointEngine`` for an engine. One block of 64 MiB, two halves in turn, as by default."""
    import deepspeed.io.fast_file_writer as fast_file_writer
    from deepspeed.ops.op_builder.utils import UtilsBuilder
    from deepspeed.runtime.checkpoint_engine import create_checkpoint_engine
    from deepspeed.runtime.model_checkpointing.config import get_checkpoint_config
    from deepspeed.utils import groups

    fast_file_writer.UtilsBuilder = UtilsBuilder
    for name, value in {"CROSS_SIZE": "1", "CROSS_RANK": "0"}.items():  # one machine; DeepSpeed's launcher sets them
        os.environ.setdefault(name, value)
    config = copy.copy(engine._config)
    # without data_parallel, DeepSpeed 0.19.8 reads an attribute that its class does not have (UniversalParallelInfo.dp_rank)
    config.checkpoint_config = get_checkpoint_config({"checkpoint": {"writer": {"type": "fast", "data_parallel": "replica"}}})
    # optimize_dp_state only puts the number of the writer into the names of the files, which no load then finds
    return create_checkpoint_engine(
        config_params=config,
        groups=groups,
        zero_stage=engine.zero_optimization_stage(),
        has_moe_layers=engine.has_moe_layers,
        optimize_dp_state=False,
    )
