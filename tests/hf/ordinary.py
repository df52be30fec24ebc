"""Run one of the ordinary scripts beside this file, then end the process at once (``tests.launch.leave``).

python -m tests.hf.ordinary SCRIPT [arguments of the script]
"""

from __future__ import annotations

import runpy
import sys

from tests.launch import leave

if __name__ == "__main__":
    script = f"tests.hf.{sys.argv.pop(1)}"
    runpy.run_module(script, run_name="__main__", alter_sys=True)
    leave()
