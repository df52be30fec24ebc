"""A checkpoint under the names and shapes of another dialect, read from the stored fragments.

Nothing is converted beforehand. A wanted box consists of a few pieces of stored tensors. Each piece is read directly into its
place with the strides there, so a load in another dialect reads only the bytes that it needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from unickpt.base.errors import MismatchError
from unickpt.checkpoint.coordination.host_peers import HostPeers
from unickpt.checkpoint.format import objects as objects_module
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import Index, TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup
from unickpt.checkpoint.format.topology import describe
from unickpt.checkpoint.load.checkpoint import Checkpoint, Planned
from unickpt.checkpoint.load.fragments import Request
from unickpt.checkpoint.load.reader import ReadStats
from unickpt.checkpoint.load.report import Entry
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.pieces import GridPiece
from unickpt.transform.dialects.registry import choose, is_unread
from unickpt.transform.dialects.rules import Rule
from unickpt.transform.dialects.translation import Translation, translate

TENSORS = ("parameter", "buffer")
HUGGINGFACE = "huggingface"
OWN = "torch"  # names of a module in plain torch whose family is unknown: no dialect leads from them


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum that is computed after its terms are read.

    Attributes:
        place: destination.
        total: accumulator with the shape of ``place``, in float32 or float64.
        terms: (part of ``total``, values to add, weight) of each term.
    """

    place: torch.Tensor
    total: torch.Tensor
    terms: list[tuple[torch.Tensor, torch.Tensor, float]]


@dataclass(frozen=True, slots=True)
class _Planned(Planned):
    """A plan with places that are zeroed before the reads, and sums that are computed after them.

    Attributes:
        below: plan of the source, which may be translated itself.
    """

    below: Planned = field(kw_only=True)
    blank: Sequence[torch.Tensor] = ()
    sums: Sequence[_Sum] = ()


@dataclass(frozen=True)
class TranslatedCheckpoint(Checkpoint):
    """A checkpoint in another dialect.

    Attributes:
        source: stored checkpoint, which also has the objects.
        translation: map of the wanted tensors.
        stored: stored name of each source of a piece (tied parameters have several names).
        job_objects: non-tensor state in the terms of this dialect; None: as stored.
        job_notes: entries on ``job_objects`` for the report of a load.
    """

    source: Checkpoint = field(kw_only=True)
    translation: Translation = field(kw_only=True, repr=False)
    stored: Mapping[str, str] = field(kw_only=True, repr=False)
    job_objects: Mapping[str, Any] | None = field(default=None, kw_only=True, repr=False)
    job_notes: Sequence[Entry] = field(default=(), kw_only=True, repr=False)

    @property
    def identity(self) -> str:
        return self.source.identity

    def plan(self, requests: Sequence[Request]) -> Planned:
        below: list[Request] = []
        blank: list[torch.Tensor] = []
        sums: list[_Sum] = []
        for request in requests:
            info = self.index.tensors[request.tensor_id]
            place = request.place
            pieces = self.translation.pieces[info.name]
            is_sum = _is_sum(pieces)
            if info.derived_from is not None:  # its overrides are read over the cast
                pieces = [] if is_sum else pieces
            elif is_sum:
                exact = torch.float32 if place.is_floating_point() and place.element_size() < 4 else torch.float64
                sums.append(_Sum(place, torch.zeros(place.shape, dtype=exact), []))
            elif self.translation.padding.get(info.name):
                blank.append(place)
            for piece in pieces:
                part = piece.within(request.box)
                for read in part.reads() if part is not None else ():
                    position = self.source.ids[self.stored[read.source], info.state]
                    if is_sum:
                        data = torch.empty(read.source_box.shape, dtype=sums[-1].total.dtype)
                        below.append(Request(position, read.source_box, data))
                        sums[-1].terms.append((_strided(sums[-1].total, request.box, read), data, read.weight))
                    else:
                        below.append(Request(position, read.source_box, _strided(place, request.box, read)))
        planned = self.source.plan(below)
        return _Planned(
            planned.requests, planned.plan, planned.shareable, planned.size_bytes, planned.cached, blank, sums, below=planned
        )

    def fill(self, planned: Planned, *, verify: str = "always", host_peers: HostPeers | None = None) -> ReadStats:
        assert isinstance(planned, _Planned)
        for place in planned.blank:
            place.detach().zero_()
        stats = self.source.fill(planned.below, verify=verify, host_peers=host_peers)
        for each in planned.sums:
            for target, data, weight in each.terms:
                target.add_(data, alpha=weight)
            each.place.detach().copy_(each.total)
        return stats

    def override_boxes(self, position: int) -> list[Box]:
        info = self.index.tensors[position]
        found: list[Box] = []
        pieces = self.translation.pieces[info.name]
        for piece in pieces if not _is_sum(pieces) else ():  # the cast of a sum is not the sum of casts
            back = piece.inverted()
            for box in self.source.override_boxes(self.source.ids[self.stored[piece.source], info.state]):
                part = back.within(box)
                found += [read.source_box for read in part.reads()] if part is not None else []
        return found

    @property
    def untranslated(self) -> Sequence[str]:
        return self.translation.unused

    @property
    def unread(self) -> Sequence[str]:
        return self.translation.unread

    def objects(self, *, allow_pickle: bool = False) -> objects_module.Decoded:
        if self.job_objects is None:
            return self.source.objects(allow_pickle=allow_pickle)
        known = self.job_objects.keys() | {note.name for note in self.job_notes}
        others = sorted(
            name for name, value in self.source.manifest.objects.items() if value not in ({}, None) and name not in known
        )
        reason = f"state of {self.source.manifest.writer.framework}, which has no counterpart here"
        return objects_module.Decoded(dict(self.job_objects), [objects_module.LeftOut(name, reason) for name in others])

    def rank_objects(self, rank: int, *, allow_pickle: bool = False) -> objects_module.Decoded:
        if self.job_objects is not None:
            return objects_module.Decoded({})
        return self.source.rank_objects(rank, allow_pickle=allow_pickle)

    def shared_names(self) -> list[str]:
        return self.source.shared_names()

    def fetch_shared(self, names: Iterable[str]) -> None:
        self.source.fetch_shared(names)

    def shared_object(self, name: str, *, allow_pickle: bool = False) -> objects_module.Decoded:
        return self.source.shared_object(name, allow_pickle=allow_pickle)


