"""The role of this process in a job that has several process groups, such as actor and critic in reinforcement learning."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

ROLE = "UNICKPT_ROLE"
_LONGEST = 48
_RAY = "ray::"  # Ray names the process of an actor ``ray::CriticWorker`` or ``ray::CriticWorker.method``


def role(environment: Mapping[str, str] | None = None, title: str | None = None) -> str:
    """Return what ``UNICKPT_ROLE`` says, else the class of the Ray actor that this process is; '' if neither is known.

    Other characters than letters, digits, dots, colons and hyphens become hyphens.

    Args:
        environment: default: that of this process.
        title: name of the process; default: the one that the system shows.
    """
    found = (os.environ if environment is None else environment).get(ROLE, "").strip()
    shown = (_title() if title is None else title) if not found else ""
    if shown.startswith(_RAY):
        found = re.split(r"[.(\s]", shown.removeprefix(_RAY))[0]
    return re.sub(r"[^\w.:-]+", "-", found, flags=re.ASCII)[:_LONGEST]


def _title() -> str:
    try:
        return Path("/proc/self/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
    except OSError:  # not Linux
        return ""
