"""Jobs whose ranks are forked from one process that has made their imports, as ``unickpt.testing.launch`` starts others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.support.fork_server import ForkedJob, Job, start_shared
from unickpt.testing.launch import environment, finish, started


def start_forked(
    world: int,
    module: str,
    *arguments: str,
    output: IO[str],
    folder: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    framework: str = "",
) -> ForkedJob | subprocess.Popen[str]:
    """Start a job as ``start`` does, with ranks that are forked after the imports of a module; see ``fork_ranks``."""
    where, whole = str(Path(folder or ".").resolve()), environment(folder, **(env or {}))
    job = Job(world, module, arguments, framework)
    return start_shared(job, where, whole, output.fileno()) or started(_forked(world, module, arguments), output, folder, env)


def _forked(world: int, module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "tests.support.forked_ranks", str(world), module, *arguments]


def fork_ranks(
    world: int,
    module: str,
    *arguments: str,
    timeout_s: float = 600,
    folder: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    framework: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a module on several ranks as ``torchrun`` does, with ranks that are forked after its imports.

    Saves the time of ``world`` imports (``tests.support.forked_ranks``). The module must not start threads or read its rank
    when it is imported. Its function ``before_forks(arguments)``, if there is one, makes further imports. Under
    ``fork_server.shared_interpreters``, jobs of one framework also share their imports (``Job.framework``). Other arguments,
    result and errors are those of ``torchrun``.
    """
    where, whole = str(Path(folder or ".").resolve()), environment(folder, **(env or {}))
    program = _forked(world, module, arguments)
    job = Job(world, module, arguments, framework)
    process = start_shared(job, where, whole) or started(program, subprocess.PIPE, folder, env)
    return finish(process, program, module, timeout_s, check)
