"""Rings with handmade records, for the tests of ``unickpt.diagnosis.reports``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from unickpt.diagnosis.recording.rank_ranges import progressions
from unickpt.diagnosis.recording.records import Op, Phase
from unickpt.diagnosis.recording.ring import CLOSED, RUNNING, Identity, RingWriter

MS = 1_000_000
F32 = 2  # position in DTYPES, from 1

Row = dict[str, Any]


def call(
    op: Op, comm: int, seq: int, begin_ms: float, end_ms: float | None, *, step: int = 0, elements: int = 256, peer: int = -1,
    wait_ms: float | None = None, phase: Phase = Phase.FORWARD, flags: int = 0,
) -> Row:  # fmt: skip
    """Return one record. ``end_ms`` None: the call has not ended. ``wait_ms`` None: it is waited for at once; -1: never."""
    wait = begin_ms if wait_ms is None else wait_ms
    return {
        "call_ns": int(begin_ms * MS), "wait_ns": 0 if wait == -1 else int(wait * MS),
        "end_ns": 0 if end_ms is None else int(end_ms * MS), "seq": seq, "elements": elements, "comm": comm, "op": int(op),
        "flags": flags, "phase": int(phase), "peer": peer, "step": step,
    }  # fmt: skip


def moment(op: Op, begin_ms: float, end_ms: float, *, step: int) -> Row:
    """Return the record of a step, a wait for data or a garbage collection."""
    return call(op, 0, 0, begin_ms, end_ms, step=step, elements=0, wait_ms=-1, phase=Phase.UNKNOWN)


def group(label: str, ranks: Iterable[int], **more: Any) -> dict[str, Any]:
    """Return an entry of the table of communicators, with a name from its members."""
    members = list(ranks)
    return {"label": label, "backend": "gloo", "name": f"{label}-{members}", **more, "ranks": progressions(members)}


def ring(
    folder: Path, rank: int, world: int, groups: list[dict[str, Any]], rows: Iterable[Row], *, host: str = "a",
    job: str = "made", wall_ms: float = 0.0, step: int = 0, closed: bool = False, heartbeat_ms: float = 0.0,
) -> Path:  # fmt: skip
    """Write a rank's ring as the recorder does. ``wall_ms`` is the wall clock minus the monotonic clock.

    The process is one that does not exist.
    """
    writer = RingWriter(
        folder / f"{rank:05d}.ring", Identity(rank, world, 1 << 22, host, job, 0, int(wall_ms * MS)), capacity=64
    )
    for entry in groups:
        assert writer.list_communicator(entry)
    count = 0
    for count, row in enumerate(rows, start=1):
        writer.put(
            count, row["call_ns"], 0, row["wait_ns"], row["end_ns"], row["seq"], row["elements"], row["elements"], row["comm"],
            row["op"], F32, row["flags"], row["phase"], 0, row["peer"], 0, row["step"], 0,
        )  # fmt: skip
    state = CLOSED if closed else RUNNING
    writer.state(heartbeat_ns=int(heartbeat_ms * MS), step=step, newest=count, phase=int(Phase.BACKWARD), state=state)
    return writer.path


def hostile(marker: str) -> str:
    """Return text that breaks out of a script, an element or an attribute if it is not escaped."""
    return f"</script><img src=x onerror=alert('{marker}')>\"'&\u2028"


def by_label(samples: Iterable[Any], **labels: str) -> list[float]:
    """Return the values of the Prometheus samples with these labels."""

    def has(found: Mapping[str, str]) -> bool:
        return all(found.get(name) == value for name, value in labels.items())

    return [sample.value for sample in samples if has(sample.labels)]
