"""Captures the state of a DeepSpeed engine as this rank's contribution to a checkpoint. Calls no collective."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import is_
from typing import Any

import torch

from ds_unickpt.batch import batches
from ds_unickpt.framework import internals
from ds_unickpt.framework.fallbacks import OWN_MODULE_STATE, OWN_OPTIMIZER_STATE, require_supported
from ds_unickpt.framework.partitions import Partition, states_of
from ds_unickpt.held_state import curriculum, named_generators, owned_states, vocabulary
from ds_unickpt.held_state.engine_view import EXTRA_STATE, MICRO_BATCHES, SCALARS, EngineView
from ds_unickpt.held_state.kept_description import KeptDescription, KnownState, PartitionFacts, ReadState
from ds_unickpt.held_state.names import ModuleNames, own_entries
from ds_unickpt.held_state.optimizer_record import RankScalars, layout_of, listed_names, record_of
from ds_unickpt.placing import megatron_deepspeed
from ds_unickpt.placing.placement import Placement
from ds_unickpt.placing.slices import Slices
from ds_unickpt.saving.captured_tensors import add_buffers, add_optimized, add_others, stored_buffers
from unickpt import __version__
from unickpt.base.listing import some
from unickpt.base.options.job import Options
from unickpt.checkpoint.coordination.message_exchange import Message
from unickpt.checkpoint.format.checksums import digest
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup, Writer
from unickpt.checkpoint.format.object_encoder import digest_of
from unickpt.checkpoint.load import rng
from unickpt.checkpoint.save.fingerprints import fingerprints
from unickpt.checkpoint.save.kept import BoundShards, Keeper
from unickpt.checkpoint.save.shards import Contribution, Shard
from unickpt.checkpoint.state import optimizer_entries
from unickpt.checkpoint.state.held import Description
from unickpt.checkpoint.state.optimizer_entries import OPTIMIZERS
from unickpt.transform.dialects.model_facts import Model

_DIGITS = 16  # hex digits of a fingerprint


@dataclass(frozen=True, slots=True)
class DescribedTensors:
    """What a save says of the tensors of this rank.

    Attributes:
        shards: that this rank writes.
        listed: all tensors that it knows.
        excluded: names of excluded parameters.
        bound: further shards, which an earlier save has described; or None.
        keeper: keeps the shards for later saves; or None.
    """

    shards: list[Shard]
    listed: list[TensorInfo]
    excluded: tuple[str, ...]
    bound: BoundShards | None = None
    keeper: Keeper | None = None


class EngineState(EngineView):
    """What a save reads of an engine, and what it makes of that.

    Args:
        client_state: state of the caller. The checkpoint stores the coordinator's for the job, and that of another rank
            for that rank if it differs.
        exclude_frozen: leave out parameters that do not require a gradient.
        known: of earlier saves of the engine.
    """

    def __init__(
        self, engine: Any, options: Options, client_state: Mapping[str, Any], *, exclude_frozen: bool,
        known: KnownState | None = None,
    ) -> None:  # fmt: skip
        self.known = known or KnownState()
        super().__init__(engine, self.known.names, self.known.ranges)
        self.options, self.client_state, self.exclude_frozen = options, client_state, exclude_frozen

    @cached_property
    def supported(self) -> bool:
        """True. Raises UnsupportedLayoutError if unickpt does not support the job."""
        require_supported(self.engine)
        unplaced = "" if self.base is None else optimizer_entries.unplaced(self.base)
        if unplaced:
            raise OWN_OPTIMIZER_STATE.error(f"{type(self.base).__name__} has {unplaced}")
        if self.known.own_entries is None:
            self.known.own_entries = own_entries(self.engine.module)
        if self.known.own_entries:
            raise OWN_MODULE_STATE.error(f"modules with state of their own in the state dict ({some(self.known.own_entries)})")
        return True

    @cached_property
    def scalars(self) -> RankScalars | None:
        """Scalars of this rank, if the ranks may have others."""
        if self.base is None or not _of_parts(self.parts, self.slices):
            return None
        return RankScalars.of(self.parts, self._facts.layout, self.base, self.kinds)

    @cached_property
    def _facts(self) -> PartitionFacts:
        """What is the same at each save as long as the names and the ranges of the partitions are the same."""
        assert self.base is not None
        read = [self.names.of, type(self.base), *(part.pieces for part in self.parts)]
        known = self.known.partitions
        if known is None or len(known.read) != len(read) or not all(map(is_, known.read, read)):
            every, layout = listed_names(self.parts, self.names), layout_of(self.parts, self.names, self.base)
            known = self.known.partitions = PartitionFacts(read, every, layout)
        return known

    @cached_property
    def tensors(self) -> DescribedTensors:
        """The tensors of this rank: from an earlier save, or described anew."""
        known, options = self.known, (self.exclude_frozen, self.options.non_persistent_buffers)
        steady = not self.unsteady and not self.slices.known and self.names.uniform
        kept = known.description if steady else None
        if kept is not None and (bound := kept.bound(ReadState.of(self, kept.others, options))) is not None:
            out = Description()
            add_buffers(out, self, self.options)
            return DescribedTensors(out.shards(), [*kept.tensors, *out.tensors], kept.excluded, bound)
        out, known.description = Description(), None
        known.described += 1
        add_optimized(out, self)
        others, excluded = add_others(out, self, self.exclude_frozen)
        tensors = list(out.tensors)
        add_buffers(out, self, self.options)
        found = DescribedTensors(out.shards(), out.tensors, excluded)
        if not steady:
            return found
        read = ReadState.of(self, others, options)
        keeper = Keeper(read.facts.tensors)
        known.description = KeptDescription(read, tensors, others, excluded, keeper)
        return replace(found, keeper=keeper)

    @cached_property
    def record(self) -> OptimizerRecord | None:
        return None if self.base is None else record_of(self.parts, self._facts.names, self.base, self.kinds)

    def forget(self) -> None:
        """Release what was read. A description whose shards were not kept is none for the next save."""
        super().forget()
        if self.known.description is not None and self.known.description.keeper.kept is None:
            self.known.description = None

    @cached_property
    def digests(self) -> Message:
        """Digests of this rank's state. The other ranks compare the coordinator's with their own to find values that differ."""
        replicas = _tensor_parallel_replicas(self)
        return {
            "client_state": digest_of(dict(self.client_state)),
            "replicas": "".join(fingerprints([p.detach() for _, p in replicas])),
            "buffers": "".join(fingerprints([buffer for _, buffer in stored_buffers(self.names, self.options)])),
            **({} if self.scalars is None else {SCALARS: self.scalars.fingerprint()}),
        }

    def announcement(self) -> Message:
        """Return the digests of the coordinator, or that of the client state alone if the state cannot be described."""
        with contextlib.suppress(Exception):  # ``contribution`` raises the same error on all ranks
            return self.digests
        return {"client_state": digest_of(dict(self.client_state))}

    def read(self) -> None:
        """Read what does not depend on the coordinator's announcement."""
        _ = self.supported, self.tensors, self.record
        if self.rank:
            _ = self.digests


