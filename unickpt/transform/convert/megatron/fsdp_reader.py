"""Reader of Megatron FSDP's ``fsdp_dtensor`` checkpoints: DTensors in files of torch.distributed.checkpoint.

Their content is defined by ``preprocess_fsdp_dtensor_state_dict`` in megatron/training/checkpointing.py and
``sharded_param_state_fsdp_dtensor`` in megatron/core/optimizer/distrib_optimizer.py. Weights are the float32 masters under
``model.module.<name>``, states are ``optimizer.state.module.module.module.<name>.<state>``, hyperparameters
``optimizer.param_to_group_meta.<the same name>.<key>``. The source has Megatron's names for every other format: the layers of a
stack are one tensor, and so are the two halves of a gated projection, which are apart here (``_w`` and ``_v``).
"""

from __future__ import annotations

import mmap
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unickpt.checkpoint.state.optimizer_record import grouped
from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord
from unickpt.transform.convert.limits import bounded
from unickpt.transform.convert.megatron.common_state import (
    arguments_of,
    name_of_optimizer,
    objects_of,
    step_of,
    writer_of,
)
from unickpt.transform.convert.megatron.fsdp_names import EXPERTS, META, MODEL, NORMS, STATE
from unickpt.transform.convert.megatron.keys import MASTER, WEIGHT
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
from unickpt.transform.convert.pickles.plain_values import NotPlainError, plain
from unickpt.transform.convert.pickles.regular_files import open_regular
from unickpt.transform.convert.pipeline import Portion, Source, SourcePart
from unickpt.transform.convert.readings import Reading
from unickpt.transform.convert.torch_dcp.files import METADATA, DcpTable, StoredTensor

_MODEL, _STATE, _META = f"{MODEL}.", f"{'.'.join(STATE)}.", f"{'.'.join(META)}."
_LAYER = re.compile(r"^(.*?\blayers)\.(\d+)\.(.+)$")
_HALVES = {"_w": 0, "_v": 1}


@dataclass(frozen=True)
class _Placed:
    """A stored tensor as a box of a tensor under Megatron's name.

    Attributes:
        name: Megatron's name.
        layer: number in its stack, or None.
        half: 0 or 1 for a half of a gated projection, or None.
        stored: the stored tensor.
    """

    name: str
    layer: int | None
    half: int | None
    stored: StoredTensor

    def boxes(self, layers: int) -> tuple[tuple[int, ...], list[tuple[Box, Reading]]]:
        """Return the shape of the whole tensor, and the boxes of this part of it with the functions that read them."""
        lead = () if self.layer is None else (self.layer,)
        rows = self.stored.shape[0] if self.half is not None else 0
        shape = (rows * 2, *self.stored.shape[1:]) if self.half is not None else self.stored.shape
        found = []
        for chunk in self.stored.chunks:
            start = (chunk.box.start[0] + rows * (self.half or 0), *chunk.box.start[1:]) if chunk.box.start else ()
            box = Box((*lead, *start), (*(1,) * len(lead), *chunk.box.shape))
            found.append((box, _moved(chunk, len(lead), rows * (self.half or 0))))
        return (*((layers,) if lead else ()), *shape), found


def _moved(read: Reading, lead: int, rows: int) -> Reading:
    """Return ``read`` for boxes with ``lead`` axes more in front, and ``rows`` more rows before them."""

    def moved(box: Box) -> torch.Tensor:
        start = box.start[lead:]
        return read(Box((start[0] - rows, *start[1:]) if start else (), box.shape[lead:]))

    return moved


def _renamed(key: str) -> str:
    """Return a name in the module without its wrappers, and with Megatron's names of norms."""
    name = re.sub(r"^(module\.)+", "", key)
    for own, everywhere in NORMS.items():
        name = name.replace(own, everywhere)
    return name


def is_megatron_fsdp(folder: Path) -> bool:
    """Return whether Megatron FSDP wrote a folder: its table names the parameters of the groups."""
    try:
        descriptor = open_regular(folder / METADATA)
        with os.fdopen(descriptor, "rb"), mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as table:
            return table.find(_META.encode()) >= 0
    except (OSError, FormatError, ValueError):  # a ValueError: an empty file cannot be mapped
        return False


@bounded
def megatron_fsdp(folder: Path, files: OpenFiles, *, also: Sequence[str] = ()) -> Source:
    """Open the iteration folder (``iter_0001000``) of a checkpoint of ``--ckpt-format fsdp_dtensor``.

    Arguments and errors: see ``bounded``. It is also a FormatError if the model has experts.
    """
    return _FsdpReader(folder, files, also).source()


