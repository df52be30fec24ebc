"""Reader of Megatron's ``torch`` checkpoints: one ``torch.save`` file per rank, with parameters under the names of the rank.

Their content is defined by ``save_checkpoint`` and ``generate_state_dict`` in megatron/training/checkpointing.py. The source
has the same tensors, objects and hyperparameters as a checkpoint that the Megatron adapter writes
(megatron_unickpt/dist_checkpointing/capture.py): global names, complete tensors, and optimizer states by parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup, merge_optimizers
from unickpt.transform.convert.limits import bounded
from unickpt.transform.convert.megatron.common_state import (
    GROUPS_UNKNOWN,
    OptimizerState,
    group_of,
    hyperparameters,
    name_of_optimizer,
    objects_of,
    optimizers_in,
    step_of,
    writer_of,
)
from unickpt.transform.convert.megatron.keys import MASTER, WEIGHT, is_expert
from unickpt.transform.convert.megatron.optimizer_states import (
    ParameterStates,
    RankParameter,
    flat_states,
    is_distributed,
    numbered_states,
)
from unickpt.transform.convert.megatron.shard_rules import (
    EXTRA_STATE,
    ModelChunk,
    ShardPlace,
    UnknownNameError,
    object_key,
    shard_boxes,
)
from unickpt.transform.convert.megatron.torch_files import MegatronFolder, MegatronRank, is_chunk, read_job
from unickpt.transform.convert.megatron.torch_layout import TorchLayout, chunk_weights
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles, Located
from unickpt.transform.convert.pickles.plain_values import NotPlainError, plain
from unickpt.transform.convert.pickles.safe_pickle import load
from unickpt.transform.convert.pipeline import Portion, Source, SourcePart
from unickpt.transform.convert.readings import BoxOf, Reading

_OUTPUT_STATE = f"output_layer.{EXTRA_STATE}"  # gpt_model.py removes it
_NOT_COMMON = ("args", "optimizer", "rng_state", "rerun_state_machine")


@bounded
def megatron_torch(folder: Path, files: OpenFiles, *, also: Sequence[str] = ()) -> Source:
    """Open the iteration folder (``iter_0001000``) of a checkpoint of ``--ckpt-format torch``.

    Arguments and errors: see ``bounded``. It is also a FormatError if the parameter of an optimizer state is unknown.
    """
    return _TorchFormatReader(read_job(folder, files, also), files, also).source()


class _TorchFormatReader:
    """Builder of the source from the files of an iteration."""

    def __init__(self, job: MegatronFolder, files: OpenFiles, also: Sequence[str]) -> None:
        self.job, self._files, self._also = job, files, also
        self.left_out = job.left_out
        self._layout = TorchLayout(job)
        self._tensors: dict[tuple[str, str], TensorInfo] = {}
        self._parts: dict[Path, list[SourcePart]] = defaultdict(list)
        self._inputs: dict[Path, set[Path]] = defaultdict(set)
        self._records: list[OptimizerRecord] = []
        self._optimizer_states: list[OptimizerState] = []
        self._shared: dict[str, Any] = {}

    def source(self) -> Source:
        first = self._layout.first_layers()
        for rank in self.job.ranks:
            self._rank(rank, first)
        trained = any(state == MASTER for _, state in self._tensors)
        common = {key: value for key, value in self.job.first.content.items() if key not in _NOT_COMMON and not is_chunk(key)}
        portions = [
            Portion(f"{path.parent.name}.{path.stem}", parts, sorted({path, *self._inputs[path]}))
            for path, parts in sorted(self._parts.items())
        ]
        return Source(
            "Megatron torch",
            portions,
            writer_of(self.job.arguments),
            step=step_of(self.job.first.content),
            tensors=list(self._tensors.values()),
            optimizer=merge_optimizers(None, self._records),
            objects=objects_of(common, self.job.arguments, self._optimizer_states, trained, self.left_out.append),
            shared_objects={**self._shared, **self._generators()},
            left_out=self.left_out,
        )

    def _rank(self, rank: MegatronRank, first: Mapping[tuple[int, int], Mapping[str, int]]) -> None:
        weights = [chunk_weights(rank, number) for number in range(len(rank.chunks))]
        chunks = [self._layout.chunk(rank, found, first[number, rank.pipeline]) for number, found in enumerate(weights)]
        for number, chunk in enumerate(chunks):
            self._extra_states(rank, number, chunk)
        parameters = self._layout.parameters(rank, weights)
        places = {}
        for number, (found, chunk) in enumerate(zip(weights, chunks, strict=True)):
            for name, weight in found.items():
                place = self._layout.place(rank, number, name, weight, chunk)
                if place is not None:
                    places[f"{number}/{name}"] = place
        states = self._optimizers(rank, parameters, places)
        for number, found in enumerate(weights):
            for name, weight in found.items():
                place = places.get(f"{number}/{name}")
                if place is not None:
                    self._add(rank, place, is_expert(name), weight, states.get(f"{number}/{name}"))

    # ---------------------------------------------------------------- optimizers

    def _optimizers(
        self, rank: MegatronRank, parameters: Sequence[RankParameter], places: Mapping[str, ShardPlace]
    ) -> Mapping[str, Mapping[str, Located]]:
        """Return the optimizer states of every parameter by its key, and add the records of the optimizers."""
        found = list(optimizers_in(rank.content.get("optimizer")))
        of_experts = [any(group.get("is_expert_parallel") for group in each.groups) for each in found]
        if len(found) > 2 or (len(found) == 2 and of_experts != [False, True]):
            raise FormatError(f"{rank.path}: has {len(found)} optimizers; supported are one, and a second one for experts")
        if found and self._layout.argument("optimizer_cpu_offload"):
            raise FormatError(f"{rank.path}: an optimizer that is partly on the CPU (--optimizer-cpu-offload) is not supported")
        self._optimizer_states += found
        states: dict[str, Mapping[str, Located]] = {}
        buffers: list[Any] | None = None
        for number, optimizer in enumerate(found):
            if not of_experts[number] and not rank.dense:
                continue
            own = list(parameters)
            if True in of_experts:
                own = [each for each in parameters if is_expert(each.name) == of_experts[number]]
            if is_distributed(optimizer):
                buffers = self._buffers(rank, len(found)) if buffers is None else buffers
                held = flat_states(optimizer, buffers[number], own, rank.buffers)
            else:
                held = numbered_states(optimizer, own, rank.path)
            self._records.append(self._record(optimizer, held, places))
            states |= {each.parameter.key: each.states for each in held}
        return states

    def _buffers(self, rank: MegatronRank, count: int) -> list[Any]:
        """Return the buffers of each optimizer of a rank in its file of distributed optimizers."""
        if not rank.buffers.is_file():
            raise FormatError(f"{rank.buffers}: is missing; it has the states of the distributed optimizer")
        found = load(rank.buffers, self._files, also=self._also)
        listed = found if isinstance(found, list) else [found]
        if len(listed) != count:
            raise FormatError(f"{rank.buffers}: has the states of {len(listed)} optimizers, {rank.path.name} has {count}")
        return listed

    def _record(
        self, optimizer: OptimizerState, held: Sequence[ParameterStates], places: Mapping[str, ShardPlace]
    ) -> OptimizerRecord:
        groups: list[list[str]] = [[] for _ in optimizer.groups]
        steps: dict[float, list[str]] = {}
        for each in held:
            place = places.get(each.parameter.key)
            if place is None:
                continue
            if each.group >= 0:
                groups[each.group].append(place.name)
            if each.step is not None:
                steps.setdefault(each.step, []).append(place.name)
        if any(each.group < 0 for each in held) and GROUPS_UNKNOWN not in self.left_out:
            self.left_out.append(GROUPS_UNKNOWN)
        values = [hyperparameters(group) for group in optimizer.groups]
        states = {state for each in held for state in each.states}
        return OptimizerRecord(
            name_of_optimizer(states, values),
            tuple(group_of(value, names) for value, names in zip(values, groups, strict=True)),
            tuple(ParameterGroup({"step": step}, tuple(dict.fromkeys(names))) for step, names in steps.items()),
        )

    # ---------------------------------------------------------------- parts

    def _add(
        self, rank: MegatronRank, place: ShardPlace, expert: bool, weight: Located, states: Mapping[str, Located] | None
    ) -> None:
        sizes = self.job.sizes
        at, ranks = (rank.expert_tensor, sizes.expert_tensor) if expert else (rank.tensor, sizes.tensor)
        shape, pairs = shard_boxes(place, weight.shape, at, ranks)
        if states is None:  # frozen, or a buffer
            self._pieces(self._info(place, WEIGHT, weight, shape), weight, pairs, None)
            return
        master = states.get(MASTER, weight)
        for state, data in {MASTER: master, **states}.items():
            self._pieces(self._info(place, state, data, shape), data, pairs, None)
        info = self._info(place, WEIGHT, weight, shape)
        if master is not weight:
            self._pieces(info, weight, pairs, master)

    def _info(self, place: ShardPlace, state: str, data: Located, shape: tuple[int, ...]) -> TensorInfo:
        kind = "parameter" if state in (WEIGHT, MASTER) else "optimizer"
        derived = MASTER if state == WEIGHT and (place.name, MASTER) in self._tensors else None
        info = TensorInfo(place.name, state, data.dtype, shape, kind, derived)
        known = self._tensors.setdefault(info.key, info)
        if known != info:
            raise FormatError(
                f"{data.path}: {state} of {place.name} is {info.dtype} {list(info.shape)}, in the file of another rank it is "
                f"{known.dtype} {list(known.shape)}"
            )
        return info

    def _pieces(self, info: TensorInfo, data: Located, pairs: Sequence[tuple[Box, Box]], origin: Located | None) -> None:
        for local, whole in pairs:
            unless = None if origin is None else _shard_reader(origin, local, whole)
            if origin is not None:
                self._inputs[data.path].add(origin.path)
            self._parts[data.path].append(SourcePart(info, whole, _shard_reader(data, local, whole), unless))

    # ---------------------------------------------------------------- non-tensor state

    def _extra_states(self, rank: MegatronRank, number: int, chunk: ModelChunk) -> None:
        """Add the extra states of modules, including empty ones. The adapter keeps them as objects by position."""
        for name, value in rank.chunks[number].items():
            if not str(name).endswith(EXTRA_STATE) or name == _OUTPUT_STATE or (not rank.dense and not is_expert(str(name))):
                continue
            try:
                key = object_key(str(name), self._layout.model, chunk)
                self._shared.setdefault(key, plain(value, str(name)))
            except (UnknownNameError, NotPlainError) as err:
                if str(err) not in self.left_out:
                    self.left_out.append(str(err))

    def _generators(self) -> dict[str, Any]:
        """Return the states of random generators by position, under the names of Megatron's other formats.

        See ``get_rng_state`` in megatron/training/checkpointing.py.
        """
        sizes, found = self.job.sizes, {}
        ranks = [rank for rank in self.job.ranks if "rng_state" in rank.content]
        if sizes.expert > 1 and sizes.data != sizes.expert:
            if ranks:
                self.left_out.append(
                    "states of random generators: with experts, the files lack those of some data parallel ranks"
                )
            return {}
        for rank in ranks:
            place = (rank.pipeline, rank.tensor) + ((rank.expert,) if sizes.expert > 1 else ())
            shape = (sizes.pipeline, sizes.tensor) + ((sizes.data,) if sizes.expert > 1 else ())
            try:
                state = plain(rank.content["rng_state"], "rng_state")
            except NotPlainError as err:
                self.left_out.append(str(err))
                continue
            found[f"rng_state/shard_{'.'.join(map(str, place))}_{'.'.join(map(str, shape))}"] = state
        return found


def _shard_reader(data: Located, local: Box, whole: Box) -> Reading:
    """Return the function that reads boxes of the global tensor within ``whole``, which is the box ``local`` of ``data``."""
    part = data.at(local)
    lead = whole.ndim - local.ndim
    shaped = replace(part, shape=(*(1,) * lead, *part.shape), strides=(*(1,) * lead, *part.strides))
    return BoxOf(whole, shaped)