def contribution(state: EngineState, announced: Message) -> Contribution:
    """Return the contribution of this rank to the checkpoint, given the ``announcement`` of the coordinator.

    Raises:
        UnsupportedLayoutError: the job uses a layout that unickpt does not support.
    """
    state.read()
    names, placed = state.names, state.placed
    tensors = state.tensors
    rank_objects: dict[str, Any] = {"rng": rng.capture()}
    if generators := named_generators.captured():
        rank_objects[named_generators.KEY] = generators
    if state.rank and state.digests["client_state"] != announced.get("client_state"):
        rank_objects["client_state"] = dict(state.client_state)
    if state.scalars is not None:
        rank_objects[SCALARS] = state.scalars.to_object()
    if state.base is not None and (entries := optimizer_entries.captured([[state.base]]).stored):
        rank_objects[OPTIMIZERS] = entries
    return Contribution(
        shards=tensors.shards,
        tensors=tensors.listed,
        bound=tensors.bound,
        keeper=tensors.keeper,
        rank_objects=rank_objects,
        step=int(state.engine.global_steps),
        writer=writer(state),
        optimizer=state.record,
        optimizer_part=_part(state.record, names, placed),
        aliases=names.aliases if placed.first else {},
        excluded=tensors.excluded if placed.first else (),
        objects=_objects(state, state.client_state) if placed.rank == 0 else {},
        shared_objects={
            **(_shared_states(names, placed) if placed.rank else {}),
            **owned_states.captured(state),
            **_vocabularies(state, state.client_state),
        },
        different=_different(state, announced) if placed.rank and placed.with_coordinator else (),
        unsteady=state.unsteady,
        replica=None if placed.part is None else (placed.part, _fingerprint(state.parts, state.base)),
    )


def _of_parts(parts: Sequence[Partition], slices: Slices) -> bool:
    """Whether the optimizer steps on parts of parameters on this rank, so that the ranks may have other scalars."""
    if not all(part.replicated for part in parts):
        return True
    return not all(slices.of(parameter).replicated for part in parts for parameter in part.parameters)


def _part(record: OptimizerRecord | None, names: ModuleNames, placed: Placement) -> OptimizerRecord | None:
    """Return the groups and scalars of the parameters that this rank is the first one to have; None if there are none."""
    if record is None:
        return None

    if names.uniform:
        return record if placed.leads(None) and record.groups else None

    def first_here(found: Sequence[ParameterGroup]) -> tuple[ParameterGroup, ...]:
        own = (replace(each, parameters=tuple(n for n in each.parameters if placed.leads(names.having(n)))) for each in found)
        return tuple(each for each in own if each.parameters)

    groups = first_here(record.groups)
    return OptimizerRecord(record.name, groups, first_here(record.scalars), record.stepped) if groups else None


