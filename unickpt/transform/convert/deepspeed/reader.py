"""Reader of native DeepSpeed checkpoints: ZeRO 0 to 3, pipelines, experts and tensor parallelism.

Their content is defined by ``_save_checkpoint`` in deepspeed/runtime/engine.py and by ``state_dict`` in zero/stage_1_and_2.py,
zero/stage3.py, bf16_optimizer.py and fp16/unfused_optimizer.py. Under ZeRO 1 and 2, masters and states are one flat tensor per
group, and ``param_slice_mappings`` has the ranges of the parameters. Under ZeRO 3, every rank has one part of each parameter,
back to back in the order of ``param_shapes``. Without ZeRO they are complete and numbered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unickpt.base.errors import FormatError
from unickpt.base.listing import some
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord, Writer, merge_optimizers
from unickpt.transform.convert.deepspeed.files import EXPERTS, File, ModelRank, first_missing, read_folder, states_of
from unickpt.transform.convert.deepspeed.model_states import is_flat, require_tensor, tied_names, zero_stage_of
from unickpt.transform.convert.deepspeed.zero_shards import ShardCollector, ShardedParameter
from unickpt.transform.convert.limits import bounded
from unickpt.transform.convert.parameter_order import NoOrderError, match_names
from unickpt.transform.convert.pickles.lazy_tensor import Located, OpenFiles
from unickpt.transform.convert.pipeline import Portion, Source, SourcePart


@bounded
def deepspeed(folder: Path, files: OpenFiles, *, also: Sequence[str] = ()) -> Source:
    """Open the tag folder (``global_step1000``) of a native DeepSpeed checkpoint. Arguments and errors: see ``bounded``."""
    return _NativeReader(read_folder(folder, files, also)).source()


class _NativeReader(ShardCollector):
    """Builder of the source from the files of a tag."""

    # ---------------------------------------------------------------- the whole

    def source(self) -> Source:
        stage = self._stage()
        self.tied = tied_names(self.first, {name: weight.data for name, weight in self.ranks[0].weights.items()})
        self.divide(stage)
        optimizers = [self._optimizer(rank) for rank in self.ranks]
        for rank in self.ranks:
            self._weights(rank, stage)
        self.add_means()
        portions = [Portion(path.name, parts, self._inputs(path, parts)) for path, parts in sorted(self.parts.items()) if parts]
        found = [record for record in optimizers if record is not None]
        files = [file for rank in self.ranks for file in rank.optimizers.values()]
        scaler = next((states_of(file).get("loss_scaler") for file in files), None)
        return Source(
            f"DeepSpeed ZeRO-{stage}", portions, self._writer(stage), step=self.number("global_steps"),
            tensors=self.listed, optimizer=merge_optimizers(None, found), aliases=self.tied, objects=self.objects(scaler),
            left_out=self.left_out,
        )  # fmt: skip

    def _writer(self, stage: int) -> Writer:
        found = self.megatron
        return self.writer(self._topology(stage), *((found.dialect, found.model) if found is not None else ()))

    def _inputs(self, path: Path, parts: Sequence[SourcePart]) -> list[Path]:
        """Return the input files of a portion. A weight is compared with its master, which is in another file."""
        compared = any(part.unless is not None for part in parts)
        masters = [file.path for rank in self.ranks for file in rank.optimizers.values()] if compared else []
        return sorted({path, *masters})

    def _stage(self) -> int:
        files = [file for rank in self.ranks for file in rank.optimizers.values()]
        stages = {int(zero_stage_of(states_of(file).get("zero_stage", -1))) for file in files}
        if len(stages) > 1:
            raise FormatError(f"{self.folder}: has files of several ZeRO stages ({sorted(stages)})")
        config = self.first.get("ds_config", dict, {}).get("zero_optimization")
        if not stages or stages == {-1}:  # no ZeRO, or BF16_Optimizer, whose files do not contain the stage
            return int(config.get("stage", 0)) if isinstance(config, dict) and stages else 0
        return stages.pop()

    def _topology(self, stage: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "world_size": self.number("dp_world_size") * self.job.stages * self.job.tensors,
            "zero_stage": stage,
            "weight_dtypes": sorted({tensor.dtype for tensor in self.tensors.values() if tensor.dtype}),
        }
        return found | {key: n for key, n in (("pipeline", self.job.stages), ("tensor", self.job.tensors)) if n > 1}

    # ---------------------------------------------------------------- weights and buffers

    def _weights(self, rank: ModelRank, stage: int) -> None:
        buffers = rank.first.buffers()
        if rank.number == 0:
            reason = "extra state of a module, which only its own code can read"
            self.left_out += [f"{name}: {reason}" for name in rank.extra_states]
        for name, weight in rank.weights.items():
            if name in self.tied or self.owner.get(name, rank.stage) != rank.stage:
                continue
            data = weight.data
            if name in buffers:
                if rank.tensor == 0:
                    info = TensorInfo(name, "weight", data.dtype, data.shape, "buffer")
                    self.add(weight.path, SourcePart.whole(info, data))
                continue
            tensor = self.tensors.get(name)
            if tensor is not None:
                tensor.dtype = data.dtype
            if stage == 3:
                if tensor is not None and tensor.masters:
                    self._derived(name, tensor)
            elif tensor is not None:
                if tensor.masters or (name, "master", tensor.master_dtype) in self.means:
                    self._derived(name, tensor)
                self.add_box(rank, weight.path, name, "weight", Box.whole(data.shape), data)
        if stage == 3:
            self._frozen(rank)

    def _derived(self, name: str, tensor: ShardedParameter) -> None:
        """List a weight that is derived from its master; parts that differ from the cast are added separately."""
        shape = tensor.division.shape
        self.listed.append(TensorInfo(name, "weight", tensor.dtype, shape, "parameter", derived_from="master"))

    def _frozen(self, rank: ModelRank) -> None:
        """Add the parts of frozen parameters under ZeRO 3."""
        for data_rank, file in sorted(rank.models.items()):
            for name, found in file.get("frozen_param_fragments", dict, {}).items():
                part = require_tensor(file, found, name).flat()
                self.known(name, file).dtype = part.dtype
                self.add_part_of_rank(rank, file, name, "weight", part, data_rank, len(rank.models))

    # ---------------------------------------------------------------- masters and states

    def _optimizer(self, rank: ModelRank) -> OptimizerRecord | None:
        if not rank.optimizers:
            return self._whole(rank, rank.first, 0)
        if any("optimizer_state_dict" not in file.content for file in rank.optimizers.values()):
            found = [self._whole(rank, file, expert) for expert, file in sorted(rank.optimizers.items())]
            return merge_optimizers(None, [record for record in found if record is not None])
        expected = self.number("dp_world_size")
        if first_missing(rank.optimizers) is not None or (expected and expected != len(rank.optimizers)):
            count = expected or max(rank.optimizers) + 1
            missing = [f"{at}" for at in range(count) if at not in rank.optimizers]
            lacks = f": *_optim_states.pt of data parallel rank {some(missing)} is missing" if missing else ""
            raise FormatError(
                f"{self.folder}: model parallel rank {rank.number} has {len(rank.optimizers)} files of optimizer states, "
                f"expected {count}{lacks}. Copy the files of all hosts into the folder, or convert an "
                "older checkpoint"
            )
        records = []
        done: dict[str, int] = {}
        for data_rank, file in sorted(rank.optimizers.items()):
            states = states_of(file)
            if "fp32_flat_groups" in states:
                found_one = self._partitioned_parameters(rank, file, states, data_rank)
            elif "single_partition_of_fp32_groups" in states:
                found_one = self._partitioned_groups(rank, file, states, data_rank, done)
            else:
                raise FormatError(f"{file.path}: has masters in an unknown form ({', '.join(sorted(states))})")
            records.append(found_one)
        for name, count in done.items():
            shape = self.shape_in(rank, name)
            if count != Box.whole(shape).numel:
                raise FormatError(f"{self.folder}: the files have {count:,} elements of {name}, whose shape is {shape}")
        return merge_optimizers(None, records)

    def _expert_name(self, name: str, expert_rank: int, expert_ranks: int) -> str:
        """Return the name of an expert with its global number instead of its number on the rank."""
        layer, is_expert, rest = name.partition(EXPERTS)
        if not is_expert:
            return name
        local, _, inner = rest.partition(".")
        total = self.job.experts.get(layer, 0)
        if not total or total % expert_ranks:
            raise FormatError(
                f"{self.folder}: {layer} has {total} experts, which {expert_ranks} expert parallel ranks cannot divide evenly"
            )
        return f"{layer}{EXPERTS}{expert_rank * (total // expert_ranks) + int(local)}.{inner}"

    def _partitioned_groups(
        self, rank: ModelRank, file: File, states: Mapping[str, Any], data_rank: int, done: dict[str, int]
    ) -> OptimizerRecord:
        """Add the range of a rank in every flat group, under ZeRO 1 and 2 and with BF16_Optimizer."""
        inner = states.get("base_optimizer_state")
        if not isinstance(inner, dict):
            raise FormatError(f"{file.path}: was written with elastic_checkpoint, whose states have no parameter names")
        flats, mappings = states["single_partition_of_fp32_groups"], states.get("param_slice_mappings") or []
        groups = inner.get("param_groups", [])
        if not len(mappings) == len(flats) == len(groups):
            raise FormatError(
                f"{file.path}: has {len(flats)} flat groups, {len(groups)} parameter groups and {len(mappings)} "
                "param_slice_mappings, expected the same number"
            )
        counts = states.get("partition_count")
        scalars: list[Mapping[str, Any]] = []
        names: list[list[str]] = []
        shapes = rank.first.group_shapes()
        for at, (flat, mapping) in enumerate(zip(flats, mappings, strict=True)):
            held = {"master": flat, **inner.get("state", {}).get(at, {})}
            tensors = {key: each.flat() for key, each in held.items() if is_flat(each)}
            scalars.append({key: each for key, each in held.items() if key not in tensors})
            ways = len(rank.optimizers) // int(counts[at]) if isinstance(counts, (list, tuple)) else 1
            expert = data_rank % max(ways, 1), max(ways, 1)
            listed = [self._expert_name(name, *expert) for name in (shapes[at] if at < len(shapes) else mapping)]
            for local, address in mapping.items():
                name = self._expert_name(local, *expert)
                start, count = int(address.state["start"]), int(address.state["numel"])
                lo = done.get(name, 0)
                done[name] = lo + count
                for key, data in tensors.items():
                    self.add_range(rank, file, name, key, lo, data.narrow(start, start + count))
            names.append(listed)
        return self.optimizer_record(groups, scalars, names, states)

    def _partitioned_parameters(
        self, rank: ModelRank, file: File, states: Mapping[str, Any], data_rank: int
    ) -> OptimizerRecord:
        """Add the part of a rank of every parameter under ZeRO 3, stored group after group."""
        inner = states.get("optimizer_state_dict")
        flats = [require_tensor(file, flat, "a flat group").flat() for flat in states["fp32_flat_groups"]]
        if not isinstance(inner, dict):
            raise FormatError(f"{file.path}: has no optimizer states")
        if states.get("ds_zero_partition_groups"):
            raise FormatError(
                f"{file.path}: has parameters with separate partition groups (ds_zero_partition_groups), which is not supported"
            )
        world = len(rank.optimizers)
        group = at = 0
        names: list[list[str]] = [[] for _ in flats]
        held = self._flat_states(file, inner, 0, flats)
        for name, shape in ((name, shape) for each in rank.first.group_shapes() for name, shape in each.items()):
            length = -(-Box.whole(shape).numel // world)
            while group + 1 < len(flats) and length and at == flats[group].numel:
                group, at = group + 1, 0
                held = self._flat_states(file, inner, group, flats)
            if group >= len(flats) or at + length > flats[group].numel:
                raise FormatError(f"{file.path}: flat group {group} ends within {name}")
            for key, data in held.items():
                self.add_part_of_rank(rank, file, name, key, data.narrow(at, at + length), data_rank, world)
            names[group].append(name)
            at += length
        scalars = [
            {key: value for key, value in inner.get("state", {}).get(number, {}).items() if not is_flat(value)}
            for number in range(len(flats))
        ]
        return self.optimizer_record(inner.get("param_groups", []), scalars, names, states)

    def _flat_states(self, file: File, inner: Mapping[str, Any], group: int, flats: Sequence[Located]) -> dict[str, Located]:
        if group >= len(flats):
            return {}
        held = {"master": flats[group]}
        for key, value in inner.get("state", {}).get(group, {}).items():
            if is_flat(value):
                if value.numel != flats[group].numel:
                    raise FormatError(
                        f"{file.path}: {key} of group {group} has {value.numel:,} elements, its masters have "
                        f"{flats[group].numel:,} (DeepSpeed does not save states offloaded to NVMe)"
                    )
                held[key] = value.flat()
        return held

    def _whole(self, rank: ModelRank, file: File, expert_rank: int) -> OptimizerRecord | None:
        """Add the numbered optimizer states of a job without ZeRO. Experts have a file per expert parallel rank."""
        found = file.get("optimizer", dict)
        if found is None:
            return None
        if self.job.stages > 1:
            raise FormatError(
                f"{file.path}: a pipeline without ZeRO is not supported: its optimizer states have numbers instead of names"
            )
        inner = found.get("optimizer_state_dict", found)
        states, groups = inner.get("state"), inner.get("param_groups")
        if not isinstance(states, dict) or not isinstance(groups, (list, tuple)):
            raise FormatError(
                f"{file.path}: its optimizer has the keys {', '.join(map(str, inner))}, expected state and param_groups"
            )
        low = found.get("fp32_groups")
        if low is None and "fp32_groups_flat" in found:
            raise FormatError(
                f"{file.path}: FP16_Optimizer with fused groups is not supported: the file does not contain their order"
            )
        buffers = rank.first.buffers()
        module = {
            name: weight.data
            for name, weight in rank.weights.items()
            if name not in buffers and name not in self.tied and self._is_of(name, expert_rank, len(rank.optimizers))
        }
        wanted = [
            [_shape_of(file, states.get(number, {}), low[at][place] if low is not None else None)
             for place, number in enumerate(group["params"])] for at, group in enumerate(groups)
        ]  # fmt: skip
        names = self._named(file, module, wanted, low)
        scalars: list[Mapping[str, Any]] = []
        listed: list[list[str]] = []
        for at, group in enumerate(groups):
            for place, number in enumerate(group["params"]):
                name = names[at][place]
                held = {**states.get(number, {}), "master": low[at][place] if low is not None else module[name]}
                shape = module[name].shape
                tensors = {
                    k: v for k, v in held.items() if isinstance(v, Located) and v.shape == shape and (shape or k != "step")
                }
                if expert_rank == 0 or EXPERTS in name:
                    for key, data in tensors.items():
                        self.add_range(rank, file, name, key, 0, data.flat())
                scalars.append({key: value for key, value in held.items() if key not in tensors})
                listed.append([name])
        return self.optimizer_record(groups, scalars, names, {}, per_parameter=listed)

    def _is_of(self, name: str, expert_rank: int, expert_ranks: int) -> bool:
        """Return whether a parameter is on an expert parallel rank. Parameters outside experts are on all."""
        layer, is_expert, rest = name.partition(EXPERTS)
        if not is_expert:
            return True
        each = self.job.experts[layer] // max(expert_ranks, 1)
        return int(rest.split(".", 1)[0]) // max(each, 1) == expert_rank

    def _named(
        self, file: File, module: Mapping[str, Located], wanted: Sequence[Sequence[tuple[int, ...] | None]], masters: Any
    ) -> list[list[str]]:
        """Return the names of the numbered parameters of the optimizer. Raises FormatError if they are ambiguous."""
        agrees = None
        if masters is not None:

            def agrees(name: str, group: int, place: int) -> bool:
                weight, master = module[name].read(), masters[group][place].read()
                return bool(torch.equal(weight, master.to(weight.dtype)))

        try:
            return match_names({name: found.shape for name, found in module.items()}, wanted, agrees)
        except NoOrderError as err:
            raise FormatError(
                f"{file.path}: without ZeRO, DeepSpeed's optimizer states have numbers instead of names, and {err}"
            ) from None


def _shape_of(file: File, state: Mapping[str, Any], master: Located | None) -> tuple[int, ...] | None:
    """Return the shape of a parameter from its master, or from its states. None if it has neither: it never had a gradient."""
    if master is not None:
        return master.shape
    if not state:
        return None
    shapes = {value.shape for key, value in state.items() if isinstance(value, Located) and key != "step"}
    if len(shapes) != 1:
        raise FormatError(f"{file.path}: the shape of a parameter does not follow from its states {sorted(map(str, state))}")
    return shapes.pop()
