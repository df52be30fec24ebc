"""Vocabularies that are padded so that tensor-parallel ranks can divide them, as in Megatron-DeepSpeed.

``universal_checkpoint_info`` lists the parameters (``vocabulary_parameter_patterns``) and may have the number of entries
(``original_vocab_size``). Megatron-DeepSpeed passes the number with the client state. A checkpoint has these parameters with
the padding of the job that saved it, so that this layout resumes exactly, and says which they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_unickpt.framework import autotp
from ds_unickpt.framework.internals import plain
from ds_unickpt.framework.megatron_layers import INFO, info_of
from ds_unickpt.held_state.engine_view import EngineView
from ds_unickpt.placing import megatron_deepspeed
from ds_unickpt.placing.slices import Slice
from unickpt.base.arrays import Shape
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.vocabulary import Rows, Vocabulary, rows_of
from unickpt.transform.convert.deepspeed.patterns import VOCABULARY, matches

STORED = "vocabulary/"  # + name: number of entries without padding, or None, among the shared objects


def of_job(view: EngineView, client_state: Mapping[str, Any] | None = None) -> dict[str, int | None]:
    """Return the padded parameters of this rank by stored name, with the number of entries, or None if it is unknown."""
    if autotp.degree(view.engine) > 1:  # AutoTP does not pad
        return {}
    module, names = view.engine.module, view.names
    info = info_of(module)
    more = (client_state or {}).get(INFO)
    entries = (more if isinstance(more, Mapping) else {}).get("original_vocab_size", info.get("original_vocab_size"))
    known = entries if isinstance(entries, int) else megatron_deepspeed.entries()
    where, patterns = type(module).__name__, info.get(VOCABULARY) or ()
    if not patterns:
        return {}
    return {
        name: known
        for name in names.parameters
        if any(matches(pattern, plain(names.own.get(name, name)), where, trusted=True) for pattern in patterns)
    }


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """The padded parameters of a checkpoint and of the job that loads it.

    Attributes:
        own: result of ``of_job``.
        stored: the same of the checkpoint.
    """

    own: Mapping[str, int | None] = field(default_factory=dict)
    stored: Mapping[str, int | None] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint, view: EngineView) -> PaddedRows:
        found = [name for name in checkpoint.shared_names() if name.startswith(STORED)]
        stored = {name.removeprefix(STORED): checkpoint.shared_object(name).value for name in found}
        return cls(of_job(view), {name: each if isinstance(each, int) else None for name, each in stored.items()})

    def rows(self, name: str, source: str, shape: Shape, own_shape: Shape) -> Rows | None:
        """Return what a load does with the rows of a parameter that has another shape in the checkpoint.

        None if the parameter is no padded vocabulary, or if another dimension differs. ``name`` and ``own_shape`` are of this
        job, ``source`` and ``shape`` of the checkpoint.
        """
        if (name not in self.own and source not in self.stored) or not shape or shape[1:] != own_shape[1:]:
            return None
        rows = rows_of(shape[0], own_shape[0], Vocabulary(self.stored.get(source), self.own.get(name)))
        if rows.initialised != (0, 0):
            return Rows(refused=f"{rows.initialised[0]:,} rows in the checkpoint, {self.own[name]:,} entries in this job")
        return rows


def fitted(part: Slice, shape: Shape) -> Slice:
    """Return the slice of a parameter in a checkpoint with another number of rows, without those that the checkpoint lacks."""
    boxes = tuple(box for each in part.boxes if (box := each.up_to(shape)) is not None)
    return Slice(shape, part.local, boxes, ())
