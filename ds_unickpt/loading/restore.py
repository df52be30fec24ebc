"""Loads a checkpoint of any framework into a DeepSpeed engine.

A load has four steps. ``plan`` matches names and checks shapes. ``read`` fills masters, optimizer states, frozen parameters and
buffers. ``set_tensors`` derives the weights and sets hyperparameters. ``finish`` sets the non-tensor state and completes the
report. The ranks agree on success after each step, after ``set_tensors`` only if ``finish`` calls a collective. A step calls
its collectives before the parts that can fail on one rank alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from ds_unickpt.batch.batches import Batch
from ds_unickpt.framework import internals, partition_updates, partitions, swap_files
from ds_unickpt.framework.partitions import HeldParameter, Partition
from ds_unickpt.held_state import vocabulary
from ds_unickpt.held_state.beginning import Beginning
from ds_unickpt.held_state.engine_view import SCALARS, EngineView
from ds_unickpt.loading.derived_weights import DerivedWeights
from ds_unickpt.loading.matching import Matching, OwnTensor
from ds_unickpt.loading.reads import Reads, mean
from ds_unickpt.loading.restore_objects import LoadArguments, RestoredObjects
from ds_unickpt.loading.restore_optimizer import RestoredOptimizer
from ds_unickpt.placing.placement import Placement
from ds_unickpt.placing.slices import FlatPlace, Slice, places
from unickpt.base.errors import MismatchError
from unickpt.base.options.job import Options
from unickpt.checkpoint.coordination.host_peers import HostPeers
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import name_of, torch_dtype
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.topology import describe
from unickpt.checkpoint.load.checkpoint import Checkpoint, Planned
from unickpt.checkpoint.load.report import LoadReport
from unickpt.transform.dialects.translated_checkpoint import heading_of


def _override(parameter: torch.nn.Parameter, place: FlatPlace, common: Box, data: torch.Tensor, placed: Placement) -> None:
    """Replace the casts of masters by stored weights that differ from them: ``common``, a part of ``place.whole``."""
    held = partitions.held(parameter, placed)
    assert held is not None  # or nothing was requested
    live = place.of(held.data) if held.live else parameter.detach()[place.local.slices()]
    live = live if live.shape == place.local.shape else live.view(place.local.shape)
    live[common.within(place.whole).slices()].copy_(data)


class EngineRestore:
    """One load into one engine. ``report`` is complete after ``finish``."""

    def __init__(
        self, view: EngineView, checkpoint: Checkpoint, options: Options, wanted: LoadArguments, beginning: Beginning
    ) -> None:
        self.view, self.checkpoint, self.options, self.wanted = view, checkpoint, options, wanted
        swap_files.release_weights(view.engine.module)  # before ``parts`` is read
        self.names, self.slices, self.placed, self.parts = view.names, view.slices, view.placed, view.parts
        self.report = LoadReport(heading_of(checkpoint), describe(view.topology))
        self.report.notes = list(checkpoint.manifest.notes)
        padded = vocabulary.PaddedRows.of(checkpoint, view)
        self.matching = Matching(checkpoint, self.names, self.names.volatile, padded, wanted.strict, self.report)
        self.matching.match(self._own_tensors(), optimizer=wanted.optimizer)
        for name, shape in self.matching.other_rows.items():
            parameter = self.names.parameters[name]
            self.slices = self.slices.fitted(parameter, vocabulary.fitted(self.slices.of(parameter), shape))
        self._elsewhere: frozenset[str] = frozenset()
        self._stored = self.matching.stored
        means = {names[0]: names for names in self.matching.means.values()}
        self._reads = Reads(checkpoint, self.report, stored=self._stored, means=means)
        self._derived = DerivedWeights(view, self.slices, self._reads)
        self._overrides: list[tuple[torch.nn.Parameter, FlatPlace, Box, torch.Tensor]] = []
        self._custom_source: dict[str, torch.Tensor] = {}
        self._offload_again: Callable[[], None] = lambda: None
        self._optimizer = RestoredOptimizer(
            view, self.slices, self._reads, self.report, allow_pickle=options.allow_pickle,
            fresh=options.missing_state == "fresh", beginning=beginning,
        )  # fmt: skip
        self._objects = RestoredObjects(view, checkpoint, options, wanted, self.report, beginning)

    # ---------------------------------------------------------------- names and shapes

    def settle(self, unclaimed: Collection[str]) -> None:
        """Check that names and shapes fit.

        Args:
            unclaimed: names of the checkpoint that no rank of this job has (``Matching.unclaimed`` on all ranks).

        Raises:
            MismatchError: lists all missing tensors, extra tensors and tensors of another shape.
        """
        self._elsewhere = self.matching.settle(unclaimed)

    def _own_tensors(self) -> Iterator[OwnTensor]:
        optimized = {id(p) for part in self.parts for p in part.parameters}
        for name, parameter in self.names.parameters.items():
            part = self.slices.of(parameter)
            yield OwnTensor(name, part.shape, id(parameter) in optimized, part.averaged)
        for name, buffer, persistent in self.names.buffers:
            if persistent or self._restores_buffer(name, buffer):
                yield OwnTensor(name, tuple(buffer.shape), trained=False)
            else:
                self.report.add(name, "weight", "recreated", "non-persistent buffers, which the model creates itself")

    def _restores_buffer(self, name: str, buffer: torch.Tensor) -> bool:
        info = self.checkpoint.info(name, "weight")
        wanted = self.options.non_persistent_buffers and info is not None
        return wanted and info is not None and info.shape == tuple(buffer.shape)

    def stored_name(self, parameter: torch.nn.Parameter) -> str:
        """Return the name of a parameter in the checkpoint, or its own name if the checkpoint lacks it."""
        name = self.names.name(parameter)
        return self._stored.get(name, name)

    # ---------------------------------------------------------------- tensors

    def plan(self) -> Planned:
        """Return the plan of everything to read from storage. Calls no collective.

        Raises:
            MismatchError: the optimizers do not fit.
        """
        if self.wanted.optimizer:
            self._optimizer.check()
        if self.wanted.custom_load_fn is None:
            for part in self.parts:
                self._request_masters(part)
            self._request_others()
        if self.wanted.optimizer:
            self._optimizer.request()
        self._optimizer.account_others(wanted=self.wanted.optimizer, elsewhere=self._elsewhere)
        return self._reads.plan()

    def read(self, planned: Planned, host_peers: HostPeers | None) -> None:
        """Read all requested data. Data that other ranks of this host also need is read once."""
        self._reads.read(planned, verify=self.options.verify, host_peers=host_peers)
        self._objects.read()
        if self.wanted.custom_load_fn is not None:
            self._custom_source = self._full_state_dict()

    def _request_masters(self, part: Partition) -> None:
        flat = self._reads.flat(part.elements)
        dtype = name_of(part.master.dtype)
        sources = {}
        for parameter in part.parameters:
            name = self.names.name(parameter)
            source = sources[id(parameter)] = self._reads.source(name, "master")
            if source is not None:
                weight = self._account_trained(name, parameter, source, dtype)
                if weight is not None:
                    self._request_overrides(weight, parameter)
        for piece in part.pieces:
            source = sources[id(piece.parameter)]
            if source is not None:
                part_of = self.slices.of(piece.parameter)
                self._reads.fill(source, part_of, piece.lo, piece.hi, flat.narrow(0, piece.at, piece.hi - piece.lo))
        self._derived.request(part, sources)

    def _account_trained(self, name: str, parameter: torch.nn.Parameter, info: TensorInfo, master: str) -> TensorInfo | None:
        """Report what serves a master and its weight. Return the weight if fragments of it replace casts."""
        self._reads.account(name, "master", info, master)
        weight, dtype = self._reads.source(name, "weight"), name_of(parameter.dtype)
        assert weight is not None  # ``info`` if there is no other
        if name in self.matching.means:
            self._reads.account(name, "weight", weight, dtype, " (of the masters)")
            return None
        self._reads.account(name, "weight", weight, dtype, self.matching.other_padding(name))
        return weight if weight.dtype == dtype and weight.derived_from is not None else None

    def _request_overrides(self, weight: TensorInfo, parameter: torch.nn.Parameter) -> None:
        """Request what replaces the casts, which are computed after the read."""
        held, part = partitions.held(parameter, self.placed), self.slices.of(parameter)
        if held is None or not self.checkpoint.override_boxes(self.checkpoint.ids[weight.key]):
            return
        for place in places(part.local, part.boxes, held.lo, held.hi):
            found = self._reads.overrides(weight, place.whole)
            self._overrides += [(parameter, place, common, data) for common, data in found]

    def _request_others(self) -> None:
        """Request the parameters outside the optimizer, such as frozen ones, and the buffers."""
        optimized = {id(p) for part in self.parts for p in part.parameters}
        for name, parameter in self.names.parameters.items():
            if id(parameter) not in optimized and name in self._stored:
                held = partitions.held(parameter, self.placed)
                self._request_plain(name, name_of(parameter.dtype), self.slices.of(parameter), held)
                if held is not None and not held.live:
                    self._reads.copy_later(parameter, held.data)
        for name, buffer, _ in self.names.buffers:
            if name in self._stored:
                flat = self._reads.flat(buffer)
                held = HeldParameter(0, flat.numel(), flat, live=True, replicated=True)
                self._request_plain(name, name_of(buffer.dtype), Slice.whole(tuple(buffer.shape)), held)

    def _request_plain(self, name: str, dtype: str, part: Slice, held: HeldParameter | None) -> None:
        info = self._reads.source(name, "weight")
        if info is None:
            raise MismatchError(f"{self.checkpoint.storage}: {name} has neither a weight nor a master")
        self._reads.account(name, "weight", info, dtype)
        if held is not None:
            self._reads.fill(info, part, held.lo, held.hi, held.data)

    def agree(self, exchange: MessageExchange) -> None:
        """Take over what rank 0 has decided for all ranks after ``read``: whether the curriculum sampler can be restored."""
        if not self.wanted.module_only and self.view.engine.curriculum_learning_enabled():
            self._objects.sampler_refused = exchange.broadcast("sampler", {"refused": self._objects.sampler_refused})["refused"]

    # ---------------------------------------------------------------- into the engine

    def set_tensors(self, host_peers: HostPeers | None) -> None:
        """Derive the weights from the masters, and set the hyperparameters.

        Under ZeRO-1 and 2 the ranks exchange the weights: through the memory of the host, or else by DeepSpeed's collective.
        """
        partition_updates.forget_gradients(self.view.engine)
        if self.wanted.optimizer:
            self._optimizer.place()
        self._offload_again = partition_updates.reload_states(self.view.engine)
        if self.wanted.custom_load_fn is not None:
            self._custom_load(self.wanted.custom_load_fn)
        else:
            derived = self._derived.complete(host_peers)
            partition_updates.refresh_weights(self.view.engine, self.parts, host_peers, derived=derived)
            for override in self._overrides:
                _override(*override, self.placed)
        if self.wanted.optimizer:
            self._optimizer.apply(self._objects.of_this_rank(SCALARS))

    @property
    def finishes_together(self) -> bool:
        """Whether ``finish`` is a collective, so that all ranks must have set their tensors. The same on all ranks."""
        return partition_updates.gathers_after(self.view.engine)

    def finish(self) -> dict[str, Any]:
        """Set the non-tensor state, and complete the report. ZeRO-3 gathers its persistent parameters (a collective).

        Returns:
            The client state.
        """
        partition_updates.after_restore(self.view.engine, self.parts)
        self._offload_again()
        client_state = self._objects.apply()
        self._require_all()
        return client_state

    @property
    def fresh_line(self) -> str:
        """Which optimizer states of this rank start fresh, for the log; '' if the checkpoint lacks none."""
        return self._optimizer.fresh_line()

    def saved_batch(self) -> Batch | None:
        """Return the batch size of the job that saved the checkpoint; None if unknown."""
        return self._objects.saved_batch()

    def _full_state_dict(self) -> dict[str, torch.Tensor]:
        """Read this rank's part of all weights, under the names of this job: the ``src`` argument of ``custom_load_fn``."""
        source = {}
        for name, stored in self._stored.items():
            state = "weight" if (stored, "weight") in self.checkpoint.ids else "master"
            source[name] = self._read_part(name, self.checkpoint.index.tensors[self.checkpoint.ids[stored, state]])
            self.report.add(name, "weight", "restored", "passed to custom_load_fn")
        source |= {alias: source[name] for alias, name in self.names.aliases.items() if name in source}
        return {self.names.own.get(name, name): tensor for name, tensor in source.items()}

    def _read_part(self, name: str, info: TensorInfo) -> torch.Tensor:
        """Read this rank's part of a tensor: all of it without tensor parallelism, or the mean of several values."""
        parameter = self.names.parameters.get(name)
        part = Slice.whole(info.shape) if parameter is None else self.slices.of(parameter)
        values = []
        for each in self._reads.averaged(info):
            found = torch.zeros(part.local, dtype=torch_dtype(info.dtype))
            for box in part.boxes:
                if box.whole.numel:
                    found[box.local.slices()] = self.checkpoint.read_box(each, box.whole).view(box.whole.shape)
            values.append(found)
        return values[0] if len(values) == 1 else mean(values).to(values[0].dtype)

    def _custom_load(self, load: Callable[..., Any]) -> None:
        """Call ``custom_load_fn``, and derive the masters from the weights that it sets."""
        from deepspeed import zero

        partitioned = [p for p in self.names.parameters.values() if internals.is_zero3(p)]
        with contextlib.ExitStack() as gathered:
            for parameter in partitioned:  # one at a time: of several, DeepSpeed waits only for the last
                gathered.enter_context(zero.GatheredParameters([parameter], modifier_rank=0))
            load(src=self._custom_source, dst=self.view.engine.module)
        self._custom_source = {}
        partition_updates.refresh_masters(self.view.engine)
        for part in self.parts:
            for name in map(self.names.name, part.parameters):
                self.report.add(name, "master", "cast", "from the weight that custom_load_fn set")

    def _require_all(self) -> None:
        """Check that the report has an entry for every tensor of the checkpoint and of this job."""
        back = {stored: name for name, stored in self._stored.items()}
        stored = [
            (back.get(info.name, info.name), info.state if info.kind == "optimizer" else "weight")
            for info in self.checkpoint.index.tensors
            if info.kind != "object"
        ]
        self.report.require(stored, what="the checkpoint's tensors")
        own = [*self.names.parameters, *(buffer.name for buffer in self.names.buffers)]
        self.report.require([(name, "weight") for name in own], what="this job's tensors")
