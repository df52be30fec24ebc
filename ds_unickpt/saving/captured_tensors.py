"""The tensors of a DeepSpeed engine that this rank writes: masters, states, weights that are not casts, buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from ds_unickpt.framework import partitions
from ds_unickpt.held_state.engine_view import EngineView
from ds_unickpt.held_state.names import ModuleNames
from ds_unickpt.placing.slices import FlatPlace, Slice, places
from unickpt.base.options.job import Options
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import name_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.state.held import Copies, Description, Held

_info = lru_cache(maxsize=1 << 16)(TensorInfo)  # the same at every save


def _stored(part: Slice, lo: int, hi: int, *, stored: bool, across: bool) -> tuple[FlatPlace, ...]:
    """Return the parts of a flat range of a rank's slice that the rank stores. ``stored``, ``across``: as in ``Partition``."""
    return places(part.local, part.boxes if across else part.own, lo, hi) if stored else ()


def _add(
    out: Description, info: TensorInfo, found: Sequence[FlatPlace], at: int, flat: torch.Tensor, copies: Copies | None = None,
    unless: tuple[int, torch.Tensor] | None = None, *, steady: bool = False,
) -> None:  # fmt: skip
    """Add a flat range of this rank's slice of a tensor.

    Args:
        found: the parts of the range that the rank stores.
        at: position of the range in ``flat``, which is 1-D.
        unless: position of the range in a flat tensor of masters, and this tensor.
        steady: as in ``Held``.
    """
    for part in found:
        master = None if unless is None else part.of(unless[1], unless[0])
        out.held.append(Held(info, part.whole, part.of(flat, at), copies, master, steady))


def add_optimized(out: Description, view: EngineView) -> None:
    """Add masters and optimizer states. Also add the weights that are not the cast of their masters."""
    names, slices, placed = view.names, view.slices, view.placed
    for part in view.parts:
        held = {"master": part.elements, **view.states(part)}
        flats = {key: tensor.detach().reshape(-1) for key, tensor in held.items()}
        states = [
            (key, name_of(tensor.dtype, key), "parameter" if key == "master" else "optimizer") for key, tensor in held.items()
        ]
        known = {}
        for parameter in part.parameters:
            own, name = slices.of(parameter), names.name(parameter)
            infos = {key: _info(name, key, dtype, own.shape, kind) for key, dtype, kind in states}
            infos["weight"] = _info(name, "weight", name_of(parameter.dtype, name), own.shape, "parameter", "master")
            known[id(parameter)] = infos
            out.tensors += infos.values()
        found = []
        for piece in part.pieces:
            stored = part.stored and names.name(piece.parameter) not in names.elsewhere
            own = slices.of(piece.parameter)
            found.append((piece, _stored(own, piece.lo, piece.hi, stored=stored, across=part.across)))
        copies = {id(p): placed.copies(names.holders(names.name(p))) if part.replicated else None for p in part.parameters}
        for key, flat in flats.items():
            for held_at, (piece, where) in zip(part.own(key), found, strict=True):
                info, shared = known[id(piece.parameter)][key], copies[id(piece.parameter)]
                _add(out, info, where, held_at.at, flat, shared, steady=not view.unsteady)
        for piece, where in found:
            weight, info = part.weight_of(piece), known[id(piece.parameter)]["weight"]
            if weight is not None:
                unless = (piece.at, flats["master"])
                _add(out, info, where, 0, weight, copies[id(piece.parameter)], unless, steady=not view.unsteady)


def add_others(out: Description, view: EngineView, exclude_frozen: bool) -> tuple[list[str], tuple[str, ...]]:
    """Add the parameters outside the optimizer, such as frozen and empty ones.

    Returns:
        The names of these parameters, and of those that are excluded.
    """
    names, placed = view.names, view.placed
    optimized = {id(p) for part in view.parts for p in part.parameters}
    others, excluded = [], []
    for name, parameter in names.parameters.items():
        if id(parameter) in optimized:
            continue
        others.append(name)
        if exclude_frozen and not parameter.requires_grad:
            excluded.append(name)
            continue
        part = view.slices.of(parameter)
        info = TensorInfo(name, "weight", name_of(parameter.dtype, name), part.shape, "parameter")
        out.tensors.append(info)
        held = partitions.held(parameter, placed)
        if held is None:
            continue
        stored = held.stored and name not in names.elsewhere
        copies = placed.copies(names.holders(name)) if held.replicated else None
        where = _stored(part, held.lo, held.hi, stored=stored, across=held.across)
        _add(out, info, where, 0, held.data, copies, steady=not view.unsteady)
    return others, tuple(excluded)


def stored_buffers(names: ModuleNames, options: Options) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers that a checkpoint has, by name."""
    return [(each.name, each.tensor) for each in names.buffers if each.persistent or options.non_persistent_buffers]


def add_buffers(out: Description, view: EngineView, options: Options) -> None:
    """Add the buffers that this rank is the first one to have. Running statistics differ between ranks, so parts do not fit."""
    for name, buffer in stored_buffers(view.names, options):
        info = TensorInfo(name, "weight", name_of(buffer.dtype, name), tuple(buffer.shape), "buffer")
        out.tensors.append(info)
        if view.placed.leads(view.names.having(name)) and info.numel:
            out.held.append(Held(info, Box.whole(info.shape), buffer))
