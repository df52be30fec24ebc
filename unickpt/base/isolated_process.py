"""Start of a process beside training that imports nothing from the working directory or from folders of other users."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_isolated(
    module: str, arguments: Sequence[str], *, packages: Sequence[str], pass_fds: tuple[int, ...] = (), stdout: int | None = None
) -> subprocess.Popen[bytes]:
    """Run the function ``main`` of a module in its own session, with a safe ``sys.path`` and a pipe as its standard input.

    The interpreter starts isolated (``-I``: no environment, no working directory) and without ``site`` (``-S``). Its path is
    the standard library, then the folders in which this process has found the packages that the module needs. This supports
    virtual environments, editable installs and ``PYTHONPATH``.
    """
    code = f"import sys; sys.path += {places_of(packages)!r}; from {module} import main; main()"
    flags = ["-I", "-S", "-W", "ignore", *(["-B"] if sys.dont_write_bytecode else [])]
    env = {**os.environ, "UNICKPT_AUTOLOAD": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *flags, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        env=env,
        cwd="/",
        start_new_session=True,
        pass_fds=pass_fds,
        stdout=stdout,
    )


def places_of(packages: Sequence[str]) -> list[str]:
    """Return the absolute folders in which this process finds packages, without packages that are not installed."""
    found: list[str] = []
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            inside = Path(spec.origin).parent
            place = os.path.abspath(inside.parent if spec.submodule_search_locations is not None else inside)
            if place not in found:
                found.append(place)
    return found
