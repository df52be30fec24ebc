"""Under torchrun on two ranks: calls of which the host sees only the start, as on a device. The second rank is late.

flights_worker DIR yes|no   DIR/<moment>.json: which of the first rank's calls have ended then, and which it waits in.
                            yes: the extension records them
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from unickpt.diagnosis.recording import flight_recorder, recorder
from unickpt.diagnosis.recording.process_group_hooks import ProcessGroupHooks
from unickpt.diagnosis.recording.recorder import CallRecorder
from unickpt.diagnosis.recording.ring import Identity, RingReader, RingWriter

BEFORE, OPEN = 3, 2  # calls of both ranks; calls that only the first one has made
LONGEST_S = 60.0


def verdict_lines(folder: Path) -> list[str]:
    records = RingReader(folder / "0.ring").read().records
    return ["ended" if end else "waits" if wait else "" for end, wait in records[["end_ns", "wait_ns"]].tolist()]


def keep(folder: Path, moment: str) -> None:
    (folder / f"{moment}.json").write_text(json.dumps(verdict_lines(folder)))


def until(folder: Path, *expected: str) -> None:
    """Wait until the open calls of the first rank are seen as expected. No earlier call is waited for by then."""
    end = time.monotonic() + LONGEST_S
    while time.monotonic() < end:
        lines = verdict_lines(folder)
        if "waits" not in lines[:-OPEN] and lines[-OPEN:] == list(expected):
            return
        time.sleep(0.1)


def retired() -> None:
    """Wait until the flight recorder knows that all calls have ended. Gloo's two threads may tell it in another order."""
    end = time.monotonic() + LONGEST_S
    while any(begun != ended for begun, ended in flight_recorder.counts()) and time.monotonic() < end:
        time.sleep(0.005)


def main() -> None:
    folder = Path(sys.argv[1])
    recorder.HOST_BACKENDS = ("none",)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    half, fresh = dist.new_group([0, 1]), dist.new_group([0, 1])
    ring = RingWriter(folder / f"{rank}.ring", Identity.here(rank, 2, "test"), capacity=64)
    noting = CallRecorder(
        ring, lambda group: {"ranks": dist.get_process_group_ranks(group), "backend": "gloo"}, extension=sys.argv[2] == "yes"
    )
    hooks = ProcessGroupHooks(noting)
    hooks.install()
    x = torch.ones(8)
    for _ in range(BEFORE):
        dist.all_reduce(x)
        retired()
    for _ in range(2):  # the flight recorder names no groups: only their counts tell them apart
        dist.all_reduce(x, group=half)
        retired()
    if rank == 0:
        open_calls = [dist.all_reduce(x, async_op=True) for _ in range(OPEN)]
        keep(folder, "at once")
        until(folder, "waits", "")
        keep(folder, "late")
        (folder / "go 0").touch()
        until(folder, "ended", "waits")
        (folder / "go 1").touch()
        until(folder, "ended", "ended")
        keep(folder, "over")
        dist.all_reduce(x)
        keep(folder, "next")
        open_calls.append(dist.all_reduce(x, group=fresh, async_op=True))
        until(folder, "ended", "waits")
        keep(folder, "first of a group")
        (folder / f"go {OPEN}").touch()
        until(folder, "ended", "ended")
        del open_calls
    else:
        for number in range(OPEN):  # one after the other, see retired()
            while not (folder / f"go {number}").exists():
                time.sleep(0.05)
            dist.all_reduce(x)
        dist.all_reduce(x)
        while not (folder / f"go {OPEN}").exists():
            time.sleep(0.05)
        dist.all_reduce(x, group=fresh)
    hooks.uninstall()
    noting.close()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
