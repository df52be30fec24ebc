"""Check the package that is installed: ``python scripts/check_installed.py``.

Every extension is imported, and the shipped example saves on two ranks and loads on one. Without torch, which has no wheels for
musl, only the extensions are tried.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib import import_module, metadata
from importlib.util import find_spec

import unickpt
from unickpt.base.installation import shipped_file, source_tree

EXTENSIONS = (
    "diagnosis.recording._fast",
    "checkpoint.format._casts",
    "checkpoint.format._checksums",
    "checkpoint.load._checked_read",
)


def main() -> int:
    if (tree := source_tree()) is not None:
        print(f"not installed: imported from {tree}")
        return 1
    if unickpt.__version__ != metadata.version("unickpt"):
        print(f"the package has version {unickpt.__version__}, its metadata {metadata.version('unickpt')}")
        return 1
    for name in EXTENSIONS:
        import_module(f"unickpt.{name}")
    print(f"unickpt {unickpt.__version__}: {len(EXTENSIONS)} extensions")
    if find_spec("torch") is None:
        print("torch is not installed: nothing else is tried")
        return 0
    example = shipped_file("examples/python_api.py")
    with tempfile.TemporaryDirectory() as folder:
        for command in (
            ["-m", "torch.distributed.run", "--nproc-per-node", "2", example, "save", folder],
            [example, "load", folder],
            ["-m", "unickpt.cli.main", "verify", folder],
            ["-m", "unickpt.cli.main", "hooks", "status"],
        ):
            subprocess.run([sys.executable, *map(str, command)], check=True, cwd=folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
