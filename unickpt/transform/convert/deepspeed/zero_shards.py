"""Collection of the tensor parts in the files of a DeepSpeed job, with their positions in the global tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.transform.convert.deepspeed.files import EXPERTS, File, Folder, ModelRank, states_of
from unickpt.transform.convert.deepspeed.megatron_deepspeed import megatron_deepspeed
from unickpt.transform.convert.deepspeed.model_states import SourceBuilder, box_reader, flat_range_boxes, range_of_rank
from unickpt.transform.convert.deepspeed.tensor_parallel import SCALE_POWERS, Division, division
from unickpt.transform.convert.pickles.lazy_tensor import Located
from unickpt.transform.convert.pipeline import SourcePart
from unickpt.transform.convert.readings import Reading, Regions


@dataclass
class ShardedParameter:
    """A parameter during the read.

    Attributes:
        division: division among tensor parallel ranks.
        dtype: dtype of the weight; '' until it is known.
        masters: boxes of the master that were read so far.
        master_dtype: dtype of the master; '' until it is known.
    """

    division: Division
    dtype: str = ""
    masters: list[tuple[Box, Reading]] = field(default_factory=list)
    master_dtype: str = ""

    def info(self, name: str, state: str, dtype: str) -> TensorInfo:
        kind = "parameter" if state in ("weight", "master") else "optimizer"
        return TensorInfo(name, state, dtype, self.division.shape, kind)


class ShardCollector(SourceBuilder):
    """Collector of the parts of all tensors. Set ``tied`` and call ``divide`` before adding parts.

    Attributes:
        ranks: model parallel ranks.
        job: files of the tag.
        tensors: parameters and buffers by name.
        tied: further names of tied parameters, mapped to the stored name.
        owner: pipeline stage from which a parameter is read. Tied parameters are on several stages.
        info: ``universal_checkpoint_info``.
        megatron: facts about a Megatron-DeepSpeed job, or None.
        means: boxes of tensors whose mean over the ranks is used, per rank, by (name, state, dtype).
    """

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder.path, folder.first)
        self.ranks, self.job = folder.ranks, folder
        self.tensors: dict[str, ShardedParameter] = {}
        self.tied: dict[str, str] = {}
        self.owner: dict[str, int] = {}
        names = {name for rank in self.ranks for name in rank.weights}
        self.info = next((found for rank in self.ranks if (found := _universal_info(rank))), {})
        self.megatron = megatron_deepspeed(self.first, names, self.info)
        self.means: dict[tuple[str, str, str], list[list[tuple[Box, Located]]]] = {}
        if self.first.get("ds_autoep_layers", (list, dict)) or self.first.get("autoep_layers", (list, dict)):
            raise FormatError(f"{self.first.path}: checkpoints of AutoEP are not supported")

    def divide(self, stage: int) -> None:
        """Determine the global shape and the division of every parameter."""
        shapes: dict[str, dict[int, tuple[int, ...]]] = {}
        self._local = {rank.number: self._local_shapes(rank, stage) for rank in self.ranks}
        for rank in self.ranks:
            for name, shape in self._local[rank.number].items():
                if self.owner.setdefault(name, rank.stage) == rank.stage:
                    shapes.setdefault(name, {})[rank.tensor] = shape
        for name, of_rank in shapes.items():
            if len(of_rank) != self.job.tensors:
                raise FormatError(
                    f"{self.folder}: {name} is only on tensor parallel ranks {sorted(of_rank)}, expected all {self.job.tensors}"
                )
            each = [of_rank[rank] for rank in range(self.job.tensors)]
            parts = self.megatron.parts(name) if self.megatron is not None else 0
            self.tensors[name] = ShardedParameter(division(name, each, self.info, str(self.first.path), parts=parts))

    def _local_shapes(self, rank: ModelRank, stage: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters and buffers on a rank. Experts have their global numbers."""
        buffers = rank.first.buffers()
        found = {
            name: weight.data.shape
            for name, weight in rank.weights.items()
            if name not in self.tied and (stage < 3 or name in buffers)
        }
        for group in rank.first.group_shapes():
            found |= {name: shape for name, shape in group.items() if EXPERTS not in name}
        for file in rank.models.values():
            for name, shape in file.get("frozen_param_shapes", dict, {}).items():
                found[str(name)] = tuple(shape)
        return found

    # ---------------------------------------------------------------- parts

    def add_range(self, rank: ModelRank, file: File, name: str, state: str, lo: int, data: Located) -> None:
        """Add elements of a rank's tensor from flat position ``lo`` on. ``data`` is 1-D."""
        tensor = self.known(name, file)
        if self.owner.get(name, rank.stage) != rank.stage:
            return
        shape = self.shape_in(rank, name)
        if lo + data.numel > Box.whole(shape).numel:
            raise FormatError(f"{file.path}: {name} has {lo + data.numel:,} elements, which exceeds its shape {shape}")
        for box, part in flat_range_boxes(shape, lo, lo + data.numel, data):
            self.add_box(rank, file.path, name, state, box, part)
        if not data.numel:
            self.listed.append(tensor.info(name, state, data.dtype))

    def add_box(self, rank: ModelRank, path: Path, name: str, state: str, box: Box, data: Located) -> None:
        """Add a box of a rank's tensor."""
        tensor = self.tensors[name]
        info = tensor.info(name, state, data.dtype)
        if tensor.division.averaged:
            ranks = self.means.setdefault((name, state, data.dtype), [[] for _ in range(self.job.tensors)])
            ranks[rank.tensor].append((box, data))
            return
        for placed in tensor.division.placed[rank.tensor]:
            common = placed.common(box)
            if common is None:
                continue
            region, whole = common
            read = box_reader(whole, data.at(region.within(box)), placed.scale ** SCALE_POWERS.get(state, 1))
            if state == "weight" and tensor.masters:
                derived = TensorInfo(name, "weight", data.dtype, tensor.division.shape, "parameter", derived_from="master")
                self.add(path, SourcePart(derived, whole, read, unless=Regions(tensor.master_dtype, tensor.masters).read))
                continue
            self.add(path, SourcePart(info, whole, read))
            if state == "master":
                tensor.masters.append((whole, read))
                tensor.master_dtype = data.dtype

    def add_means(self) -> None:
        """Add the means of replicated tensors that differ between tensor parallel ranks, as ds_to_universal.py does."""
        for (name, state, dtype), ranks in self.means.items():
            tensor = self.tensors[name]
            readings = [Regions(dtype, [(box, box_reader(box, data)) for box, data in each]) for each in ranks]
            path = ranks[0][0][1].path if ranks[0] else self.first.path
            whole = Box.whole(tensor.division.shape)
            info = tensor.info(name, state, dtype)
            if state == "weight" and (name, "master", tensor.master_dtype) in self.means:
                continue  # derived from the mean of the masters
            self.add(path, SourcePart(info, whole, _mean(readings)))

    def known(self, name: str, file: File) -> ShardedParameter:
        found = self.tensors.get(name)
        if found is None:
            raise FormatError(f"{file.path}: no file has the shape of the parameter {name}")
        return found

    def shape_in(self, rank: ModelRank, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor on a rank, which is the global shape without tensor parallelism."""
        return self._local[rank.number][name] if self.job.tensors > 1 else self.tensors[name].division.shape

    def add_part_of_rank(
        self, rank: ModelRank, file: File, name: str, state: str, data: Located, part: int, parts: int
    ) -> None:
        """Add part ``part`` of ``parts`` of a tensor under ZeRO 3. The last parts may be padded."""
        self.known(name, file)
        numel = Box.whole(self.shape_in(rank, name)).numel
        lo, hi = range_of_rank(numel, part, parts)
        self.add_range(rank, file, name, state, lo, data.narrow(0, hi - lo))


def _mean(readings: Sequence[Regions]) -> Reading:
    def read(box: Box) -> torch.Tensor:
        total = readings[0].read(box)
        for each in readings[1:]:
            total = total + each.read(box)
        return total / len(readings)

    return read


def _universal_info(rank: ModelRank) -> Mapping[str, Any]:
    """Return the ``universal_checkpoint_info`` in the files of a rank, or an empty dictionary."""
    for file in (rank.first, *rank.optimizers.values()):
        for content in (file.content, states_of(file)):
            found = content.get("universal_checkpoint_info")
            if isinstance(found, dict) and found:
                return found
    return {}
