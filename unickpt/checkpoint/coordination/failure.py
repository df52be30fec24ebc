"""The value that describes why a rank failed. Ranks exchange it, and code decides by its ``kind``."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_SHOWN = 8


class FailureKind(enum.Enum):
    """Category of a failure.

    The kind decides whether an older checkpoint is loaded instead, whether the framework saves in its own format, and
    which error class the other ranks raise.
    """

    ABSENT = "absent"  #: there is no checkpoint
    DAMAGED = "damaged"  #: a file of the checkpoint is missing, truncated or altered
    NEWER = "newer"  #: the format version is newer than this release
    MISMATCH = "mismatch"  #: checkpoint and job describe different models
    UNSUPPORTED = "unsupported"  #: this release cannot describe the layout
    UNRESUMABLE = "unresumable"  #: the same, and a checkpoint in the framework's own format could not be resumed
    PERMISSION = "permission"  #: the storage denies access
    STORAGE = "storage"  #: the storage is full, unreachable, or locked by another job
    COORDINATION = "coordination"  #: a rank did not arrive
    HOST_PEER = "host_peer"  #: another rank of this host failed first
    MEMORY = "memory"  #: the rank has too little memory; another attempt may succeed
    OUTSIDE = "outside"  #: the tag leaves the save directory
    OTHER_MODEL = "other_model"  #: the directory holds the checkpoint of another model
    ARGUMENTS = "arguments"  #: ranks were called with different arguments
    CHANGED = "changed"  #: the state was changed while it was copied behind training
    INTERRUPTED = "interrupted"  #: SIGTERM or Ctrl-C
    UNEXPECTED = "unexpected"  #: any other exception


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one rank failed.

    Attributes:
        kind: category of the failure.
        rank: rank that failed.
        tensor: tensor that the rank worked on, or ''.
        file: file that the rank worked on, or ''.
        text: explanation for people. Code never parses it.
    """

    kind: FailureKind
    rank: int
    tensor: str = ""
    file: str = ""
    text: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON-able form for messages between ranks."""
        return {"kind": self.kind.value, "rank": self.rank, "tensor": self.tensor, "file": self.file, "text": self.text}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Failure:
        """Return the failure that ``to_json`` encoded."""
        return cls(FailureKind(value["kind"]), int(value["rank"]), value["tensor"], value["file"], value["text"])


def sentence(failures: Iterable[Failure]) -> str:
    """Return one line with the failures in the order of their ranks, limited to the first 8."""
    found = sorted(failures, key=lambda failure: failure.rank)
    more = f"; and {len(found) - _SHOWN} more ranks" if len(found) > _SHOWN else ""
    return "; ".join(map(str, found[:_SHOWN])) + more
