"""Writer of Megatron FSDP's ``fsdp_dtensor`` checkpoints, which a job with ``--use-megatron-fsdp`` resumes from.

    iter_0001000/__0_0.distcp, ...       tensors and objects
    iter_0001000/.metadata               table of torch.distributed.checkpoint
    latest_checkpointed_iteration.txt    the iteration

``fsdp_reader.py`` describes the names and is the inverse. A norm before a projection has two names: it is a part of the
projection in TransformerEngine's layers, and a module in Megatron's own. The table has both for the same bytes, and a job reads
its own. Random generators belong to ranks of the old layout and are not written.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unickpt.transform.convert.pipeline import OnBytes
from unickpt.base.errors import MismatchError
from unickpt.checkpoint.format.boxes import Box, cut
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.transform.convert.exported import Exported, filled
from unickpt.transform.convert.megatron.common_writer import common_of, hyperparameters_of
from unickpt.transform.convert.megatron.dist_writer import (
    target_of,
    tensors_by_name,
    tracked,
    trained_of,
    without_states,
)
from unickpt.transform.convert.megatron.fsdp_names import EXPERTS, META, MODEL, STATE, is_gated, layer_of, names_of
from unickpt.transform.convert.megatron.keys import CONTENT_METADATA, MASTER, WEIGHT
from unickpt.transform.convert.torch_dcp.files_writer import BLOCK_ELEMENTS, DcpWriter


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor that is a tensor of its own in ``fsdp_dtensor``: a layer, or a half of a gated projection.

    Attributes:
        names: names in the module, for the same bytes.
        box: where it is in the whole tensor.
        shape: its shape, without the axis of the layers.
    """

    names: tuple[str, ...]
    box: Box
    shape: tuple[int, ...]


def export_fsdp(
    checkpoint: Checkpoint, folder: Path, *, shard_bytes: int = 5 << 30, progress: OnBytes = lambda _: None
) -> Exported:
    """Write a folder that Megatron's ``--load`` accepts with ``--use-megatron-fsdp --ckpt-format fsdp_dtensor``.

    Arguments and errors: as for ``export`` in ``dist_writer.py``. It is also a MismatchError if the model has experts, or an
    optimizer state has another shape than its parameter.
    """
    step, tensors = checkpoint.manifest.step, tensors_by_name(checkpoint)
    target = target_of(folder, step)
    _check(checkpoint, tensors)
    trained = trained_of(tensors)
    notes = without_states(step, trained)
    common = common_of(checkpoint, trained, separate_experts=False, report=notes.append)
    groups = hyperparameters_of(checkpoint, trained, lambda _: None) if trained else {}
    shapes = {name: _weight(held).shape for name, held in tensors.items()}
    written: list[TensorInfo] = []
    with filled(target, *tracked(folder, step)) as fresh, DcpWriter(fresh, shard_bytes) as out:
        for name, held in tensors.items():
            written += _tensors(out, checkpoint, name, held, shapes, progress)
            _hyperparameters(out, name, groups.get(name, {}), shapes)
        for path, value in _objects(common):
            out.object(path, value)
        out.commit()
    size = sum(info.size_bytes for info in written)
    return Exported(target, len(written), size, tuple(out.names), tuple(notes))


def _check(checkpoint: Checkpoint, tensors: Mapping[str, Mapping[str, TensorInfo]]) -> None:
    where = checkpoint.storage
    for name, held in tensors.items():
        if EXPERTS in name:
            raise MismatchError(f"{where}: {name}: experts in fsdp_dtensor are not supported; export it with --to torch-dist")
        for state, info in held.items():
            if info.shape != _weight(held).shape:
                raise MismatchError(
                    f"{where}: {name}: {state} has the shape {info.shape}, its parameter {_weight(held).shape}. fsdp_dtensor "
                    "has only states of the shape of their parameter. Load it in Megatron with --ckpt-format unickpt"
                )


def _weight(held: Mapping[str, TensorInfo]) -> TensorInfo:
    """Return what Megatron FSDP stores as the weight: the master, if there is one."""
    return held.get(MASTER) or held[WEIGHT]


def _tensors(
    out: DcpWriter,
    checkpoint: Checkpoint,
    name: str,
    held: Mapping[str, TensorInfo],
    shapes: Mapping[str, tuple[int, ...]],
    progress: OnBytes,
) -> list[TensorInfo]:
    """Write weight and states of a parameter, in pieces. Return the tensors that were written."""
    states = {WEIGHT: _weight(held), **{state: info for state, info in held.items() if state not in (WEIGHT, MASTER)}}
    for piece in _pieces(name, shapes):
        for state, info in states.items():
            first, *others = [_path(name, state) for name in piece.names]
            for part in cut(Box.whole(piece.shape), BLOCK_ELEMENTS):
                data = checkpoint.read_box(info, _inside(piece, part), verify="off").view(part.shape)
                out.tensor(first, piece.shape, part, data)
                progress(data.numel() * data.element_size())
            for other in others:
                out.alias(other, ".".join(first))
    return list(states.values())


def _path(name: str, state: str) -> tuple[str, ...]:
    """Return the keys of a tensor. States have the name in the wrapped module."""
    return (MODEL, f"module.{name}") if state == WEIGHT else (*STATE, f"module.module.module.{name}", state)


def _inside(piece: _Piece, part: Box) -> Box:
    """Return the box of the whole tensor that is ``part`` of a piece."""
    lead = len(piece.box.start) - len(part.start)
    start = tuple(at + more for at, more in zip(piece.box.start[lead:], part.start, strict=True))
    return Box((*piece.box.start[:lead], *start), (*piece.box.shape[:lead], *part.shape))


def _pieces(name: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[_Piece]:
    """Yield the layers of a stack, and the two halves of a gated projection."""
    shape, stacked = shapes[name], layer_of(name, 0) != name
    rows = shape[1:] if stacked else shape
    halves = ("_w", "_v") if is_gated(name, shapes) else ("",)
    for layer in range(shape[0] if stacked else 1):
        lead = ((layer,), (1,)) if stacked else ((), ())
        for at, end in enumerate(halves):
            inner = (rows[0] // len(halves), *rows[1:]) if rows else ()
            start = (at * inner[0], *(0,) * (len(inner) - 1)) if inner else ()
            names = tuple(each + end for each in names_of(layer_of(name, layer)))
            yield _Piece(names, Box((*lead[0], *start), (*lead[1], *inner)), inner)


def _hyperparameters(out: DcpWriter, name: str, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    shape = shapes[name]
    layers = shape[0] if layer_of(name, 0) != name else 1
    for own in (each for layer in range(layers) for each in names_of(layer_of(name, layer))):
        for key, value in values.items():
            out.object((*META, f"module.module.module.{own}", key), value)


def _objects(common: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield Megatron's common state without the optimizer. Dictionaries are stored entry by entry."""
    for key, value in common.items():
        if key in (CONTENT_METADATA, "optimizer"):
            continue
        if isinstance(value, argparse.Namespace):
            yield (key,), argparse.Namespace(**{**vars(value), "ckpt_format": "fsdp_dtensor", "no_save_rng": True})
        elif isinstance(value, dict):
            yield from (((key, str(inner)), each) for inner, each in value.items() if not isinstance(each, torch.Tensor))
        else:
            yield (key,), value
