"""DeepSpeed's own checkpoints: ``mp_rank_*_model_states.pt`` and ``*zero_pp_rank_*_optim_states.pt``.

What is in them: deepspeed/runtime/engine.py (``_save_checkpoint``), zero/stage_1_and_2.py, zero/stage3.py, bf16_optimizer.py
and fp16/unfused_optimizer.py (``state_dict``). Masters and states of ZeRO 1 and 2 are flat tensors per group, in which
``param_slice_mappings`` says what lies where; of ZeRO 3 every rank holds the n-th part of each parameter, one after the other
in the order of ``param_shapes``; without ZeRO they are whole, by number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unickpt.converting import Part, Portion, Source
from unickpt.errors import FormatError
from unickpt.foreign.deepspeed_states import States, StatesFile, is_flat, number_in, read_files
from unickpt.foreign.located import Files, Located
from unickpt.foreign.matching import NoOrderError, matched
from unickpt.fragments import Box
from unickpt.manifest import OptimizerRecord

OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt")


def deepspeed(folder: Path, files: Files, *, also: Sequence[str] = ()) -> Source:
    """A checkpoint that DeepSpeed has written, of ZeRO 0 to 3, fp32, bf16 or fp16.

    Args:
        folder: of the tag (``global_step1000``).
        files: through which it is read.
        also: as of ``pickles.load``.

    Raises:
        NotACheckpointError: it is not such a folder.
        FormatError: it is damaged, a file is missing, or it holds what is not known.
    """
    return _Reader(folder, files, also).source()


class _Reader(States):
    def __init__(self, folder: Path, files: Files, also: Sequence[str]) -> None:
        super().__init__(folder, files, also)
        self._optimizers = read_files(folder, OPTIMIZER_FILE, files, also)

    # ---------------------------------------------------------------- the whole

    def source(self) -> Source:
        if len({model for model, _ in self.files}) > 1:
            raise FormatError(f"{self.folder}: of tensor or pipeline parallel ranks")
        stage = self._stage()
        aliases = self.aliases()
        optimizer = self._zero() if self._optimizers else self._whole()
        self.weights(aliases, whole=stage < 3)
        scaler = next((self._states(file).get("loss_scaler") for file in self._optimizers.values()), None)
        portions = [Portion(path.name, parts, self._inputs(path, parts)) for path, parts in sorted(self.parts.items()) if parts]
        return Source(
            f"DeepSpeed ZeRO-{stage}", portions, self.writer(stage), step=self.number("global_steps"), tensors=self.listed,
            optimizer=optimizer, aliases=aliases, objects=self.objects(scaler), left_out=self.left_out,
        )  # fmt: skip

    def _inputs(self, path: Path, parts: Sequence[Part]) -> list[Path]:
        """Of a portion: weights are compared with their masters, in whatever file those are."""
        masters = [file.path for file in self._optimizers.values()] if any(part.unless is not None for part in parts) else []
        return sorted({path, *masters})

    def _stage(self) -> int:
        if not self._optimizers:
            return 0
        stages = {int(number_in(self._states(file).get("zero_stage", 1))) for file in self._optimizers.values()}
        if len(stages) != 1:
            raise FormatError(f"{self.folder}: files of several stages of ZeRO ({sorted(stages)})")
        return stages.pop()

    def _states(self, file: StatesFile) -> Mapping[str, Any]:
        found: Mapping[str, Any] = file.get("optimizer_state_dict", dict, {})
        return found

    # ---------------------------------------------------------------- masters and states

    def _zero(self) -> OptimizerRecord:
        ranks = sorted(self._optimizers.items())
        missing = set(range(ranks[-1][0][1] + 1)) - {data for (_, data), _ in ranks}
        told = self.number("dp_world_size")
        if missing or (told and told != len(ranks)):
            raise FormatError(
                f"{self.folder}: {len(ranks)} files of optimizer states are there of {told or len(ranks) + len(missing)}"
            )
        described: OptimizerRecord | None = None
        done: dict[str, int] = {}
        for rank, (_, file) in enumerate(ranks):
            states = self._states(file)
            if "fp32_flat_groups" in states:
                found = self._partitioned_parameters(file, states, rank, len(ranks))
            elif "single_partition_of_fp32_groups" in states:
                found = self._partitioned_groups(file, states, done)
            else:
                raise FormatError(f"{file.path}: holds masters in a form that is not known ({', '.join(sorted(states))})")
            described = described or found
        if done:
            short = [name for name, count in done.items() if count != Box.whole(self.model.shapes[name]).numel]
            if short:
                raise FormatError(f"{self.folder}: the files hold {done[short[0]]:,} elements of {short[0]}, whose shape is "
                                  f"{self.model.shapes[short[0]]}")  # fmt: skip
        assert described is not None  # there are files
        return described

    def _partitioned_groups(self, file: StatesFile, states: Mapping[str, Any], done: dict[str, int]) -> OptimizerRecord:
        """ZeRO 1 and 2, and BF16_Optimizer: a rank's range of every group, as it was laid flat."""
        inner = states.get("base_optimizer_state")
        if not isinstance(inner, dict):
            raise FormatError(f"{file.path}: written with elastic_checkpoint, whose states do not tell what they are of")
        shapes = self.group_shapes()
        module = self.first.get("module", dict, {})
        names: list[list[str]] = [list(group) for group in shapes]
        flats = states["single_partition_of_fp32_groups"]
        mappings = states.get("param_slice_mappings") or []
        if len(mappings) != len(flats):
            raise FormatError(f"{file.path}: {len(flats)} groups, but param_slice_mappings of {len(mappings)}")
        scalars: list[Mapping[str, Any]] = []
        for at, (flat, mapping) in enumerate(zip(flats, mappings, strict=True)):
            held = {"master": flat, **inner.get("state", {}).get(at, {})}
            tensors = {key: each.flat() for key, each in held.items() if is_flat(each)}
            scalars.append({key: each for key, each in held.items() if key not in tensors})
            if at >= len(names):
                names.append([])
            for name, address in mapping.items():
                if name not in self.model.shapes:
                    shape = shapes[at].get(name) if at < len(shapes) else None
                    self.model.shapes[name] = shape or self.tensor(self.first, module.get(name), name).shape
                if name not in names[at]:
                    names[at].append(name)
                start, count = int(address.state["start"]), int(address.state["numel"])
                lo = done.get(name, 0)
                done[name] = lo + count
                for key, data in tensors.items():
                    self.add_range(file, self.model.info(name, key, data.dtype), lo, data.narrow(start, start + count))
        for group in shapes:  # parameters of which no rank holds anything have no elements
            for name, shape in group.items():
                self.model.shapes.setdefault(name, shape)
        return self.described(inner.get("param_groups", []), scalars, names, states)

    def _partitioned_parameters(self, file: StatesFile, states: Mapping[str, Any], rank: int, world: int) -> OptimizerRecord:
        """ZeRO 3: the n-th part of every parameter, in groups one after the other."""
        inner = states.get("optimizer_state_dict")
        flats = [self.tensor(file, flat, "a flat group").flat() for flat in states["fp32_flat_groups"]]
        if not isinstance(inner, dict):
            raise FormatError(f"{file.path}: the states of its optimizer are not there")
        order = [(name, shape) for group in self.group_shapes() for name, shape in group.items()]
        self.model.shapes |= dict(order)
        group, at = 0, 0
        names: list[list[str]] = [[] for _ in flats]
        held = self._flat_states(file, inner, 0, flats)
        for name, shape in order:
            length = -(-Box.whole(shape).numel // world)
            while group < len(flats) and at + length > flats[group].numel and at == flats[group].numel:
                group, at = group + 1, 0
                held = self._flat_states(file, inner, group, flats)
            if group >= len(flats) or at + length > flats[group].numel:
                raise FormatError(f"{file.path}: ends within {name}: {len(flats)} flat groups, of which the last has "
                                  f"{flats[-1].numel if flats else 0:,} elements")  # fmt: skip
            for key, data in held.items():
                info = self.model.info(name, key, data.dtype)
                self.add_flat(file, info, data.narrow(at, at + length), rank, world)
            names[group].append(name)
            at += length
        scalars = [
            {key: value for key, value in inner.get("state", {}).get(at, {}).items() if not is_flat(value)}
            for at in range(len(flats))
        ]
        return self.described(inner.get("param_groups", []), scalars, names, states)

    def _flat_states(
        self, file: StatesFile, inner: Mapping[str, Any], group: int, flats: Sequence[Located]
    ) -> dict[str, Located]:
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

    def _whole(self) -> OptimizerRecord | None:
        """Without ZeRO: the states of the optimizer by number, in one file."""
        found = self.first.get("optimizer", dict)
        if found is None:
            return None
        inner = found.get("optimizer_state_dict", found)
        states, groups = inner.get("state"), inner.get("param_groups")
        if not isinstance(states, dict) or not isinstance(groups, (list, tuple)):
            raise FormatError(f"{self.first.path}: its optimizer holds {', '.join(map(str, inner))}, not states and groups")
        low = found.get("fp32_groups")
        if low is None and "fp32_groups_flat" in found:
            raise FormatError(f"{self.first.path}: of FP16_Optimizer with fused groups, whose order nothing in the file tells")
        buffers, aliases = set(self.first.get("buffer_names", (list, tuple), ())), self.aliases()
        module = {
            name: value for name, value in self.first.get("module", dict, {}).items()
            if isinstance(value, Located) and name not in buffers and name not in aliases
        }  # fmt: skip
        wanted = []
        for at, group in enumerate(groups):
            masters = low[at] if low is not None else [None] * len(group["params"])
            wanted.append([self._shape_of(states.get(number, {}), master) for number, master in
                           zip(group["params"], masters, strict=True)])  # fmt: skip
        names = self._named(module, wanted, low)
        scalars: list[Mapping[str, Any]] = []
        listed: list[list[str]] = []
        for at, group in enumerate(groups):
            for place, number in enumerate(group["params"]):
                name = names[at][place]
                self.model.shapes[name] = module[name].shape
                held = dict(states.get(number, {}))
                held["master"] = low[at][place] if low is not None else module[name]
                tensors = {k: v for k, v in held.items() if isinstance(v, Located) and v.shape == module[name].shape and
                           (v.shape or k != "step")}  # fmt: skip
                for key, data in tensors.items():
                    info = self.model.info(name, key, data.dtype)
                    self.add_range(self.first, info, 0, data.flat())
                scalars.append({key: value for key, value in held.items() if key not in tensors})
                listed.append([name])
        return self.described(groups, scalars, names, {}, per_parameter=listed)

    def _shape_of(self, state: Mapping[str, Any], master: Located | None) -> tuple[int, ...]:
        if master is not None:
            return master.shape
        shapes = {value.shape for key, value in state.items() if isinstance(value, Located) and key != "step"}
        if len(shapes) != 1:
            raise FormatError(f"{self.first.path}: an optimizer whose states {sorted(state)} do not tell whose they are")
        return shapes.pop()

    def _named(
        self, module: Mapping[str, Located], wanted: Sequence[Sequence[tuple[int, ...]]], masters: Any
    ) -> list[list[str]]:
        """The names of the optimizer's parameters, which it knows by number."""
        agrees = None
        if masters is not None:

            def agrees(name: str, group: int, place: int) -> bool:
                weight, master = module[name], masters[group][place]
                return bool(torch.equal(weight.read(), master.read().to(weight.read().dtype)))

        try:
            return matched({name: found.shape for name, found in module.items()}, wanted, agrees)
        except NoOrderError as err:
            raise FormatError(
                f"{self.first.path}: without ZeRO, DeepSpeed's optimizer states have numbers for names, and {err}"
            ) from None
