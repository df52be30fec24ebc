"""A table with the interface of a checkpoint, so that the rules of a dialect can be an edit step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from unickpt.checkpoint.coordination.host_peers import HostPeers
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtype_names import itemsize_bytes
from unickpt.checkpoint.format.manifest import Manifest
from unickpt.checkpoint.load.checkpoint import Checkpoint, Planned
from unickpt.checkpoint.load.fragments import Request
from unickpt.checkpoint.load.read_plan import ReadPlan
from unickpt.checkpoint.load.reader import ReadStats
from unickpt.checkpoint.storage.open import open_storage
from unickpt.transform.dialects.translated_checkpoint import without_fragments
from unickpt.transform.edit.table import Table


@dataclass(frozen=True)
class TableCheckpoint(Checkpoint):
    """A checkpoint that is not written yet. It has names, shapes and boxes, but no files and no fragments."""

    table: Table = field(kw_only=True, repr=False)

    @property
    def identity(self) -> str:
        return "+".join(self.table.identity)

    def override_boxes(self, position: int) -> list[Box]:
        return list(self.table.entries[self.index.tensors[position].key].overrides)

    def plan(self, requests: Sequence[Request]) -> Planned:
        none = np.zeros(0, np.int64)
        size = sum(r.box.numel * itemsize_bytes(self.index.tensors[r.tensor_id].dtype) for r in requests)
        return Planned(requests, ReadPlan(none, none, np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64)), none, size)

    def fill(self, planned: Planned, *, verify: str = "always", host_peers: HostPeers | None = None) -> ReadStats:  # noqa: ARG002
        for request in planned.requests:
            entry = self.table.entries[self.index.tensors[request.tensor_id].key]
            boxes = [request.box]
            if entry.info.derived_from is not None:  # the caller casts the rest from the master
                boxes = [part for box in entry.overrides if (part := box.intersect(request.box)) is not None]
            for box in boxes:
                place = request.place.detach()[box.within(request.box).slices()]
                place.copy_(entry.read(box).view(box.shape))
        return ReadStats(planned.size_bytes, planned.size_bytes)


def as_checkpoint(table: Table) -> TableCheckpoint:
    """Return a table as a checkpoint. Its storage, which messages name, is the source of the table."""
    infos = sorted((entry.info for entry in table.entries.values()), key=lambda info: info.key)
    index = without_fragments(infos)
    manifest = Manifest(
        table.step, "", table.writer, (), "", table.optimizer, dict(table.aliases), table.excluded, dict(table.objects)
    )
    return TableCheckpoint(open_storage(table.where), manifest, index, index.ids(), table=table)
