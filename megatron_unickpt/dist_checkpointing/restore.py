"""Reads a checkpoint into a sharded state dict: each requested box from the fragments that hold it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from megatron_unickpt.dist_checkpointing import lacking
from megatron_unickpt.dist_checkpointing.lacking import ERROR, Fit, Lack, States
from megatron_unickpt.framework import internals
from megatron_unickpt.held_state import generators, optimizer_forms, positions, sharded_tensors
from megatron_unickpt.held_state import vocabulary as vocabulary_module
from megatron_unickpt.held_state.common_state import COMMON
from megatron_unickpt.held_state.hyperparameters import OptimizerPart
from megatron_unickpt.held_state.sharded_tensors import MASTER, WEIGHT, StateTensor
from unickpt.base.errors import MismatchError
from unickpt.base.listing import listed
from unickpt.checkpoint.coordination.host_peers import HostPeers
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import name_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord
from unickpt.checkpoint.format.topology import describe
from unickpt.checkpoint.load import rng
from unickpt.checkpoint.load.checkpoint import Checkpoint, Planned
from unickpt.checkpoint.load.report import LoadReport, Outcome
from unickpt.checkpoint.load.vocabulary import Rows, Vocabulary, rows_of
from unickpt.checkpoint.state.filling import OBJECT, Filling
from unickpt.checkpoint.state.optimizer_record import LEFT_OUT, not_stored
from unickpt.transform.convert.megatron.keys import VOCABULARY_TENSORS
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.translated_checkpoint import TranslatedCheckpoint, heading_of

OUTPUT_BIAS = "output_layer.bias"


def stored_tensors(checkpoint: Checkpoint) -> Iterable[TensorInfo]:
    """Return the tensors of the checkpoint, without objects."""
    return (info for info in checkpoint.index.tensors if info.kind != OBJECT)


@dataclass
class Restore:
    """One load on one rank.

    Attributes:
        checkpoint: opened checkpoint.
        report: report of this rank's tensors and objects.
        missing_state: ``error`` or ``fresh``, the option.
        own: class name of this job's optimizer; '' without one.
        fit: which tensors the job may have alone.
        fresh: this rank's optimizer states that begin anew, (name, state), by the reason.
    """

    checkpoint: Checkpoint
    verify: str = "always"
    allow_pickle: bool = False
    missing_state: str = ERROR
    own: str = ""
    fit: Fit = Fit.REQUESTED
    report: LoadReport = field(default_factory=LoadReport)
    fresh: dict[Lack, set[tuple[str, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.report.source = heading_of(self.checkpoint)
        self._filling = Filling(self.checkpoint, self.report)
        self._states = States(self.record, self.checkpoint.manifest.step, stored_tensors(self.checkpoint), self.own)
        self._zeros: list[torch.Tensor] = []
        self._tree: Any = None
        self._objects: dict[str, Any] = {}

    # ---------------------------------------------------------------- the whole

    def request(self, tree: Any) -> Planned:
        """Plan the read of every sharded tensor of a tree, and read its objects. Raises as ``plan`` and ``objects``."""
        leaves = sharded_tensors.walk(tree)
        # names and shapes first: their error says more than that of an object if the model differs
        planned = self.plan([leaf for leaf in leaves if isinstance(leaf, ShardedTensor)])
        self._tree, self._objects = tree, self.objects(leaf for leaf in leaves if isinstance(leaf, ShardedObject))
        return planned

    def filled(self) -> Any:
        """Return the tree of ``request`` with data and objects in place of the sharded ones, after the read."""
        return sharded_tensors.mapped(
            self._tree, lambda item: self._objects[item.unique_key] if isinstance(item, ShardedObject) else item.data
        )

    # ---------------------------------------------------------------- tensors

    def plan(self, items: Sequence[ShardedTensor]) -> Planned:
        """Request the data of every sharded tensor. Allocate data for tensors without any.

        Raises:
            MismatchError: the checkpoint lacks tensors, or has them in another shape. Lists all of them.
            CorruptCheckpointError, StorageError: damaged or unreadable.
        """
        refused_form = optimizer_forms.refusal(self.checkpoint, items)
        if refused_form:
            raise MismatchError(f"{self.checkpoint.storage} does not fit this job: {refused_form}. Nothing is loaded.")
        missing: list[str] = []
        shapes: list[str] = []
        rows: list[str] = []
        wanted: list[tuple[ShardedTensor, TensorInfo]] = []
        for item in items:
            name, state = sharded_tensors.tensor_of(item.key)
            info = self._filling.source(name, state)
            if info is None:
                missing += self._lacked(item, name, state)
            elif not _fits(item, info):
                shapes.append(f"{item.key}: {info.shape} in the checkpoint, {tuple(item.global_shape)} in this job")
            elif refused := self._rows_of(item, info).refused:
                rows.append(f"{name}: {refused}")
            else:
                wanted.append((item, info))
        self._complain(missing, shapes, rows)
        for item, info in wanted:
            self._request(item, info)
        return self._filling.plan()

    def read(self, planned: Planned, host_peers: HostPeers | None = None) -> None:
        """Fill the requested tensors in place. Data that other ranks of this host also need is read once.

        Raises:
            CorruptCheckpointError, StorageError: damaged or unreadable.
        """
        self._filling.read(planned, verify=self.verify, host_peers=host_peers)
        for data in self._zeros:
            data.zero_()

    @cached_property
    def record(self) -> OptimizerRecord | None:
        """Return hyperparameters and steps of the optimizer, by parameter."""
        return optimizer_forms.record_of(self.checkpoint)

    @property
    def stored_states(self) -> list[str]:
        """Names of the optimizer states of the checkpoint."""
        return self._states.names

    def begin_anew(self, items: Iterable[ShardedTensor]) -> None:
        """Let optimizer states begin anew that the checkpoint lacks and that Megatron's handling of keys does not request."""
        for item in items:
            if isinstance(item, StateTensor):
                name, state = sharded_tensors.tensor_of(item.key)
                lack = self._states.lack(name)
                if state != MASTER and lack is not Lack.NO_PARAMETER and self._filling.source(name, state) is None:
                    self._begin(item, name, state, lack)

    def _lacked(self, item: ShardedTensor, name: str, state: str) -> list[str]:
        """Decide about a tensor that the checkpoint lacks. Return its key if the load cannot go on without it."""
        lack = self._states.lack(name) if isinstance(item, StateTensor) and state != MASTER else Lack.NO_PARAMETER
        if lack is not Lack.NO_PARAMETER:
            self._begin(item, name, state, lack)
        elif self.fit is not Fit.COMMON:
            return [item.key]
        else:
            self.report.add(name, state, "left out", f"{lack.value}: the job keeps its own")
        return []

    def _begin(self, item: ShardedTensor, name: str, state: str, lack: Lack) -> None:
        self._zeros.append(item.data)
        self.fresh.setdefault(lack, set()).add((name, state))
        outcome: Outcome = "left out" if lack in (Lack.NO_OPTIMIZER, Lack.NOT_STEPPED) else "re-seeded"
        self.report.add(name, state, outcome, f"{lack.value}: zeros, as in a new optimizer")

    def _complain(self, missing: list[str], shapes: list[str], rows: list[str]) -> None:
        lines = listed("not in the checkpoint", sorted(set(missing)), separator="; ")
        lines += listed("of another shape", sorted(set(shapes)), separator="; ")
        lines += listed("with more rows of the vocabulary than this job has", sorted(set(rows)), separator="; ")
        if missing and self.fit is Fit.EQUAL:
            lines.append("strict=False keeps this job's own values of tensors that the checkpoint lacks")
        if lines and (advice := optimizer_forms.advice(self.checkpoint, [*missing, *shapes])):
            lines.append(advice)
        if self.missing_state == ERROR:
            asked = {lack: self.fresh.get(lack, set()) for lack in lacking.ASKED}
            saved_with = self.record.name if self.record else "no optimizer"
            lines += filter(None, [lacking.refusal(asked, saved_with, self._states.names)])
        if rows:
            lines.append(vocabulary_module.advice(self.vocabulary))
        if lines:
            raise MismatchError(f"{self.checkpoint.storage} does not fit this job: {'. '.join(lines)}. Nothing is loaded.")

    def _request(self, item: ShardedTensor, info: TensorInfo) -> None:
        item.init_data(torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu")
        if item.data.numel() == 0:
            return
        if _may_differ(item) and info.shape != tuple(item.global_shape):
            self._begin_rows(item, info)
        for piece in sharded_tensors.pieces_of(item, item.data.detach()):
            box = piece.box.intersect(Box.whole(info.shape))
            if box is None:
                continue  # all of it is padding that the checkpoint lacks
            self._filling.request(info, box, piece.data[box.within(piece.box).slices()])
        self._account(item, info)

    def _account(self, item: ShardedTensor, info: TensorInfo) -> None:
        name, state = sharded_tensors.tensor_of(item.key)
        rows = self._rows_of(item, info)
        if rows.initialised != (0, 0):
            how = "initialised by the model" if state in (WEIGHT, MASTER) else "zeros"
            reason = f"rows {rows.initialised[0]}:{rows.initialised[1]} are not in the checkpoint: {how}"
            self.report.add(name, state, "re-seeded", reason)
        if info.shape != tuple(item.global_shape):
            self.report.add(name, state, "restored", f"{info.shape} of {tuple(item.global_shape)}: the rest is padding")
        else:
            self._filling.account(name, state, info, name_of(item.data.dtype))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Return the number of entries of the tokenizers of the checkpoint and of this job."""
        own, options = internals.tokens(), internals.global_arguments()
        if isinstance(self.checkpoint, TranslatedCheckpoint):  # other frameworks do not pad
            facts = Model.from_json(self.checkpoint.manifest.writer.model).facts
            return Vocabulary(facts.get("vocab"), own)
        common = self.checkpoint.objects(allow_pickle=self.allow_pickle).value.get(COMMON)
        stored = common.get("args") if isinstance(common, dict) else None
        return Vocabulary(
            vocabulary_module.entries_of_checkpoint(
                self.checkpoint.manifest.writer.model,
                vars(stored) if isinstance(stored, argparse.Namespace) else {},
                {} if options is None else vars(options),
                own,
            ),
            own,
        )

    def _rows_of(self, item: ShardedTensor, info: TensorInfo) -> Rows:
        """Return what to do with the rows of a vocabulary tensor. Empty for any other tensor."""
        if info.shape == tuple(item.global_shape) or not _is_of_vocabulary(item):
            return Rows()
        return rows_of(info.shape[0], int(item.global_shape[0]), self.vocabulary)

    def _begin_rows(self, item: ShardedTensor, info: TensorInfo) -> None:
        """Prepare the rows that the checkpoint lacks. Padding is set to zero, as torch_dist loads it."""
        first, last = self._rows_of(item, info).initialised
        data = item.data.detach()
        state = sharded_tensors.tensor_of(item.key)[1]
        kept = None
        if state in (WEIGHT, MASTER) and last > first:
            whole = sharded_tensors.box_of(item)
            kept = Box((first, *(0,) * (len(whole.shape) - 1)), (last - first, *item.global_shape[1:]))
        before = data.clone() if kept is not None else None
        data.zero_()
        if kept is None or before is None:
            return
        for old, new in zip(sharded_tensors.pieces_of(item, before), sharded_tensors.pieces_of(item, data), strict=True):
            common = new.box.intersect(kept)
            if common is not None:
                place = common.within(new.box).slices()
                new.data[place].copy_(old.data[place])

    # ---------------------------------------------------------------- objects

    def common(self) -> Any:
        """Return Megatron's common state dict, and report the values that could not be stored as plain values."""
        decoded = self.checkpoint.objects(allow_pickle=self.allow_pickle)
        for each in decoded.left_out:
            self.report.add(each.path, OBJECT, "left out", each.reason)
        if isinstance(self.checkpoint, TranslatedCheckpoint):
            self.report.entries += self.checkpoint.job_notes
        common = decoded.value.get(COMMON) or {}
        return {**common, **self._own_common(common)} if isinstance(common, dict) else common

    def _own_common(self, common: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the common state in which the ranks of the save differed.

        A job of the same layout has each rank's own. In another one generators are seeded by position, and others are rank 0's.
        """
        before, now = self.checkpoint.manifest.writer.topology, internals.topology()
        if isinstance(self.checkpoint, TranslatedCheckpoint):
            return {}
        if before == now:
            return self._of_rank(torch.distributed.get_rank())
        others = range(1, int(before.get("world_size", 1)))
        found = {}
        for key in next(filter(None, map(self._of_rank, others)), {}):
            seeded = generators.seeded(common.get(key), internals.coordinates())
            if seeded is not None:
                found[key] = seeded
            how = (
                "each rank had its own; this is rank 0's" if seeded is None else "seeded from those of rank 0 and the position"
            )
            reason = rng.change(describe(before), describe(now), how)
            self.report.add(f"{COMMON}.{key}", OBJECT, "set" if seeded is None else "re-seeded", reason)
        return found

    def _of_rank(self, rank: int) -> dict[str, Any]:
        found = self.checkpoint.rank_objects(rank, allow_pickle=self.allow_pickle).value.get(COMMON)
        return found if isinstance(found, dict) else {}

    def objects(self, items: Iterable[ShardedObject]) -> dict[str, Any]:
        """Return the requested objects by unique key.

        Raises:
            MismatchError: the checkpoint lacks an object, and no rule replaces it (``positions``).
        """
        found: dict[str, Any] = {}
        items = list(items)
        self.checkpoint.fetch_shared(item.unique_key for item in items)
        for item in items:
            if isinstance(self.checkpoint, TranslatedCheckpoint):
                found[item.unique_key] = item.data
                self.report.add(item.unique_key, OBJECT, "re-seeded", "the other framework has none: this job keeps its own")
                continue
            if generators.are_in(item) and self._names_of(item.key):
                found[item.unique_key] = self._generators(item)
                continue
            if item.unique_key not in self._object_names:
                found[item.unique_key] = self._at_another_position(item)
                continue
            decoded = self.checkpoint.shared_object(item.unique_key, allow_pickle=self.allow_pickle)
            found[item.unique_key] = sharded_tensors.object_of(decoded.value)
            if decoded.left_out:
                self.report.add(item.unique_key, OBJECT, "left out", "; ".join(map(str, decoded.left_out)))
            else:
                self.report.add(item.unique_key, OBJECT, "restored")
        return found

    @cached_property
    def _object_names(self) -> frozenset[str]:
        return frozenset(self.checkpoint.shared_names())

    @cached_property
    def _by_key(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in sorted(self._object_names):
            found.setdefault(name.rpartition("/")[0], []).append(name)
        return found

    def _names_of(self, key: str) -> tuple[str, ...]:
        return tuple(self._by_key.get(key, ()))

    def _generators(self, item: ShardedObject) -> Any:
        left_out: list[str] = []

        def read(name: str) -> Any:
            decoded = self.checkpoint.shared_object(name, allow_pickle=self.allow_pickle)
            left_out.extend(map(str, decoded.left_out) if name == item.unique_key else ())
            return decoded.value

        stored = generators.StoredGenerators(self._names_of(item.key), read, self.checkpoint.manifest.writer.topology)
        found = generators.found_for(item, stored, internals.topology(), internals.coordinates())
        if left_out and found.outcome == "restored":
            found = replace(found, outcome="left out", reason="; ".join(left_out))
        return self._taken(item, found)

    def _at_another_position(self, item: ShardedObject) -> Any:
        names = self._names_of(item.key)
        read = names if positions.may_move(item) else ()
        decoded = [self.checkpoint.shared_object(name, allow_pickle=self.allow_pickle) for name in read]
        complete = [] if any(each.left_out for each in decoded) else [each.value for each in decoded]
        return self._taken(item, positions.at_another_position(item, complete, names))

    def _taken(self, item: ShardedObject, found: positions.Found) -> Any:
        """Report an object that was found, and return it."""
        if found.refused:
            other = positions.ADVICE if self._names_of(item.key) else ""
            advice = optimizer_forms.advice(self.checkpoint, [item.key]) or other
            raise MismatchError(
                f"{self.checkpoint.storage}: no object {item.unique_key} ({found.reason}): objects are kept per "
                f"position and cannot be resharded. {advice}".rstrip()
            )
        self.report.add(item.unique_key, OBJECT, found.outcome, found.reason)
        return found.value if found.own else sharded_tensors.object_of(found.value)

    def optimizers(self, parts: Iterable[OptimizerPart]) -> None:
        """Pass the hyperparameters of the checkpoint to the optimizers that were filled."""
        began = frozenset(name for lack in (Lack.FROZEN, Lack.NO_STATE) for name, _ in self.fresh.get(lack, ()))
        for part in parts:
            part.record = self.record
            part.grad_scaler = self.checkpoint.objects(allow_pickle=self.allow_pickle).value.get("grad_scaler")
            part.began = began
            part.loaded = True
            if part.record is None:
                self.report.add("optimizer", OBJECT, "left out", "the checkpoint has no hyperparameters")
            else:
                self.report.add("optimizer", OBJECT, "restored", "hyperparameters and step, by parameter")
                for key in not_stored(part.record.groups):
                    self.report.add(f"param_groups.{key}", "hyperparameter", "left out", LEFT_OUT)


def _fits(item: ShardedTensor, info: TensorInfo) -> bool:
    shape = tuple(item.global_shape)
    if _may_differ(item) and len(info.shape) == len(shape):
        return not _is_of_vocabulary(item) or info.shape[1:] == shape[1:]
    return info.shape == shape


def _may_differ(item: ShardedTensor) -> bool:
    """Whether the checkpoint may have another shape.

    Megatron says so for embeddings and output weights. The bias of T5's output layer has the same rows, but its padding is not
    declared.
    """
    if item.allow_shape_mismatch:
        return True
    of_model = isinstance(item, StateTensor) or isinstance(item.data, torch.nn.Parameter)
    return of_model and sharded_tensors.tensor_of(item.key)[0].endswith(OUTPUT_BIAS)


def _is_of_vocabulary(item: ShardedTensor) -> bool:
    """Whether a tensor has a row for each entry of the vocabulary.

    Megatron allows other shapes for these tensors only. A caller of ``dist_checkpointing`` may allow them for the tensors that
    it describes itself.
    """
    if not _may_differ(item) or len(item.global_shape) == 0:
        return False
    name = sharded_tensors.tensor_of(item.key)[0]
    return isinstance(item, StateTensor) or isinstance(item.data, torch.nn.Parameter) or name.endswith(VOCABULARY_TENSORS)