class _FsdpReader:
    """Builder of the source from the table of a folder."""

    def __init__(self, folder: Path, files: OpenFiles, also: Sequence[str]) -> None:
        self.folder = folder
        self.left_out: list[str] = []
        self._table = DcpTable(folder, files, also)
        self._parts: dict[tuple[str, str], list[_Placed]] = defaultdict(list)
        for key, stored in self._table.tensors.items():
            if key.startswith(_MODEL):
                self._add(key.removeprefix(_MODEL), WEIGHT, stored)
            elif key.startswith(_STATE):
                name, _, state = key.removeprefix(_STATE).rpartition(".")
                self._add(name, state, stored)

    def _add(self, key: str, state: str, stored: StoredTensor) -> None:
        if EXPERTS in key:
            raise FormatError(
                f"{self.folder}: {key}: experts in fsdp_dtensor are not supported. Load the checkpoint with Megatron FSDP, "
                "or train with --use-distributed-optimizer and --ckpt-format unickpt"
            )
        placed = self._placed(key, stored)
        parts = self._parts[placed.name, state]
        if all((each.layer, each.half) != (placed.layer, placed.half) for each in parts):  # else the second name of a norm
            parts.append(placed)

    def _placed(self, key: str, stored: StoredTensor) -> _Placed:
        name = _renamed(key)
        half = _HALVES.get(name[-2:]) if name.endswith(tuple(_HALVES)) else None
        name = name[:-2] if half is not None else name
        match = _LAYER.match(name)
        if match is None:
            return _Placed(name, None, half, stored)
        return _Placed(f"{match[1]}.{match[3]}", int(match[2]), half, stored)

    # ---------------------------------------------------------------- source

    def source(self) -> Source:
        trained = {name for name, state in self._parts if state != WEIGHT}
        parts: dict[str, list[SourcePart]] = defaultdict(list)
        paths: dict[str, set[Path]] = defaultdict(set)
        derived = []
        for (name, state), placed in self._parts.items():
            whole = self._shape(name, state, placed)
            is_weight = state == WEIGHT
            kind = "parameter" if is_weight else "optimizer"
            dtype = placed[0].stored.dtype
            info = TensorInfo(name, MASTER if is_weight and name in trained else state, dtype, whole, kind)
            if info.state == MASTER:
                derived.append(TensorInfo(name, WEIGHT, dtype, whole, kind, MASTER))
            for each in placed:
                for chunk, (box, read) in zip(each.stored.chunks, each.boxes(self._layers(placed))[1], strict=True):
                    parts[chunk.place.relative].append(SourcePart(info, box, read))
                    paths[chunk.place.relative].add(chunk.place.path)
        portions = [Portion(name.replace("/", "-"), parts[name], sorted(paths[name])) for name in sorted(parts)]
        common = dict(self._common())
        arguments = arguments_of(common, self.left_out.append)
        return Source(
            "Megatron fsdp_dtensor",
            portions,
            writer_of(arguments),
            step=step_of(common),
            tensors=derived,
            optimizer=self._record(trained),
            objects=objects_of(common, arguments, (), bool(trained), self.left_out.append),
            left_out=self.left_out,
        )

    def _layers(self, placed: Sequence[_Placed]) -> int:
        return 1 + max((each.layer for each in placed if each.layer is not None), default=0)

    def _shape(self, name: str, state: str, placed: Sequence[_Placed]) -> tuple[int, ...]:
        layers = self._layers(placed)
        shapes = {each.boxes(layers)[0] for each in placed}
        expected = (layers if placed[0].layer is not None else 1) * (2 if placed[0].half is not None else 1)
        if len(shapes) != 1 or len(placed) != expected or len({each.stored.dtype for each in placed}) != 1:
            raise FormatError(f"{self.folder}: the layers of {name} ({state}) are not alike, so they are not one tensor")
        return shapes.pop()

    # ---------------------------------------------------------------- hyperparameters and objects

    def _record(self, trained: set[str]) -> OptimizerRecord | None:
        """Return hyperparameters and step. Of a stack, those of its first layer count; Megatron's groups divide no stack."""
        values: dict[str, dict[str, Any]] = {}
        for key in self._table.objects:
            if key.startswith(_META):
                path, _, option = key.removeprefix(_META).rpartition(".")
                name = re.sub(r"\blayers\.\d+\.", "layers.", _renamed(path))
                name = name[:-2] if name.endswith(tuple(_HALVES)) else name
                if name in trained and option not in values.setdefault(name, {}) and option != "params":
                    try:
                        values[name][option] = plain(self._table.load(self._table.objects[key], key), key)
                    except NotPlainError as err:
                        self.left_out.append(str(err))
        if not values:
            return None
        steps = {name: held.pop("step") for name, held in values.items() if "step" in held}
        groups, counts = grouped(values), grouped({name: {"step": step} for name, step in steps.items()})
        return OptimizerRecord(name_of_optimizer({state for _, state in self._parts}, list(values.values())), groups, counts)

    def _common(self) -> Iterator[tuple[str, Any]]:
        """Yield Megatron's common state. Generators belong to ranks of the old layout."""
        nested: dict[str, dict[str, Any]] = defaultdict(dict)
        for key, place in self._table.objects.items():
            first, _, rest = key.partition(".")
            if first in ("model", "optimizer", "rng_state", "rerun_state_machine"):
                continue
            value = self._table.load(place, key)
            if rest:
                nested[first][rest] = value
            else:
                yield key, value
        yield from nested.items()
        self.left_out.append("rng_state: generators belong to the ranks of the job that saved them")
