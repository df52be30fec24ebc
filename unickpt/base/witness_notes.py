"""What the witness of a job has found, for reports and metrics. The rank that logs it writes it beside its ring."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from unickpt.base.private_files import append, read_text

FILE = "witness.jsonl"
MOST = 64  # that are read, the newest
_LONGEST, _LONGEST_TEXT = 1 << 20, 2048


@dataclass(frozen=True, slots=True)
class WitnessNote:
    """What a witness has found.

    Attributes:
        kind: such as SDC_REPLICA or NONFINITE.
        step: of the optimizer.
        ranks: ranks that it names.
        hosts: their hosts, in the same order.
        text: one sentence.
        next: what to do.
        at_ns: time on the wall clock.
    """

    kind: str
    step: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    text: str
    next: str
    at_ns: int


def note(folder: Path, found: WitnessNote) -> None:
    """Add what was found to the folder of the rings on this host. Never raises."""
    line = {**asdict(found), "text": found.text[:_LONGEST_TEXT], "next": found.next[:_LONGEST_TEXT]}
    with contextlib.suppress(OSError):
        append(folder / FILE, f"{json.dumps(line)}\n".encode())


def read_notes(folders: Sequence[Path]) -> list[WitnessNote]:
    """Return what was noted in folders of rings, the newest last. Lines that are malformed are left out."""
    found = []
    for folder in folders:
        for line in read_text(folder / FILE, _LONGEST).splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
                each = json.loads(line)
                ranks, hosts = tuple(int(rank) for rank in each["ranks"]), tuple(str(host) for host in each["hosts"])
                said = str(each["text"]), str(each["next"])
                found.append(WitnessNote(str(each["kind"]), int(each["step"]), ranks, hosts, *said, int(each["at_ns"])))
    return sorted(found, key=lambda each: each.at_ns)[-MOST:]