def _different(state: EngineState, announced: Message) -> tuple[tuple[str, str], ...]:
    """Return what differs between this rank and the coordinator, each with the consequence for a load."""
    found, names = [], state.names
    replicas = _tensor_parallel_replicas(state)
    buffers = stored_buffers(names, state.options)
    for key, kind, tensors in (("buffers", "buffer", buffers), ("replicas", "parameter", replicas)):
        theirs, ours = announced.get(key, ""), state.digests.get(key, "")
        if theirs == ours or len(theirs) != len(ours):
            continue
        for at, (name, _) in enumerate(tensors):
            place = slice(_DIGITS * at, _DIGITS * (at + 1))
            if ours[place] != theirs[place] and 0 in (names.holders(name) or (0,)):
                found.append((f"{kind} {name}", "Rank 0's values are stored. After a load every rank has them."))
    ours = state.digests.get(SCALARS, "")
    if ours and SCALARS in announced and ours != announced[SCALARS]:
        follows = "With the same layout each rank gets its own values back. With another layout all ranks get rank 0's."
        found.append(("scalars of the optimizer", follows))
    return tuple(found)


def _tensor_parallel_replicas(view: EngineView) -> list[tuple[str, torch.Tensor]]:
    """Return the weights that all tensor-parallel ranks should hold alike; () under ZeRO-3, where a rank has a part of them."""
    if view.placed.tensors == 1 or view.engine.zero_optimization_partition_weights():
        return []
    return [(name, parameter) for name, parameter in view.names.parameters.items() if view.slices.of(parameter).replicated]


def _fingerprint(parts: Sequence[Partition], base: torch.optim.Optimizer | None) -> str:
    """Return a fingerprint of this rank's masters and optimizer states. It is equal on replicas.

    The padding of a partition is left out. ZeRO-3 does not initialise it (``partition_parameters.py``, ``_partition_param``).
    """
    tensors = []
    for part in parts:
        state = states_of(base, part) if base is not None else {}
        tensors += _held_elements(part, "master", part.elements)
        for key, value in sorted(state.items()):
            if isinstance(value, torch.Tensor):
                tensors += _held_elements(part, key, value)
    return digest("".join(fingerprints(tensors)).encode())


def _held_elements(part: Partition, key: str, value: torch.Tensor) -> list[torch.Tensor]:
    """Return the elements of a state that belong to parameters; the whole tensor if it is not elementwise."""
    if key not in part.whole and value.numel() != part.elements.numel():
        return [value]
    flat = value.detach().reshape(-1)
    return [flat.narrow(0, piece.at, piece.hi - piece.lo) for piece in part.held(key)]


def writer(view: EngineView) -> Writer:
    """Return the writer's entry of the manifest."""
    from deepspeed.git_version_info import version

    module = view.engine.module
    known = megatron_deepspeed.job_of(module)
    dialect, model = ("huggingface", Model.of_module(module)) if known is None else (known.dialect, known.model)
    return Writer("deepspeed", version, __version__, torch.__version__, dialect, view.topology, model.as_json())


def _objects(view: EngineView, client_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the non-tensor state of the job, which is what DeepSpeed itself saves."""
    engine = view.engine
    scaler, grad_scaler = internals.loss_scaler(engine), internals.grad_scaler(engine)
    found: dict[str, Any] = {
        "client_state": dict(client_state),
        "engine": {key: int(getattr(engine, key)) for key in ("global_steps", "global_samples", "skipped_steps")},
        "ds_config": dict(internals.config_of(engine)),
        batches.BATCH: batches.of_engine(engine).to_json(),
        "lr_scheduler": _named_state(engine.lr_scheduler),
        "loss_scaler": None if scaler is None else internals.scaler_values(scaler),
        "grad_scaler": None if grad_scaler is None else grad_scaler.state_dict(),
        EXTRA_STATE: _extra_states(view.names),
    }
    if engine.pipeline_parallelism:
        found[MICRO_BATCHES] = internals.micro_batches(engine)
    found |= {key: None if value is None else value.state_dict() for key, value in internals.extra_states(engine).items()}
    if found[internals.SAMPLER] is not None:
        found[internals.SAMPLER] = curriculum.captured(internals.extra_states(engine)[internals.SAMPLER])
    return found


def _named_state(scheduler: Any) -> dict[str, Any] | None:
    if scheduler is None or not hasattr(scheduler, "state_dict"):
        return None
    return {"class": type(scheduler).__name__, "state": scheduler.state_dict()}


def _extra_states(names: ModuleNames) -> dict[str, Any]:
    """Return ``get_extra_state`` of the modules of this rank, by the stored name of the module."""
    return {
        name: child.get_extra_state()
        for name, child in names.modules
        if type(child).get_extra_state is not torch.nn.Module.get_extra_state
    }


def _vocabularies(view: EngineView, client_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the padded vocabularies that this rank is the first one to have, by their shared key."""
    found, names = vocabulary.of_job(view, client_state), view.names
    own = (name for name in found if view.placed.leads(names.having(name)) and name not in names.elsewhere)
    return {f"{vocabulary.STORED}{name}": found[name] for name in own}


def _shared_states(names: ModuleNames, placed: Placement) -> dict[str, Any]:
    """Return the extra states of the modules that this rank is the first one to have, by their key in the shared objects."""
    found = _extra_states(names)
    return {f"{EXTRA_STATE}/{name}": state for name, state in found.items() if placed.leads(names.having(name))}
