"""Run one of the ordinary scripts beside this file, then end the process at once (``unickpt.testing.launch.leave``).

python -m tests.jobs.hf.ordinary SCRIPT [arguments of the script]

``BREAK_SAVE=kill:FOLDER`` kills the process when unickpt writes data of a checkpoint below a folder of that name,
``BREAK_SAVE=full:FOLDER`` fills the disk then.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
from pathlib import Path

import deepspeed  # noqa: F401  # once, before ranks are forked
import transformers.integrations.deepspeed
import transformers.trainer  # noqa: F401

from tests.jobs.faults.calls import Call, watched
from tests.support import deepspeed_imports  # noqa: F401
from unickpt.testing.launch import leave


def broken(what: str, output_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Make writes fail as ``BREAK_SAVE`` specifies."""
    how, _, folder = what.partition(":")

    def act(call: Call) -> None:
        if f"{folder}/" in call.path and "/data/" in call.path:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, "No space left on device")

    return watched(output_dir, act, ("pwrite",))


if __name__ == "__main__":
    script = f"tests.jobs.hf.{sys.argv.pop(1)}"
    with contextlib.ExitStack() as stack:
        if "BREAK_SAVE" in os.environ:
            output_dir = Path(sys.argv[sys.argv.index("--output_dir") + 1])
            stack.enter_context(broken(os.environ["BREAK_SAVE"], output_dir))
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    leave()
