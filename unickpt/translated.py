"""A checkpoint as a job of another dialect sees it: its own names and shapes, read from the fragments that there are.

Nothing is converted beforehand. What is wanted of a tensor is a few pieces of stored ones; each is read where it belongs,
with whatever strides it has there, so that a load of another dialect reads the bytes that it needs and no others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from unickpt import objects as objects_module
from unickpt.errors import MismatchError
from unickpt.fragments import Box
from unickpt.index import Index, TensorInfo
from unickpt.language.facts import Model
from unickpt.language.pieces import Piece
from unickpt.language.rules import Rule
from unickpt.language.shipped import choose
from unickpt.language.translation import Translation, translate
from unickpt.loading import Checkpoint, Planned
from unickpt.manifest import OptimizerRecord, ParameterGroup
from unickpt.neighbours import Neighbours
from unickpt.reading import ReadStats, Request
from unickpt.report import Entry

TENSORS = ("parameter", "buffer")
HUGGINGFACE = "huggingface"


@dataclass(frozen=True, slots=True)
class _Sum:
    """What is added up once it is read, and goes where it belongs then.

    Attributes:
        place: where it belongs.
        total: of its shape, in a type that sums lose nothing in.
        terms: parts of the total, what is added there, and what it counts for.
    """

    place: torch.Tensor
    total: torch.Tensor
    terms: list[tuple[torch.Tensor, torch.Tensor, float]]


@dataclass(frozen=True, slots=True)
class _Planned(Planned):
    """Also what is zero before, and what is added up after all is read."""

    blank: Sequence[torch.Tensor] = ()
    sums: Sequence[_Sum] = ()


@dataclass(frozen=True)
class TranslatedCheckpoint(Checkpoint):
    """A checkpoint in another dialect.

    Attributes:
        source: as it is stored. Objects are its own.
        translation: of the tensors that are wanted.
        stored: names under which the sources of pieces are stored (tied parameters have several).
        job_objects: non-tensor state in this dialect's terms; None: as it is stored.
        job_notes: how that was made, for the report of a load.
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
            if info.derived_from is not None:  # what is stored of it goes over a cast that has been made
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
        return _Planned(planned.requests, planned.plan, planned.size_bytes, blank, sums)

    def fill(self, planned: Planned, *, verify: str = "always", neighbours: Neighbours | None = None) -> ReadStats:
        for place in planned.blank if isinstance(planned, _Planned) else ():
            place.detach().zero_()
        stats = self.source.fill(planned, verify=verify, neighbours=neighbours)
        for each in planned.sums if isinstance(planned, _Planned) else ():
            for target, data, weight in each.terms:
                target.add_(data, alpha=weight)
            each.place.detach().copy_(each.total)
        return stats

    def override_boxes(self, position: int) -> list[Box]:
        info = self.index.tensors[position]
        found: list[Box] = []
        pieces = self.translation.pieces[info.name]
        for piece in pieces if not _is_sum(pieces) else ():  # the cast of a sum is no sum of casts
            back = piece.inverted()
            for box in self.source.override_boxes(self.source.ids[self.stored[piece.source], info.state]):
                part = back.within(box)
                found += [read.source_box for read in part.reads()] if part is not None else []
        return found

    @property
    def untranslated(self) -> Sequence[str]:
        return self.translation.unused

    def objects(self, *, allow_pickle: bool = False) -> objects_module.Decoded:
        if self.job_objects is None:
            return self.source.objects(allow_pickle=allow_pickle)
        told = self.job_objects.keys() | {note.name for note in self.job_notes}
        others = sorted(
            name for name, value in self.source.manifest.objects.items() if value not in ({}, None) and name not in told
        )
        reason = f"state of {self.source.manifest.writer.framework}, which has no counterpart here"
        return objects_module.Decoded(dict(self.job_objects), [f"{name}: {reason}" for name in others])

    def rank_objects(self, rank: int, *, allow_pickle: bool = False) -> objects_module.Decoded:
        if self.job_objects is not None:
            return objects_module.Decoded({})
        return self.source.rank_objects(rank, allow_pickle=allow_pickle)

    def shared_names(self) -> list[str]:
        return self.source.shared_names()

    def shared_object(self, name: str, *, allow_pickle: bool = False) -> objects_module.Decoded:
        return self.source.shared_object(name, allow_pickle=allow_pickle)


def translated_from(checkpoint: Checkpoint) -> str:
    """For the heading of a load's report; '' of a checkpoint that is read as it is."""
    if not isinstance(checkpoint, TranslatedCheckpoint):
        return ""
    return f"; {len(checkpoint.translation.pieces)} tensors translated from {checkpoint.manifest.writer.dialect}"


def _is_sum(pieces: Sequence[Piece]) -> bool:
    return any(piece.term or piece.weight != 1.0 for piece in pieces)


def _strided(place: torch.Tensor, box: Box, read: Piece) -> torch.Tensor:
    """The part of a target's place that a piece fills, in the order of the source's dimensions."""
    strides = place.stride()
    offset = sum((at - first) * step for at, first, step in zip(read.target_start, box.start, strides, strict=True))
    return place.detach().as_strided(read.source_box.shape, read.strides(strides), place.storage_offset() + offset)


