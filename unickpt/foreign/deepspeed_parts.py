"""Tensors of a DeepSpeed job as its files hold them in parts: what each is, and where a rank's elements lie in the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unickpt.converting import Part, Reading, Regions
from unickpt.errors import FormatError
from unickpt.foreign.deepspeed_files import EXPERTS, File, Folder, ModelRank, states_of
from unickpt.foreign.deepspeed_parallel import SCALE_POWERS, Division, division
from unickpt.foreign.deepspeed_states import Described, reader
from unickpt.foreign.located import Located
from unickpt.foreign.megatron_deepspeed import megatron_deepspeed
from unickpt.fragments import Box, split_flat_range
from unickpt.index import TensorInfo


@dataclass
class Tensor:
    """What is known of a parameter while files are read. Attributes: how it is divided, type of its weight, its masters."""

    division: Division
    dtype: str = ""
    masters: list[tuple[Box, Reading]] = field(default_factory=list)
    master_dtype: str = ""

    def info(self, name: str, state: str, dtype: str) -> TensorInfo:
        kind = "parameter" if state in ("weight", "master") else "optimizer"
        return TensorInfo(name, state, dtype, self.division.shape, kind)


class Parts(Described):
    """Collects the parts of all tensors. Attributes: model parallel ranks, their job, what is known of the tensors.

    ``divide`` comes first, with further names of tied parameters in ``tied``.
    """

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder.path, folder.first)
        self.ranks, self.job = folder.ranks, folder
        self.tensors: dict[str, Tensor] = {}
        self.tied: dict[str, str] = {}  # further name -> name
        self.owner: dict[str, int] = {}  # pipeline stage of which a parameter is taken: tied ones are on several
        names = {name for rank in self.ranks for name in rank.weights}
        self.told = next((found for rank in self.ranks if (found := _universal_info(rank))), {})
        self.megatron = megatron_deepspeed(self.first, names, self.told)
        self.means: dict[tuple[str, str, str], list[list[tuple[Box, Located]]]] = {}
        if self.first.get("ds_autoep_layers", (list, dict)) or self.first.get("autoep_layers", (list, dict)):
            raise FormatError(f"{self.first.path}: of AutoEP, whose files are not read")

    def divide(self, stage: int) -> None:
        """What every parameter is, of all ranks together."""
        shapes: dict[str, dict[int, tuple[int, ...]]] = {}
        self._local = {rank.number: self._local_shapes(rank, stage) for rank in self.ranks}
        for rank in self.ranks:
            for name, shape in self._local[rank.number].items():
                if self.owner.setdefault(name, rank.stage) == rank.stage:
                    shapes.setdefault(name, {})[rank.tensor] = shape
        for name, of_rank in shapes.items():
            if len(of_rank) != self.job.tensors:
                raise FormatError(f"{self.folder}: {name} is on tensor parallel ranks {sorted(of_rank)} of {self.job.tensors}")
            each = [of_rank[rank] for rank in range(self.job.tensors)]
            parts = self.megatron.parts(name) if self.megatron is not None else 0
            self.tensors[name] = Tensor(division(name, each, self.told, str(self.first.path), parts=parts))

    def _local_shapes(self, rank: ModelRank, stage: int) -> dict[str, tuple[int, ...]]:
        """Of a rank's parameters and buffers, as it holds them; of experts by their number among all."""
        buffers = set(rank.first.get("buffer_names", (list, tuple), ()))
        found = {
            name: weight.data.shape for name, weight in rank.weights.items()
            if name not in self.tied and (stage < 3 or name in buffers)
        }  # fmt: skip
        for group in rank.group_shapes():
            found |= {name: shape for name, shape in group.items() if EXPERTS not in name}
        for file in rank.models.values():
            for name, shape in file.get("frozen_param_shapes", dict, {}).items():
                found[str(name)] = tuple(shape)
        return found

    # ---------------------------------------------------------------- parts

    def add_range(self, rank: ModelRank, file: File, name: str, state: str, lo: int, data: Located) -> None:
        """Elements of a rank's tensor, from ``lo`` on in row-major order, 1-D."""
        tensor = self.known(name, file)
        if self.owner.get(name, rank.stage) != rank.stage:
            return
        shape = self.shape_in(rank, name)
        if lo + data.numel > Box.whole(shape).numel:
            raise FormatError(f"{file.path}: {name} has shape {shape}, and {lo + data.numel:,} elements of it are there")
        at = 0
        for box in split_flat_range(shape, lo, lo + data.numel):
            self.add_box(rank, file.path, name, state, box, data.narrow(at, at + box.numel).view(box.shape))
            at += box.numel
        if not data.numel:
            self.listed.append(tensor.info(name, state, data.dtype))

    def add_box(self, rank: ModelRank, path: Path, name: str, state: str, box: Box, data: Located) -> None:
        """A box of a rank's tensor."""
        tensor = self.tensors[name]
        info = tensor.info(name, state, data.dtype)
        if tensor.division.averaged:
            ranks = self.means.setdefault((name, state, data.dtype), [[] for _ in range(self.job.tensors)])
            ranks[rank.tensor].append((box, data))
            return
        for placed in tensor.division.placed[rank.tensor]:
            common = placed.local.intersect(box)
            if common is None:
                continue
            start = tuple(a + b for a, b in zip(placed.whole.start, common.within(placed.local).start, strict=True))
            whole = Box(start, common.shape)
            read = reader(whole, data.at(common.within(box)), placed.scale ** SCALE_POWERS.get(state, 1))
            if state == "weight" and tensor.masters:
                derived = TensorInfo(name, "weight", data.dtype, tensor.division.shape, "parameter", derived_from="master")
                self.add(path, Part(derived, whole, read, unless=Regions(tensor.master_dtype, tensor.masters).read))
                continue
            self.add(path, Part(info, whole, read))
            if state == "master":
                tensor.masters.append((whole, read))
                tensor.master_dtype = data.dtype

    def add_means(self) -> None:
        """What every tensor parallel rank holds, with differences: the mean, as ds_to_universal.py computes it."""
        for (name, state, dtype), ranks in self.means.items():
            tensor = self.tensors[name]
            readings = [Regions(dtype, [(box, reader(box, data)) for box, data in each]) for each in ranks]
            path = ranks[0][0][1].path if ranks[0] else self.first.path
            whole = Box.whole(tensor.division.shape)
            info = tensor.info(name, state, dtype)
            if state == "weight" and (name, "master", tensor.master_dtype) in self.means:
                continue  # told by the mean of the masters
            self.add(path, Part(info, whole, _mean(readings)))

    def known(self, name: str, file: File) -> Tensor:
        found = self.tensors.get(name)
        if found is None:
            raise FormatError(f"{file.path}: {name} is a parameter whose shape no file tells")
        return found

    def shape_in(self, rank: ModelRank, name: str) -> tuple[int, ...]:
        """Of a rank's tensor, which is the whole but for tensor parallel ranks."""
        return self._local[rank.number][name] if self.job.tensors > 1 else self.tensors[name].division.shape

    def add_part_of_rank(
        self, rank: ModelRank, file: File, name: str, state: str, data: Located, part: int, parts: int
    ) -> None:
        """The n-th part of a tensor under ZeRO 3, of which the last ones may be filled up."""
        self.known(name, file)
        numel = Box.whole(self.shape_in(rank, name)).numel
        length = -(-numel // parts)
        lo, hi = min(part * length, numel), min((part + 1) * length, numel)
        self.add_range(rank, file, name, state, lo, data.narrow(0, hi - lo))


def _mean(readings: Sequence[Regions]) -> Reading:
    def read(box: Box) -> torch.Tensor:
        total = readings[0].read(box)
        for each in readings[1:]:
            total = total + each.read(box)
        return total / len(readings)

    return read


def _universal_info(rank: ModelRank) -> Mapping[str, Any]:
    """What it says of its division over tensor parallel ranks."""
    for file in (rank.first, *rank.optimizers.values()):
        for content in (file.content, states_of(file)):
            found = content.get("universal_checkpoint_info")
            if isinstance(found, dict) and found:
                return found
    return {}
