"""Megatron's ``torch`` checkpoints: one file of ``torch.save`` per rank, with the rank's own parameters under its own names.

What is in them: megatron/training/checkpointing.py (``save_checkpoint``, ``generate_state_dict``). They become what the
Megatron adapter would have written of the same job (megatron_unickpt/capture.py): names with global numbers, whole tensors,
states of the optimizer by parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unickpt.converting import Part, Portion, Reading, Source
from unickpt.errors import FormatError
from unickpt.foreign.limits import bounded
from unickpt.foreign.located import Files, Located
from unickpt.foreign.megatron_buffers import bucket_size
from unickpt.foreign.megatron_files import Job, Rank, read_job
from unickpt.foreign.megatron_numbers import Held, Parameter, flat, is_distributed, numbered
from unickpt.foreign.megatron_rules import (
    BUFFERS,
    EMBEDDING,
    EXTRA_STATE,
    OUTPUT,
    Chunk,
    Model,
    Placed,
    UnknownNameError,
    boxes,
    expert_of,
    first_layers,
    gated,
    is_expert,
    is_renamed,
    layer_of,
    object_key,
    placed,
)
from unickpt.foreign.megatron_state import (
    GROUPS_NOT_TOLD,
    Leaf,
    encoded,
    hyperparameters,
    leaves,
    name_of_optimizer,
    objects_of,
    step_of,
    writer_of,
)
from unickpt.foreign.pickles import load
from unickpt.foreign.plain import NotPlainError, plain
from unickpt.fragments import Box
from unickpt.index import TensorInfo
from unickpt.manifest import OptimizerRecord, ParameterGroup, merge_optimizers
from unickpt.megatron_keys import MASTER, WEIGHT

_OUTPUT_STATE = f"output_layer.{EXTRA_STATE}"  # gpt_model.py takes it out
_KINDS = ("decoder", "mtp")
# Arguments of models whose layers are not alike.
_UNLIKE = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "hetereogenous_dist_checkpoint")
_NOT_COMMON = ("args", "optimizer", "rng_state", "rerun_state_machine")


@bounded
def megatron_torch(folder: Path, files: Files, *, also: Sequence[str] = ()) -> Source:
    """A checkpoint of Megatron's, as ``--ckpt-format torch`` writes it.

    Args:
        folder: of the iteration (``iter_0001000``).
        files: through which it is read.
        also: as of ``pickles.load``.

    Raises:
        NotACheckpointError: it is not such a folder.
        FormatError: it is damaged, a file is missing, or it cannot be told which state is of which parameter.
    """
    return _Reader(read_job(folder, files, also), files, also).source()


class _Reader:
    def __init__(self, job: Job, files: Files, also: Sequence[str]) -> None:
        self.job, self._files, self._also = job, files, also
        self.left_out = job.left_out
        self._model = self._described_model()
        self._tied = self._is_tied()
        self._tensors: dict[tuple[str, str], TensorInfo] = {}
        self._owner: dict[tuple[Placed, int], tuple[int, int]] = {}  # chunk and stage that a parameter is taken of
        self._parts: dict[Path, list[Part]] = defaultdict(list)
        self._inputs: dict[Path, set[Path]] = defaultdict(set)
        self._records: list[OptimizerRecord] = []
        self._leaves: list[Leaf] = []
        self._shared: dict[str, Any] = {}

    # ---------------------------------------------------------------- the whole

    def source(self) -> Source:
        first = self._first_layers()
        for rank in self.job.ranks:
            self._rank(rank, first)
        trained = any(state == MASTER for _, state in self._tensors)
        common = {key: value for key, value in self.job.first.content.items() if key not in _NOT_COMMON and not _is_model(key)}
        portions = [
            Portion(f"{path.parent.name}.{path.stem}", parts, sorted({path, *self._inputs[path]}))
            for path, parts in sorted(self._parts.items())
        ]
        return Source(
            "Megatron torch", portions, writer_of(self.job.arguments), step=step_of(self.job.first.content),
            tensors=list(self._tensors.values()), optimizer=merge_optimizers(None, self._records),
            objects=objects_of(common, self.job.arguments, self._leaves, trained, self.left_out.append),
            shared_objects={**self._shared, **self._generators()}, left_out=self.left_out,
        )  # fmt: skip

    def _argument(self, name: str) -> Any:
        return getattr(self.job.arguments, name, None)

    def _described_model(self) -> Model:
        layers = self._argument("num_layers")
        if type(layers) is not int:
            raise FormatError(f"{self.job.first.path}: its arguments do not tell num_layers")
        # As transformer_block.py (``sharded_state_dict``) decides it.
        unlike = any(
            isinstance(found, list) or (isinstance(found, int) and found > 1)
            for found in (self._argument("moe_layer_freq"), self._argument("linear_attention_freq"))
        )
        unlike = unlike or any(self._argument(name) for name in _UNLIKE)
        latent = bool(self._argument("multi_latent_attention"))
        down: dict[str, int] = {}
        if latent:
            ranks = [self._argument(name) for name in ("q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim")]
            query, low, rotary = (each if type(each) is int else 0 for each in ranks)
            down = {"query": query, "latent": low + rotary}
        return Model(layers, not unlike, self._argument("transformer_impl") == "local" and not latent, down)

    def _is_tied(self) -> bool:
        """Whether the output layer of the last stage is a copy of the embedding of the first one."""
        if self.job.sizes.pipeline == 1:
            return False  # then it is in the files once, if it is tied
        untied = self._argument("untie_embeddings_and_output_weights")
        if type(untied) is not bool:
            raise FormatError(
                f"{self.job.first.path}: its arguments do not tell untie_embeddings_and_output_weights: whether the output "
                "layer is the embedding"
            )
        return not untied

    def _first_layers(self) -> dict[tuple[int, int], Mapping[str, int]]:
        """Number of the first layer of every kind, by chunk and stage: a batch goes through all stages chunk by chunk."""
        stages: dict[int, list[dict[str, int]]] = {}
        for rank in self.job.ranks:
            counts = [self._layers(chunk, rank) for chunk in rank.chunks]
            if stages.setdefault(rank.pipeline, counts) != counts:
                raise FormatError(f"{rank.path}: has other layers than the other ranks of pipeline stage {rank.pipeline}")
        chunks = {len(counts) for counts in stages.values()}
        if len(chunks) != 1:
            raise FormatError(f"{self.job.folder}: stages with {sorted(chunks)} chunks of the model")
        order = [(chunk, stage) for chunk in range(chunks.pop()) for stage in range(len(stages))]
        firsts = first_layers([stages[stage][chunk] for chunk, stage in order])
        total = sum(stages[stage][chunk]["decoder"] for chunk, stage in order)
        if total != self._model.layers:
            raise FormatError(f"{self.job.folder}: {total} layers are in the files; the arguments tell of {self._model.layers}")
        return dict(zip(order, firsts, strict=True))

    def _layers(self, chunk: Mapping[str, Any], rank: Rank) -> dict[str, int]:
        found = {layer for layer in map(layer_of, map(str, chunk)) if layer is not None}
        counts = {kind: sum(each == kind for each, _ in found) for kind in _KINDS}
        if any(number >= counts[kind] for kind, number in found):
            raise FormatError(f"{rank.path}: its layers are not numbered from 0 on")
        return counts

    # ---------------------------------------------------------------- one rank

    def _rank(self, rank: Rank, first: Mapping[tuple[int, int], Mapping[str, int]]) -> None:
        weights = [self._weights(rank, number) for number in range(len(rank.chunks))]
        chunks = [self._chunk(rank, found, first[number, rank.pipeline]) for number, found in enumerate(weights)]
        for number, chunk in enumerate(chunks):
            self._extra_states(rank, number, chunk)
        parameters = self._parameters(rank, weights)
        places = {}
        for number, (found, chunk) in enumerate(zip(weights, chunks, strict=True)):
            for name, weight in found.items():
                place = self._place(rank, number, name, weight, chunk)
                if place is not None:
                    places[f"{number}/{name}"] = place
        states = self._optimizers(rank, parameters, places)
        for number, found in enumerate(weights):
            for name, weight in found.items():
                place = places.get(f"{number}/{name}")
                if place is not None:
                    self._add(rank, place, is_expert(name), weight, states.get(f"{number}/{name}"))

    def _weights(self, rank: Rank, number: int) -> dict[str, Located]:
        """A chunk's parameters and buffers, in the order of the model."""
        found = {}
        for name, value in rank.chunks[number].items():
            if str(name).endswith(EXTRA_STATE):
                continue
            if not isinstance(value, Located):
                raise FormatError(f"{rank.path}: {name} of the model is {value!r:.60}, not a plain tensor")
            found[str(name)] = value
        return found

    def _chunk(self, rank: Rank, weights: Mapping[str, Located], first: Mapping[str, int]) -> Chunk:
        local = {expert for expert in map(expert_of, weights) if expert is not None}
        if local and max(local) != len(local) - 1:
            raise FormatError(f"{rank.path}: its experts are not numbered from 0 on")
        count, told = len(local), self._argument("num_experts")
        if local and type(told) is int and told != count * self.job.sizes.expert:
            raise FormatError(
                f"{rank.path}: {count} experts of {told} are there, with {self.job.sizes.expert} expert parallel ranks"
            )
        shapes = {name: weight.shape for name, weight in weights.items()}
        return Chunk(
            first, rank.expert * count, count * self.job.sizes.expert, gated(shapes), self.job.sizes.tensor,
            self.job.sizes.expert_tensor,
        )  # fmt: skip

    def _place(self, rank: Rank, number: int, name: str, weight: Located, chunk: Chunk) -> Placed | None:
        """Which tensor a parameter is part of; None if it is taken from another rank or stage."""
        if not is_expert(name) and not rank.dense:
            return None
        if name == OUTPUT and self._tied:
            return None
        if is_renamed(name) and self._argument("transformer_impl") is None:
            raise FormatError(
                f"{rank.path}: its arguments do not tell transformer_impl, on which the name depends that {name} has among all"
            )
        try:
            place = placed(name, weight.shape, self._model, chunk)
        except UnknownNameError as err:
            raise FormatError(f"{rank.path}: {err}; {_SUPPORTED}") from None
        here = (number, rank.pipeline)
        owner = self._owner.setdefault((place, rank.tensor), here)
        if owner != here and not name.startswith("embedding."):
            raise FormatError(f"{rank.path}: {name} is in pipeline stage {owner[1]}, too")
        return place if owner == here else None  # an embedding for multi-token prediction is a copy

    # ---------------------------------------------------------------- optimizers

    def _parameters(self, rank: Rank, weights: Sequence[Mapping[str, Located]]) -> list[Parameter]:
        """What the rank trains, in the order of the model, if nothing is frozen."""
        names = [
            (number, name, weight)
            for number, found in enumerate(weights)
            for name, weight in found.items()
            if name.rpartition(".")[2] not in BUFFERS
        ]
        total = sum(weight.numel for _, _, weight in names)
        last = (len(rank.chunks) - 1, self.job.sizes.pipeline - 1)
        made = []
        for number, name, weight in names:
            size = bucket_size(
                overlapped=bool(self._argument("overlap_grad_reduce")), pipeline_rank=rank.pipeline, chunk=number,
                told=self._argument("ddp_bucket_size"), buckets=self._argument("ddp_num_buckets"), parameters=total,
                data_ranks=self.job.sizes.data,
            )  # fmt: skip
            size = None if self._argument("overlap_param_gather_with_optimizer_step") else size
            made.append(
                Parameter(number, name, weight, self._is_shared(name, (number, rank.pipeline), last, weights[number]), size)
            )
        return made

    def _is_shared(
        self, name: str, here: tuple[int, int], last: tuple[int, int], weights: Mapping[str, Located]
    ) -> bool:  # fmt: skip
        """As language_module.py (``setup_embeddings_and_output_layer``) marks an embedding that two stages have."""
        if self.job.sizes.pipeline == 1 or name not in (EMBEDDING, OUTPUT):
            return False
        if here == (0, 0) or EMBEDDING in weights:
            return name == EMBEDDING and (self._tied or bool(self._argument("mtp_num_layers")))
        return here == last and self._tied

    def _optimizers(
        self, rank: Rank, parameters: Sequence[Parameter], places: Mapping[str, Placed]
    ) -> Mapping[str, Mapping[str, Located]]:
        """The states of every parameter by its key."""
        found = list(leaves(rank.content.get("optimizer")))
        apart = [any(group.get("is_expert_parallel") for group in leaf.groups) for leaf in found]
        if len(found) > 2 or (len(found) == 2 and apart != [False, True]):
            raise FormatError(f"{rank.path}: holds {len(found)} optimizers, where one, and one more for experts, are known")
        if found and self._argument("optimizer_cpu_offload"):
            raise FormatError(
                f"{rank.path}: of an optimizer that is partly on the CPU (--optimizer-cpu-offload), which is not read"
            )
        self._leaves += found
        states: dict[str, Mapping[str, Located]] = {}
        buffers: list[Any] | None = None
        for number, leaf in enumerate(found):
            if not apart[number] and not rank.dense:
                continue
            mine = [each for each in parameters if is_expert(each.name) == apart[number]] if True in apart else list(parameters)
            if is_distributed(leaf):
                buffers = self._buffers(rank, len(found)) if buffers is None else buffers
                held = flat(leaf, buffers[number], mine, rank.buffers)
            else:
                held = numbered(leaf, mine, rank.path)
            self._records.append(self._record(leaf, held, places))
            states |= {each.parameter.key: each.states for each in held}
        return states

    def _buffers(self, rank: Rank, count: int) -> list[Any]:
        """Of every optimizer of a rank, what it has in the file for distributed ones."""
        if not rank.buffers.is_file():
            raise FormatError(f"{rank.buffers}: is not there; it has the states of the distributed optimizer")
        found = load(rank.buffers, self._files, also=self._also)
        listed = found if isinstance(found, list) else [found]
        if len(listed) != count:
            raise FormatError(f"{rank.buffers}: holds the states of {len(listed)} optimizers, {rank.path.name} of {count}")
        return listed

    def _record(self, leaf: Leaf, held: Sequence[Held], places: Mapping[str, Placed]) -> OptimizerRecord:
        groups: list[list[str]] = [[] for _ in leaf.groups]
        steps: dict[float, list[str]] = {}
        for each in held:
            place = places.get(each.parameter.key)
            if place is None:
                continue
            if each.group >= 0:
                groups[each.group].append(place.name)
            if each.step is not None:
                steps.setdefault(each.step, []).append(place.name)
        if any(each.group < 0 for each in held) and GROUPS_NOT_TOLD not in self.left_out:
            self.left_out.append(GROUPS_NOT_TOLD)
        values = [hyperparameters(group) for group in leaf.groups]
        states = {state for each in held for state in each.states}
        return OptimizerRecord(
            name_of_optimizer(states, values),
            tuple(
                ParameterGroup(encoded(value), tuple(dict.fromkeys(names))) for value, names in zip(values, groups, strict=True)
            ),
            tuple(ParameterGroup({"step": step}, tuple(dict.fromkeys(names))) for step, names in steps.items()),
        )

    # ---------------------------------------------------------------- parts

    def _add(self, rank: Rank, place: Placed, expert: bool, weight: Located, states: Mapping[str, Located] | None) -> None:
        at, ranks = (
            (rank.expert_tensor, self.job.sizes.expert_tensor) if expert else (rank.tensor, self.job.sizes.tensor)
        )  # fmt: skip
        shape, pairs = boxes(place, weight.shape, at, ranks)
        if states is None:  # frozen, or a buffer
            self._pieces(self._info(place, WEIGHT, weight, shape), weight, pairs, None)
            return
        master = states.get(MASTER, weight)
        for state, data in {MASTER: master, **states}.items():
            self._pieces(self._info(place, state, data, shape), data, pairs, None)
        info = self._info(place, WEIGHT, weight, shape)
        if master is not weight:
            self._pieces(info, weight, pairs, master)

    def _info(self, place: Placed, state: str, data: Located, shape: tuple[int, ...]) -> TensorInfo:
        kind = "parameter" if state in (WEIGHT, MASTER) else "optimizer"
        derived = MASTER if state == WEIGHT and (place.name, MASTER) in self._tensors else None
        info = TensorInfo(place.name, state, data.dtype, shape, kind, derived)
        known = self._tensors.setdefault(info.key, info)
        if known != info:
            raise FormatError(
                f"{data.path}: {state} of {place.name} is {info.dtype} {list(info.shape)} by what is there; by another rank's "
                f"file it is {known.dtype} {list(known.shape)}"
            )
        return info

    def _pieces(self, info: TensorInfo, data: Located, pairs: Sequence[tuple[Box, Box]], origin: Located | None) -> None:
        for local, whole in pairs:
            unless = None if origin is None else _reader(origin, local, whole)
            if origin is not None:
                self._inputs[data.path].add(origin.path)
            self._parts[data.path].append(Part(info, whole, _reader(data, local, whole), unless))

    # ---------------------------------------------------------------- what is no tensor

    def _extra_states(self, rank: Rank, number: int, chunk: Chunk) -> None:
        """Of modules, which the adapter keeps as objects by position, those that are empty, too."""
        for name, value in rank.chunks[number].items():
            if not str(name).endswith(EXTRA_STATE) or name == _OUTPUT_STATE or (not rank.dense and not is_expert(str(name))):
                continue
            try:
                key = object_key(str(name), self._model, chunk)
                self._shared.setdefault(key, plain(value, str(name)))
            except (UnknownNameError, NotPlainError) as err:
                if str(err) not in self.left_out:
                    self.left_out.append(str(err))

    def _generators(self) -> dict[str, Any]:
        """States of random generators by position, as Megatron names them in its other formats (``get_rng_state``)."""
        sizes, found = self.job.sizes, {}
        told = [rank for rank in self.job.ranks if "rng_state" in rank.content]
        if sizes.expert > 1 and sizes.data != sizes.expert:
            if told:
                self.left_out.append(
                    "states of random generators: with experts, those of some data parallel ranks are not there"
                )
            return {}
        for rank in told:
            place = (rank.pipeline, rank.tensor) + ((rank.expert,) if sizes.expert > 1 else ())
            shape = (sizes.pipeline, sizes.tensor) + ((sizes.data,) if sizes.expert > 1 else ())
            try:
                state = plain(rank.content["rng_state"], "rng_state")
            except NotPlainError as err:
                self.left_out.append(str(err))
                continue
            found[f"rng_state/shard_{'.'.join(map(str, place))}_{'.'.join(map(str, shape))}"] = state
        return found


_SUPPORTED = (
    "models of megatron-core are read whose layers are attention and multilayer perceptrons or experts; save others with "
    "--ckpt-format torch_dist, or unickpt"
)


def _is_model(key: Any) -> bool:
    return isinstance(key, str) and key.startswith("model") and (key == "model" or key.removeprefix("model").isdecimal())


def _reader(data: Located, local: Box, whole: Box) -> Reading:
    """How boxes within a box of a global tensor are read, which is a box of a rank's."""
    part = data.at(local)
    lead = whole.ndim - local.ndim
    shaped = replace(part, shape=(*(1,) * lead, *part.shape), strides=(*(1,) * lead, *part.strides))
    return lambda wanted: shaped.read(wanted.within(whole))