def shapes_of(checkpoint: Checkpoint) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shapes of all parameters and buffers by name, aliases too; and the name that each is stored under."""
    shapes = {info.name: info.shape for info in checkpoint.index.tensors if info.kind in TENSORS or info.state == "master"}
    stored = {name: name for name in shapes}
    for alias, name in checkpoint.manifest.aliases.items():
        if name in shapes and alias not in shapes:
            shapes[alias], stored[alias] = shapes[name], name
    return shapes, stored


def translated(
    source: Checkpoint, rules: Sequence[Rule], wanted: Mapping[str, Sequence[int]], sizes: Mapping[str, int], *,
    outward: bool = False,
) -> TranslatedCheckpoint:  # fmt: skip
    """A checkpoint as a job that wants tensors of these names and shapes sees it.

    Args:
        source: as it is stored.
        rules: of a dialect; wanted names are *here*, or *there* if ``outward``.
        wanted: shapes by name. What no rule knows, or whose sources are not there, is not in the result either.
        sizes: of axes.

    Raises:
        LanguageError, CoverageError: rules, shapes and sizes contradict each other.
        MismatchError: sources of one tensor are of several types.
    """
    shapes, stored = shapes_of(source)
    translation = translate(rules, wanted, shapes, sizes, outward=outward)
    used = {piece.source for pieces in translation.pieces.values() for piece in pieces}
    names = {stored[name] for name in used}
    translation.unused = [name for name in translation.unused if stored.get(name) not in names]  # but for other names of it
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
    where: str, name: str, shape: tuple[int, ...], made_of: Sequence[Mapping[str, TensorInfo]],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterable[TensorInfo]:  # fmt: skip
    """What there is of a target: the states that all of its sources have.

    Args:
        where: the checkpoint is, for messages.
        name, shape: of the target.
        made_of: of each source its states.
        shapes: of all sources' parameters.
    """
    for state in made_of[0] if made_of else ():
        known = [states[state] for states in made_of if state in states]
        if len(known) < len(made_of):
            continue
        cut = [info for info in known if info.shape != shapes[info.name]]
        if cut:
            raise MismatchError(f"{where}: {cut[0].name} ({state}) is {cut[0].shape}, its parameter is not")
        kinds = {(info.dtype, info.kind, info.derived_from) for info in known}
        if len(kinds) > 1:
            told = "; ".join(f"{info.name}: {info.dtype}" for info in known[:4])
            raise MismatchError(f"{where}: {name} ({state}) is made of tensors of several types: {told}")
        ((dtype, kind, derived_from),) = kinds
        yield TensorInfo(name, state, dtype, shape, kind, derived_from)


def without_fragments(tensors: Sequence[TensorInfo]) -> Index:
    """A table of tensors; where they are, only their source knows."""
    none = np.zeros(0, np.int64)
    ndim = max((len(info.shape) for info in tensors), default=0)
    boxes = np.zeros((0, ndim), np.int64)
    return Index(tuple(tensors), (), none.astype(np.int32), none.astype(np.int32), none, none.astype(np.uint64), boxes, boxes)


def _optimizer(
    source: Checkpoint, record: OptimizerRecord, translation: Translation, stored: Mapping[str, str]
) -> OptimizerRecord:
    """Hyperparameters and scalars by the names of targets."""
    of = {name: [stored[piece.source] for piece in pieces] for name, pieces in translation.pieces.items() if pieces}

    def renamed(groups: Sequence[ParameterGroup]) -> tuple[ParameterGroup, ...]:
        alike = [
            next(at for at, other in enumerate(groups) if other.hyperparameters == group.hyperparameters) for group in groups
        ]
        number = {name: at for at, group in zip(alike, groups, strict=True) for name in group.parameters}
        members: list[list[str]] = [[] for _ in groups]
        for target, names in of.items():
            found = sorted({number.get(name, -1) for name in names})
            if len(found) > 1:
                other = next(name for name in names if number.get(name, -1) != number.get(names[0], -1))
                raise MismatchError(
                    f"{source.storage}: {target} is made of {names[0]} and {other}, which have other hyperparameters or steps"
                )
            if found[0] >= 0:
                members[found[0]].append(target)
        return tuple(dataclasses.replace(group, parameters=tuple(names)) for group, names in zip(groups, members, strict=True))

    return OptimizerRecord(record.name, renamed(record.groups), renamed(record.scalars))


def under_names_of(source: Checkpoint, like: Checkpoint, *, chosen: str = "", option: str = "--dialect") -> Checkpoint:
    """A checkpoint under the names, and in the shapes, that another one has; itself, if they are of one dialect.

    Args:
        source: what is read.
        like: whose names are wanted.
        chosen: family of the model, or file of a dialect, where neither tells.
        option: by which a user can choose, for messages.

    Raises:
        LanguageError: no dialect is known, or it does not fit.
        MismatchError: they are of different models.
    """
    stored, wanted = source.manifest.writer, like.manifest.writer
    if stored.dialect == wanted.dialect:
        return source
    where = str(source.storage)
    model = Model.from_json(wanted.model).with_more(Model.from_json(stored.model), where)
    outward = wanted.dialect == HUGGINGFACE
    name, other = (stored.dialect, wanted.dialect) if outward else (wanted.dialect, stored.dialect)
    rules = choose(name, other, chosen, model.family, where=where, option=option).of_model(model.facts)
    shapes = {info.name: info.shape for info in like.index.tensors if info.kind in TENSORS or info.state == "master"}
    return translated(source, rules.rules, shapes, rules.sizes_of(model.facts), outward=outward)
