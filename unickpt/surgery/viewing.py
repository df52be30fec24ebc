"""A table as a checkpoint, for whoever reads one: rules of a dialect can so be a step among others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from unickpt.dtypes import itemsize_bytes
from unickpt.fragments import Box
from unickpt.loading import Checkpoint, Planned
from unickpt.manifest import Manifest
from unickpt.neighbours import Neighbours
from unickpt.planning import ReadPlan
from unickpt.reading import ReadStats, Request
from unickpt.storage import open_storage
from unickpt.surgery.table import Table
from unickpt.translated import without_fragments


@dataclass(frozen=True)
class TableCheckpoint(Checkpoint):
    """A checkpoint that is not written yet: names, shapes and boxes, but neither files nor fragments."""

    table: Table = field(kw_only=True, repr=False)

    @property
    def identity(self) -> str:
        return "+".join(self.table.identity)

    def override_boxes(self, position: int) -> list[Box]:
        return list(self.table.entries[self.index.tensors[position].key].differs)

    def plan(self, requests: Sequence[Request]) -> Planned:
        none = np.zeros(0, np.int64)
        size = sum(r.box.numel * itemsize_bytes(self.index.tensors[r.tensor_id].dtype) for r in requests)
        return Planned(requests, ReadPlan(none, none, np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64)), size)

    def fill(self, planned: Planned, *, verify: str = "always", neighbours: Neighbours | None = None) -> ReadStats:  # noqa: ARG002
        for request in planned.requests:
            entry = self.table.entries[self.index.tensors[request.tensor_id].key]
            boxes = [request.box]
            if entry.info.derived_from is not None:  # the cast is made by whoever asks
                boxes = [part for box in entry.differs if (part := box.intersect(request.box)) is not None]
            for box in boxes:
                place = request.place.detach()[box.within(request.box).slices()]
                place.copy_(entry.read(box).view(box.shape))
        return ReadStats(planned.size_bytes, planned.size_bytes)


def as_checkpoint(table: Table) -> TableCheckpoint:
    """A table as a checkpoint; its storage is that of the table's source, named in messages."""
    infos = sorted((entry.info for entry in table.entries.values()), key=lambda info: info.key)
    index = without_fragments(infos)
    manifest = Manifest(
        table.step, "", table.writer, (), "", table.optimizer, dict(table.aliases), table.excluded, dict(table.objects)
    )
    return TableCheckpoint(open_storage(table.where), manifest, index, index.ids(), table=table)
