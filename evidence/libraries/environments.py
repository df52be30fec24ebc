"""An environment of each library: its pinned release without dependencies, beside what this interpreter has.

Torch, DeepSpeed, Megatron-core and unickpt are those of the interpreter that runs this. ``<library>.txt`` names the library and
those of its dependencies that its checkpoint code imports.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent


def python_of(library: str, folder: Path) -> str:
    """Return the interpreter of a library's environment, which is made if it is missing or its requirements have changed."""
    environment, wanted = folder / library, (HERE / f"{library}.txt").read_text()
    made, python = environment / "requirements.txt", environment / "bin" / "python"
    if not made.is_file() or made.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        own = subprocess.check_output([python, "-c", where], text=True).strip()
        (Path(own) / "frameworks.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after the library's own
        options = ("--quiet", "--no-deps", "--ignore-requires-python")  # some ask for a later Python and run with this one
        subprocess.run([python, "-m", "pip", "install", *options, "-r", str(HERE / f"{library}.txt")], check=True)
        made.write_text(wanted)
    return str(python)
