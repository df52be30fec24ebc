"""The members of a job, remembered on this host: a new process at the endpoint asks them before it leads a job of its own.

The file is on the disk of the host, so it survives the end of the agent, and a restart of the machine where its folder does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from unickpt.base.private_files import make_folder, read_text, replacing

_LONGEST, _MOST = 1 << 20, 10_000  # bytes, and addresses
_KEPT_S = 90 * 86400.0  # a file is written when members change, which may be once in a long job


def file_of(key: bytes, name: str, endpoint: str, parent: Path | None = None) -> Path:
    """Return the file of an agent.

    Args:
        key: key of the job.
        name: name of the host.
        endpoint: ``--rdzv-endpoint``.
        parent: folder for temporary files; default: that of the system.
    """
    name_of_file = hashlib.sha256(b"\0".join([key, name.encode(), endpoint.encode()])).hexdigest()[:32]
    return (parent or Path(tempfile.gettempdir())) / f"unickpt-{os.geteuid()}-members" / name_of_file


def remember(file: Path, addresses: Collection[str], names: Collection[str] = ()) -> None:
    """Keep addresses and names of the other agents, and remove the files of jobs that ended long ago. Never raises."""
    with contextlib.suppress(OSError):
        make_folder(file.parent)
        _remove_old(file.parent, file)
        with replacing(file) as target:
            target.write(json.dumps({"addresses": sorted(addresses), "names": sorted(names)}).encode())


def recall(file: Path) -> Sequence[str]:
    """Return the addresses that were kept last; none if there is no such file."""
    return _kept(file, "addresses")


def recall_names(file: Path) -> Sequence[str]:
    """Return the names that were kept last; none if there is no such file."""
    return _kept(file, "names")


def _kept(file: Path, key: str) -> Sequence[str]:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(read_text(file, _LONGEST) or "{}")
        found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, list):
            return [each for each in found if isinstance(each, str)][:_MOST]
    return []


def forget(file: Path) -> None:
    """Remove the file, when the job has ended. Never raises."""
    with contextlib.suppress(OSError):
        file.unlink()


def _remove_old(folder: Path, but: Path) -> None:
    for other in folder.iterdir():
        with contextlib.suppress(OSError):
            if other != but and other.lstat().st_mtime < time.time() - _KEPT_S:
                other.unlink()
