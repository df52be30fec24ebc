"""Collectives as recorded by unickpt and by torch's flight recorder, in a comparable form."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from unickpt.diagnosis.recording.process_group_hooks import ProcessGroupHooks
from unickpt.diagnosis.recording.rank_ranges import members
from unickpt.diagnosis.recording.recorder import CallRecorder
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.recording.ring import Identity, RingReader, RingWriter

Count = Counter[tuple[Op, int]]  # operation and elements given
ENVIRONMENT = {"TORCH_FR_BUFFER_SIZE": "20000", "GLOO_SOCKET_IFNAME": "lo"}

# names of gloo's operations in the flight recorder
NAMES = {
    "all_reduce": Op.ALL_REDUCE, "all_gather": Op.ALL_GATHER, "broadcast": Op.BROADCAST, "reduce": Op.REDUCE,
    "gather": Op.GATHER, "scatter": Op.SCATTER, "all_to_all": Op.ALL_TO_ALL, "barrier": Op.BARRIER,
}  # fmt: skip


def flights() -> list[Any]:
    """Return the entries of torch's flight recorder."""
    trace: Any = torch._C._distributed_c10d
    entries: list[Any] = json.loads(trace._dump_fr_trace_json(True, False)).get("entries", [])
    return entries


class CallCounter:
    """Records in this block, into ``<folder>/<name>-<rank>.ring``, and keeps the flight recorder's entries.

    ``extension``: with or without the extension in C.
    """

    def __init__(self, folder: Path, name: str, *, extension: bool = True) -> None:
        self._extension = extension
        self._stem = folder / f"{name}-{dist.get_rank()}"

    def __enter__(self) -> None:
        identity = Identity.here(dist.get_rank(), dist.get_world_size(), "test")
        ring = RingWriter(self._stem.with_suffix(".ring"), identity, capacity=1 << 14)
        self._recorder = CallRecorder(
            ring,
            lambda group: {"ranks": dist.get_process_group_ranks(group), "label": group.group_desc},
            extension=self._extension,
        )
        self._first = len(flights())
        self._hooks = ProcessGroupHooks(self._recorder)
        self._hooks.install()

    def __exit__(self, *_: Any) -> None:
        self._hooks.uninstall()
        self._recorder.close()
        self._stem.with_suffix(".json").write_text(json.dumps(flights()[self._first :]))


def noted(ring: Path) -> Count:
    """Return unickpt's records in the form of gloo, which scatters by a full reduction."""
    found: Count = Counter()
    snapshot = RingReader(ring).read()
    for op, elements, out, comm in snapshot.records[["op", "elements_in", "elements_out", "comm"]].tolist():
        if op == Op.REDUCE_SCATTER:
            found[Op.ALL_REDUCE, elements] += 1
        elif op <= Op.BARRIER:
            found[Op(op), elements] += 1
        del out
        assert members(snapshot.communicators[comm]["ranks"])
    return found


def flown(entries: Path) -> Count:
    """Return the flight recorder's records."""
    found: Count = Counter()
    for entry in json.loads(entries.read_text()):
        op = NAMES[entry["profiling_name"].removeprefix("gloo:")]
        found[op, sum(int(np.prod(size)) for size in entry["input_sizes"])] += 1
    return found