def heading_of(checkpoint: Checkpoint) -> str:
    """Return what a load report says of a checkpoint, and of its translation if there is one."""
    manifest, writer, more = checkpoint.manifest, checkpoint.manifest.writer, ""
    if isinstance(checkpoint, TranslatedCheckpoint):
        more = f"; {len(checkpoint.translation.pieces)} tensors translated from {writer.dialect}"
    saved_by = f"{writer.framework} {writer.framework_version}, {describe(writer.topology)}"
    return f"{checkpoint.storage} (step {manifest.step}, {saved_by}{more})"


def _is_sum(pieces: Sequence[GridPiece]) -> bool:
    return any(piece.term or piece.weight != 1.0 for piece in pieces)


def _strided(place: torch.Tensor, box: Box, read: GridPiece) -> torch.Tensor:
    """Return the view of a target that a piece fills, in the order of the dimensions of the source."""
    strides = place.stride()
    offset = sum((at - first) * step for at, first, step in zip(read.target_start, box.start, strides, strict=True))
    return place.detach().as_strided(read.source_box.shape, read.strides(strides), place.storage_offset() + offset)


def shapes_of(checkpoint: Checkpoint) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the shapes of all parameters and buffers by name, including aliases, and the stored name of each."""
    shapes = {info.name: info.shape for info in checkpoint.index.tensors if info.kind in TENSORS or info.state == "master"}
    stored = {name: name for name in shapes}
    for alias, name in checkpoint.manifest.aliases.items():
        if name in shapes and alias not in shapes:
            shapes[alias], stored[alias] = shapes[name], name
    return shapes, stored


def translated(
    source: Checkpoint,
    rules: Sequence[Rule],
    wanted: Mapping[str, Sequence[int]],
    sizes: Mapping[str, int],
    *,
    outward: bool = False,
) -> TranslatedCheckpoint:
    """Return a checkpoint with the wanted names and shapes.

    Args:
        source: stored checkpoint.
        rules: rules of a dialect. Wanted names are *here*, or *there* if ``outward``.
        wanted: shapes by name. The result omits tensors without a rule or with missing sources.
        sizes: sizes of axes.
        outward: direction of the rules.

    Raises:
        LanguageError, CoverageError: rules, shapes and sizes contradict each other.
        MismatchError: the sources of a tensor have different dtypes or hyperparameters.
    """
    shapes, stored = shapes_of(source)
    translation = translate(rules, wanted, shapes, sizes, outward=outward)
    used = {piece.source for pieces in translation.pieces.values() for piece in pieces}
    names = {stored[name] for name in used}
    dialect = source.manifest.writer.dialect
    unused = [name for name in translation.unused if stored.get(name) not in names]  # else another name of it is used
    translation.unread = [name for name in unused if is_unread(dialect, name)]
    translation.unused = [name for name in unused if name not in translation.unread]
    tensors: list[TensorInfo] = []
    by_name: dict[str, dict[str, TensorInfo]] = {}
    for info in source.index.tensors:
        by_name.setdefault(info.name, {})[info.state] = info
    for name, pieces in translation.pieces.items():
        made_of = [by_name[of] for of in dict.fromkeys(stored[piece.source] for piece in pieces)]
        tensors += _states(str(source.storage), name, tuple(wanted[name]), made_of, shapes)
    tensors.sort(key=lambda info: info.key)
    index = without_fragments(tensors)
    record = source.manifest.optimizer
    manifest = dataclasses.replace(
        source.manifest,
        optimizer=None if record is None else _optimizer(source, record, translation, stored),
        aliases={},
        excluded=tuple(name for name, lacks in translation.without.items() if set(lacks) <= set(source.manifest.excluded)),
    )
    return TranslatedCheckpoint(
        source.storage, manifest, index, index.ids(), source=source, translation=translation, stored=stored
    )


def _states(
    where: str,
    name: str,
    shape: tuple[int, ...],
    made_of: Sequence[Mapping[str, TensorInfo]],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterable[TensorInfo]:
    """Yield the states of a target: those that all its sources have.

    Args:
        where: name of the checkpoint in messages.
        name, shape: name and shape of the target.
        made_of: states of each source.
        shapes: shapes of the parameters of all sources.
    """
    for state in made_of[0] if made_of else ():
        known = [states[state] for states in made_of if state in states]
        if len(known) < len(made_of):
            continue
        cut = [info for info in known if info.shape != shapes[info.name]]
        if cut:
            raise MismatchError(
                f"{where}: {cut[0].name} ({state}) has shape {list(cut[0].shape)}, its parameter has "
                f"{list(shapes[cut[0].name])}"
            )
        kinds = {(info.dtype, info.kind, info.derived_from) for info in known}
        if len(kinds) > 1:
            types = "; ".join(f"{info.name}: {info.dtype}" for info in known[:4])
            raise MismatchError(f"{where}: the sources of {name} ({state}) have several dtypes: {types}")
        ((dtype, kind, derived_from),) = kinds
        yield TensorInfo(name, state, dtype, shape, kind, derived_from)


def without_fragments(tensors: Sequence[TensorInfo]) -> Index:
    """Return an index of tensors without fragments. Only the source knows their positions."""
    none = np.zeros(0, np.int64)
    ndim = max((len(info.shape) for info in tensors), default=0)
    boxes = np.zeros((0, ndim), np.int64)
    return Index.of_rows(tensors, (), none, none, none, none.astype(np.uint64), boxes, boxes)


def _optimizer(
    source: Checkpoint, record: OptimizerRecord, translation: Translation, stored: Mapping[str, str]
) -> OptimizerRecord:
    """Return hyperparameters and scalars by the names of the targets."""
    of = {name: [stored[piece.source] for piece in pieces] for name, pieces in translation.pieces.items() if pieces}

    def renamed(groups: Sequence[ParameterGroup]) -> tuple[ParameterGroup, ...]:
        first_equal = [
            next(at for at, other in enumerate(groups) if other.hyperparameters == group.hyperparameters) for group in groups
        ]
        number = {name: at for at, group in zip(first_equal, groups, strict=True) for name in group.parameters}
        members: list[list[str]] = [[] for _ in groups]
        for target, names in of.items():
            found = sorted({number.get(name, -1) for name in names})
            if len(found) > 1:
                other = next(name for name in names if number.get(name, -1) != number.get(names[0], -1))
                raise MismatchError(
                    f"{source.storage}: the sources {names[0]} and {other} of {target} have different hyperparameters or steps"
                )
            if found[0] >= 0:
                members[found[0]].append(target)
        return tuple(dataclasses.replace(group, parameters=tuple(names)) for group, names in zip(groups, members, strict=True))

    return OptimizerRecord(record.name, renamed(record.groups), renamed(record.scalars), record.stepped)


def uses_names(checkpoint: Checkpoint, wanted: Collection[str]) -> bool:
    """Whether the checkpoint already uses the wanted names, such as for a module built from the same parts.

    One name in common proves nothing: many models have ``lm_head.weight``.
    """
    aliases = checkpoint.manifest.aliases
    return 2 * sum(name in aliases or checkpoint.info(name, "weight") is not None for name in wanted) > len(wanted)


def under_names_of(source: Checkpoint, like: Checkpoint, *, chosen: str = "", option: str = "--dialect") -> Checkpoint:
    """Return a checkpoint under the names and shapes of another one; the same checkpoint if both have one dialect.

    Args:
        source: checkpoint to read.
        like: checkpoint with the wanted names.
        chosen: model family or dialect file, if neither checkpoint has the family.
        option: option for the choice, in messages.

    Raises:
        LanguageError: no dialect is known, or it does not fit.
        MismatchError: the models differ.
    """
    stored, wanted = source.manifest.writer, like.manifest.writer
    if stored.dialect == wanted.dialect:
        return source
    if OWN in (stored.dialect, wanted.dialect) and not chosen and uses_names(source, shapes_of(like)[0]):
        return source  # such as of one module in plain torch and under DeepSpeed
    where = str(source.storage)
    model = Model.from_json(wanted.model).with_more(Model.from_json(stored.model), where)
    outward = wanted.dialect == HUGGINGFACE
    name, other = (stored.dialect, wanted.dialect) if outward else (wanted.dialect, stored.dialect)
    rules = choose(name, other, chosen, model.family, where=where, option=option).of_model(model.facts)
    shapes = {info.name: info.shape for info in like.index.tensors if info.kind in TENSORS or info.state == "master"}
    return translated(source, rules.rules, shapes, rules.sizes_of(model.facts), outward=outward)
