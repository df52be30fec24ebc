"""DeepSpeed's own checkpoints: of ZeRO 0 to 3, pipelines, experts and tensor parallel ranks.

What is in them: deepspeed/runtime/engine.py (``_save_checkpoint``), zero/stage_1_and_2.py, zero/stage3.py, bf16_optimizer.py
and fp16/unfused_optimizer.py (``state_dict``). Masters and states of ZeRO 1 and 2 are flat tensors per group, in which
``param_slice_mappings`` says what lies where; of ZeRO 3 every rank holds the n-th part of each parameter, one after the other
in the order of ``param_shapes``; without ZeRO they are whole, by number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unickpt.converting import Part, Portion, Source
from unickpt.errors import FormatError
from unickpt.foreign.deepspeed_files import EXPERTS, File, ModelRank, first_missing, read_folder, states_of
from unickpt.foreign.deepspeed_parts import Parts, Tensor
from unickpt.foreign.deepspeed_states import is_flat, number_in, reader, tensor_in
from unickpt.foreign.limits import bounded
from unickpt.foreign.located import Files, Located
from unickpt.foreign.matching import NoOrderError, matched
from unickpt.fragments import Box
from unickpt.index import TensorInfo
from unickpt.manifest import OptimizerRecord, Writer, merge_optimizers


@bounded
def deepspeed(folder: Path, files: Files, *, also: Sequence[str] = ()) -> Source:
    """A checkpoint that DeepSpeed has written.

    Args:
        folder: of the tag (``global_step1000``).
        files: through which it is read.
        also: as of ``pickles.load``.

    Raises:
        NotACheckpointError: it is not such a folder.
        FormatError: it is damaged, a file is missing, or it holds what is not known.
    """
    return _Reader(read_folder(folder, files, also)).source()


class _Reader(Parts):
    """The files of a folder, from what the optimizer holds to what the source is."""

    # ---------------------------------------------------------------- the whole

    def source(self) -> Source:
        stage = self._stage()
        self.tied = self._further_names()
        self.divide(stage)
        described = [self._optimizer(rank) for rank in self.ranks]
        for rank in self.ranks:
            self._weights(rank, stage)
        self.add_means()
        portions = [Portion(path.name, parts, self._inputs(path, parts)) for path, parts in sorted(self.parts.items()) if parts]
        found = [record for record in described if record is not None]
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

    def _inputs(self, path: Path, parts: Sequence[Part]) -> list[Path]:
        """Of a portion: weights are compared with their masters, in whatever file those are."""
        compared = any(part.unless is not None for part in parts)
        masters = [file.path for rank in self.ranks for file in rank.optimizers.values()] if compared else []
        return sorted({path, *masters})

    def _stage(self) -> int:
        files = [file for rank in self.ranks for file in rank.optimizers.values()]
        stages = {int(number_in(states_of(file).get("zero_stage", -1))) for file in files}
        if len(stages) > 1:
            raise FormatError(f"{self.folder}: files of several stages of ZeRO ({sorted(stages)})")
        told = self.first.get("ds_config", dict, {}).get("zero_optimization")
        if not stages or stages == {-1}:  # without ZeRO, or of BF16_Optimizer, whose files do not tell
            return int(told.get("stage", 0)) if isinstance(told, dict) and stages else 0
        return stages.pop()

    def _topology(self, stage: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "world_size": self.number("dp_world_size") * self.job.stages * self.job.tensors,
            "zero_stage": stage,
            "weight_dtypes": sorted({tensor.dtype for tensor in self.tensors.values() if tensor.dtype}),
        }
        return found | {key: n for key, n in (("pipeline", self.job.stages), ("tensor", self.job.tensors)) if n > 1}

    def _further_names(self) -> dict[str, str]:
        """Further names of tied parameters."""
        told = self.first.get("shared_params", dict, {})
        aliases = {str(alias): str(name) for alias, name in told.items()}
        seen: dict[tuple[Any, ...], str] = {}
        for name, weight in self.ranks[0].weights.items():  # without ZeRO, nothing tells but where they lie
            found = weight.data
            if found.numel and name not in aliases:
                place = (found.path, found.begin_byte, found.shape, found.strides, found.dtype)
                if place in seen:
                    aliases[name] = seen[place]
                seen.setdefault(place, name)
        return aliases

    # ---------------------------------------------------------------- weights and buffers

    def _weights(self, rank: ModelRank, stage: int) -> None:
        buffers = set(rank.first.get("buffer_names", (list, tuple), ()))
        if rank.number == 0:
            self.left_out += [f"{name}: extra state of a module, which is for its own code" for name in rank.other]
        for name, weight in rank.weights.items():
            if name in self.tied or self.owner.get(name, rank.stage) != rank.stage:
                continue
            data = weight.data
            if name in buffers:
                if rank.tensor == 0:
                    info = TensorInfo(name, "weight", data.dtype, data.shape, "buffer")
                    self.add(weight.path, Part(info, Box.whole(data.shape), reader(Box.whole(data.shape), data)))
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

    def _derived(self, name: str, tensor: Tensor) -> None:
        """A weight that its master tells; what differs of it is a part."""
        shape = tensor.division.shape
        self.listed.append(TensorInfo(name, "weight", tensor.dtype, shape, "parameter", derived_from="master"))

    def _frozen(self, rank: ModelRank) -> None:
        """Of ZeRO 3: every rank's part of the parameters that are not trained."""
        for data_rank, file in sorted(rank.models.items()):
            for name, found in file.get("frozen_param_fragments", dict, {}).items():
                part = tensor_in(file, found, name).flat()
                self.known(name, file).dtype = part.dtype
                self.add_part_of_rank(rank, file, name, "weight", part, data_rank, len(rank.models))

    # ---------------------------------------------------------------- masters and states

    def _optimizer(self, rank: ModelRank) -> OptimizerRecord | None:
        if not rank.optimizers:
            return self._whole(rank, rank.first, 0)
        if any("optimizer_state_dict" not in file.content for file in rank.optimizers.values()):
            found = [self._whole(rank, file, expert) for expert, file in sorted(rank.optimizers.items())]
            return merge_optimizers(None, [record for record in found if record is not None])
        told = self.number("dp_world_size")
        if first_missing(rank.optimizers) is not None or (told and told != len(rank.optimizers)):
            raise FormatError(
                f"{self.folder}: of model parallel rank {rank.number}, {len(rank.optimizers)} files of optimizer states "
                f"where {told or max(rank.optimizers) + 1} are to be"
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
                raise FormatError(f"{file.path}: holds masters in a form that is not known ({', '.join(sorted(states))})")
            records.append(found_one)
        for name, count in done.items():
            shape = self.shape_in(rank, name)
            if count != Box.whole(shape).numel:
                raise FormatError(f"{self.folder}: the files hold {count:,} elements of {name}, whose shape is {shape}")
        return merge_optimizers(None, records)

    def _expert_name(self, name: str, expert_rank: int, expert_ranks: int) -> str:
        """Of an expert that a rank knows by its number among its own: by its number among all."""
        layer, is_expert, rest = name.partition(EXPERTS)
        if not is_expert:
            return name
        local, _, inner = rest.partition(".")
        total = self.job.experts.get(layer, 0)
        if not total or total % expert_ranks:
            raise FormatError(f"{self.folder}: {total} experts of {layer} are there, for {expert_ranks} expert parallel ranks")
        return f"{layer}{EXPERTS}{expert_rank * (total // expert_ranks) + int(local)}.{inner}"

    def _partitioned_groups(
        self, rank: ModelRank, file: File, states: Mapping[str, Any], data_rank: int, done: dict[str, int]
    ) -> OptimizerRecord:
        """ZeRO 1 and 2, and BF16_Optimizer: a rank's range of every group, as it was laid flat."""
        inner = states.get("base_optimizer_state")
        if not isinstance(inner, dict):
            raise FormatError(f"{file.path}: written with elastic_checkpoint, whose states do not tell what they are of")
        flats, mappings = states["single_partition_of_fp32_groups"], states.get("param_slice_mappings") or []
        groups = inner.get("param_groups", [])
        if not len(mappings) == len(flats) == len(groups):
            raise FormatError(
                f"{file.path}: {len(flats)} flat groups, {len(groups)} groups, and {len(mappings)} mappings of names"
            )
        counts = states.get("partition_count")
        scalars: list[Mapping[str, Any]] = []
        names: list[list[str]] = []
        shapes = rank.group_shapes()
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
        return self.described(groups, scalars, names, states)

    def _partitioned_parameters(
        self, rank: ModelRank, file: File, states: Mapping[str, Any], data_rank: int
    ) -> OptimizerRecord:
        """ZeRO 3: the n-th part of every parameter, in groups one after the other."""
        inner = states.get("optimizer_state_dict")
        flats = [tensor_in(file, flat, "a flat group").flat() for flat in states["fp32_flat_groups"]]
        if not isinstance(inner, dict):
            raise FormatError(f"{file.path}: the states of its optimizer are not there")
        if states.get("ds_zero_partition_groups"):
            raise FormatError(
                f"{file.path}: partitioned over groups of their own (ds_zero_partition_groups), which is not read"
            )
        world = len(rank.optimizers)
        group = at = 0
        names: list[list[str]] = [[] for _ in flats]
        held = self._flat_states(file, inner, 0, flats)
        for name, shape in ((name, shape) for each in rank.group_shapes() for name, shape in each.items()):
            length = -(-Box.whole(shape).numel // world)
            while group + 1 < len(flats) and length and at == flats[group].numel:
                group, at = group + 1, 0
                held = self._flat_states(file, inner, group, flats)
            if group >= len(flats) or at + length > flats[group].numel:
                raise FormatError(f"{file.path}: its flat group {group} ends within {name}")
            for key, data in held.items():
                self.add_part_of_rank(rank, file, name, key, data.narrow(at, at + length), data_rank, world)
            names[group].append(name)
            at += length
        scalars = [
            {key: value for key, value in inner.get("state", {}).get(number, {}).items() if not is_flat(value)}
            for number in range(len(flats))
        ]
        return self.described(inner.get("param_groups", []), scalars, names, states)

    def _flat_states(self, file: File, inner: Mapping[str, Any], group: int, flats: Sequence[Located]) -> dict[str, Located]:
        if group >= len(flats):
            return {}
        held = {"master": flats[group]}
        for key, value in inner.get("state", {}).get(group, {}).items():
            if is_flat(value):
                if value.numel != flats[group].numel:
                    raise FormatError(f"{file.path}: {key} of group {group} has {value.numel:,} elements, its masters "
                                      f"{flats[group].numel:,} (those on a disk of their own are not saved)")  # fmt: skip
                held[key] = value.flat()
        return held

    def _whole(self, rank: ModelRank, file: File, expert_rank: int) -> OptimizerRecord | None:
        """Without ZeRO: the states of the optimizer by number, of experts in a file per expert parallel rank."""
        found = file.get("optimizer", dict)
        if found is None:
            return None
        if self.job.stages > 1:
            raise FormatError(f"{file.path}: of a pipeline without ZeRO, whose optimizer knows its parameters by number alone")
        inner = found.get("optimizer_state_dict", found)
        states, groups = inner.get("state"), inner.get("param_groups")
        if not isinstance(states, dict) or not isinstance(groups, (list, tuple)):
            raise FormatError(f"{file.path}: its optimizer holds {', '.join(map(str, inner))}, not states and groups")
        low = found.get("fp32_groups")
        if low is None and "fp32_groups_flat" in found:
            raise FormatError(f"{file.path}: of FP16_Optimizer with fused groups, whose order nothing in the file tells")
        buffers = set(rank.first.get("buffer_names", (list, tuple), ()))
        module = {
            name: weight.data for name, weight in rank.weights.items()
            if name not in buffers and name not in self.tied and self._is_of(name, expert_rank, len(rank.optimizers))
        }  # fmt: skip
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
        return self.described(groups, scalars, names, {}, per_parameter=listed)

    def _is_of(self, name: str, expert_rank: int, expert_ranks: int) -> bool:
        """Whether an expert is one of a rank's; all have what is no expert."""
        layer, is_expert, rest = name.partition(EXPERTS)
        if not is_expert:
            return True
        each = self.job.experts[layer] // max(expert_ranks, 1)
        return int(rest.split(".", 1)[0]) // max(each, 1) == expert_rank

    def _named(
        self, file: File, module: Mapping[str, Located], wanted: Sequence[Sequence[tuple[int, ...]]], masters: Any
    ) -> list[list[str]]:
        """The names of the optimizer's parameters, which it knows by number."""
        agrees = None
        if masters is not None:

            def agrees(name: str, group: int, place: int) -> bool:
                weight, master = module[name].read(), masters[group][place].read()
                return bool(torch.equal(weight, master.to(weight.dtype)))

        try:
            return matched({name: found.shape for name, found in module.items()}, wanted, agrees)
        except NoOrderError as err:
            raise FormatError(
                f"{file.path}: without ZeRO, DeepSpeed's optimizer states have numbers for names, and {err}"
            ) from None


def _shape_of(file: File, state: Mapping[str, Any], master: Located | None) -> tuple[int, ...]:
    """Of a parameter of which there are states, and perhaps a master."""
    if master is not None:
        return master.shape
    shapes = {value.shape for key, value in state.items() if isinstance(value, Located) and key != "step"}
    if len(shapes) != 1:
        raise FormatError(f"{file.path}: an optimizer whose states {sorted(map(str, state))} do not tell whose they are")
    return shapes.pop()
