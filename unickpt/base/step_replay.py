"""What ``unickpt replay-step`` asks of the processes that it starts: to repeat a step, and to save nothing.

The environment names a folder, which all ranks of all hosts see. It holds the request, and each rank writes there what it has
computed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from unickpt.base.errors import ConfigError
from unickpt.base.logs import logger

VARIABLE = "UNICKPT_REPLAY"
REQUEST, REFUSED = "request.json", "refused.txt"
_LONGEST = 1 << 16


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One repetition.

    Attributes:
        directory: folder of the checkpoints, an absolute path or a URL.
        step: of the checkpoint that is loaded.
        until: last step to compute. The same as ``step``: nothing is computed, only what the checkpoint holds is recorded.
        other_layout: the job may have another layout than the one that saved the checkpoint.
        folder: where the ranks write.
    """

    directory: str
    step: int
    until: int
    other_layout: bool = False
    folder: str = ""

    def refuse(self, reason: str) -> None:
        """Tell ``replay-step`` why the job cannot repeat the step."""
        Path(self.folder, REFUSED).write_text(reason)


def asked(environment: Mapping[str, str] | None = None) -> ReplayRequest | None:
    """Return what the environment asks for (default: that of this process); None: nothing.

    Raises:
        ConfigError: there is no request in the folder that it names.
    """
    folder = (os.environ if environment is None else environment).get(VARIABLE, "")
    if not folder:
        return None
    try:
        return replace(ReplayRequest(**json.loads(Path(folder, REQUEST).read_bytes()[:_LONGEST])), folder=folder)
    except (OSError, ValueError, TypeError) as err:
        raise ConfigError(
            f"{VARIABLE}={folder} in the environment, and there is no request of 'unickpt replay-step' ({err}). The folder "
            "must be visible on all hosts"
        ) from None


def saves_nothing(directory: object, *, first: bool) -> bool:
    """Return whether this process must not save, because it repeats a step. ``first``: the rank that says so."""
    if asked() is None:
        return False
    if first:
        logger.warning("unickpt: replay-step: %s is not saved: this job repeats a step", directory)
    return True


def write_request(request: ReplayRequest) -> None:
    """Write a request into its folder, which is made."""
    Path(request.folder).mkdir(parents=True)
    values = {key: value for key, value in asdict(request).items() if key != "folder"}
    Path(request.folder, REQUEST).write_text(json.dumps(values))
