"""A checkpoint into a DeepSpeed engine, whatever wrote it.

Three steps, so that all ranks can agree between them: ``plan`` matches names and checks shapes;
``read`` fills masters, optimizer states, frozen parameters and buffers; ``finish`` derives the
weights, sets hyperparameters and non-tensor state, and completes the report.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ds_unickpt import internals, partitions
from ds_unickpt.capture import SCALARS, topology
from ds_unickpt.config import Options
from ds_unickpt.names import Names, buffers, plain, spelled_plainly
from ds_unickpt.partitions import Held, Partition
from ds_unickpt.reads import Reads
from ds_unickpt.restore_objects import RestoredObjects
from ds_unickpt.restore_optimizer import RestoredOptimizer, some
from ds_unickpt.wanted import Wanted
from unickpt.dtypes import name_of, torch_dtype
from unickpt.errors import MismatchError
from unickpt.fragments import Box, split_flat_range
from unickpt.index import TensorInfo
from unickpt.loading import Checkpoint, Planned
from unickpt.neighbours import Neighbours
from unickpt.reading import Request
from unickpt.report import LoadReport
from unickpt.topology import describe
from unickpt.translated import translated_from

logger = logging.getLogger("unickpt")


@dataclass(frozen=True, slots=True)
class _Override:
    """Stored weights that are not the cast of their masters: put over the cast once that is made.

    Attributes:
        parameter: whose weights they are.
        at, box: flat range ``[at, at + box.numel)`` of what this rank holds of it, as a box of the whole parameter.
        common: the part of that box that is put over.
        data: its elements.
    """

    parameter: torch.nn.Parameter
    at: int
    box: Box
    common: Box
    data: torch.Tensor

    def apply(self) -> None:
        held = partitions.held(self.parameter)
        assert held is not None  # or there was nothing to ask for
        box = self.box
        live = held.data.narrow(0, self.at, box.numel).view(box.shape) if held.live else self.parameter.detach()[box.slices()]
        live[self.common.within(box).slices()].copy_(self.data.view(self.common.shape))


class Restore:
    """One load into one engine. ``report`` is complete after ``finish``."""

    def __init__(self, engine: Any, checkpoint: Checkpoint, options: Options, wanted: Wanted) -> None:
        self.engine, self.checkpoint, self.options, self.wanted = engine, checkpoint, options, wanted
        self.names = Names.read(engine.module)
        self.parts = partitions.partitions(engine)
        self.base = internals.base_optimizer(engine)
        source = checkpoint.manifest.writer
        self.report = LoadReport(
            source=f"{checkpoint.storage} (step {checkpoint.manifest.step}, {source.framework} "
            f"{source.framework_version}, {describe(source.topology)}{translated_from(checkpoint)})",
            target=describe(topology(engine)),
        )
        self.report.notes = list(checkpoint.manifest.notes)
        self._excluded = frozenset(map(plain, checkpoint.manifest.excluded))
        self._volatile = frozenset(map(plain, internals.non_persistent_names(engine.module)))
        self._stored = self._match()
        self._reads = Reads(checkpoint, self._stored)
        self._overrides: list[_Override] = []
        self._optimizer = RestoredOptimizer(engine, self.parts, self.names, self._reads, self.report)
        self._objects = RestoredObjects(engine, checkpoint, options, wanted, self.report)

    # ---------------------------------------------------------------- names and shapes

    def _match(self) -> dict[str, str]:
        """This job's parameter and buffer names -> names in the checkpoint.

        Raises:
            MismatchError: missing, extra or differently shaped tensors, all of them listed.
        """
        manifest = self.checkpoint.manifest
        aliases = {plain(alias): name for alias, name in manifest.aliases.items()} | manifest.aliases
        own_aliases: dict[str, list[str]] = {}
        for alias, name in self.names.aliases.items():
            own_aliases.setdefault(name, []).append(alias)
        known = {info.name: info for info in self.checkpoint.index.tensors if info.kind in ("parameter", "buffer")}
        spelled = {name: stored for stored, name in spelled_plainly(known).items()}
        optimized = {id(p) for part in self.parts for p in part.parameters}
        matched: dict[str, str] = {}
        missing: list[str] = []
        shapes: list[str] = []
        for name, shape, parameter in self._own_tensors():
            candidates = [name, *own_aliases.get(name, [])]
            targets = [spelled.get(aliases.get(c, c), aliases.get(c, c)) for c in candidates]
            source = next((target for target in targets if target in known), None)
            if source is None:
                self._absent(name, parameter is not None and id(parameter) in optimized, missing)
            elif known[source].shape != shape:
                shapes.append(f"{name}: {known[source].shape} in the checkpoint, {shape} in this job")
            else:
                matched[name] = source
        extra = self._extra(known, matched)
        self._complain(missing, extra, shapes)
        return matched

    def _own_tensors(self) -> Iterable[tuple[str, tuple[int, ...], torch.nn.Parameter | None]]:
        for name, parameter in self.names.parameters.items():
            yield name, internals.shape_of(parameter), parameter
        for name, buffer, persistent in buffers(self.engine.module):
            if persistent or self._restores_buffer(name, buffer):
                yield name, tuple(buffer.shape), None
            else:
                self.report.add(name, "weight", "recreated", "non-persistent buffers, which the model makes itself")

    def _restores_buffer(self, name: str, buffer: torch.Tensor) -> bool:
        info = self.checkpoint.info(name, "weight")
        wanted = self.options.non_persistent_buffers and info is not None
        return wanted and info is not None and info.shape == tuple(buffer.shape)

    def _absent(self, name: str, optimized: bool, missing: list[str]) -> None:
        if name in self._excluded and not optimized and not self.wanted.strict:
            reason = "excluded when it was saved (exclude_frozen_parameters): keeps its initial value"
            self.report.add(name, "weight", "left out", reason)
        elif self.wanted.strict or (optimized and self.wanted.optimizer):
            # Also where names may differ (Trainer says so for every PEFT model): a trained parameter that keeps a
            # random value, with moments that it never had, is not a resume.
            missing.append(name)
        else:
            self.report.add(name, "weight", "left out", "not in the checkpoint; keeps its initial value")

    def _extra(self, known: Mapping[str, TensorInfo], matched: Mapping[str, str]) -> list[str]:
        used = set(matched.values())
        accounted = {entry.name for entry in self.report.entries}
        extra = list(self.checkpoint.untranslated) if self.wanted.strict else []
        for name in self.checkpoint.untranslated if not self.wanted.strict else ():
            self.report.add(name, "weight", "left out", "this job has no counterpart of it")
        for name in known:
            if name in used or name in accounted:
                continue
            if plain(name) in self.names.aliases:
                self.report.add(name, "weight", "left out", f"tied to {self.names.aliases[plain(name)]} in this job")
            elif self._is_volatile(name):
                self.report.add(name, "weight", "recreated", "non-persistent buffers, which the model makes itself")
            elif self.wanted.strict:
                extra.append(name)
            else:
                self.report.add(name, "weight", "left out", "this job has no such parameter or buffer")
        return extra

    def _is_volatile(self, name: str) -> bool:
        return plain(name) in self._volatile

    def _complain(self, missing: list[str], extra: list[str], shapes: list[str]) -> None:
        lines = []
        if missing:
            lines.append(f"in this job but not in the checkpoint ({len(missing)}): {some(missing)}")
        if extra:
            lines.append(f"in the checkpoint but not in this job ({len(extra)}): {some(extra)}")
        if shapes:
            lines.append(f"of another shape ({len(shapes)}): {some(shapes, '; ')}")
        if lines:
            hint = ""
            excluded = self._excluded.intersection(missing)
            if excluded:
                hint = f" {len(excluded)} of these were left out by exclude_frozen_parameters=True."
            if missing or extra:
                hint += " load_module_strict=False lets names differ, except of trained parameters"
                hint += " (with load_optimizer_states=False, of those, too)."
            raise MismatchError(
                f"{self.checkpoint.storage} does not fit this model: " + "; ".join(lines) + f".{hint} Nothing is loaded."
            )

    # ---------------------------------------------------------------- tensors

    def plan(self) -> Planned:
        """Match, check, and ask for everything that is to be read from storage. No collective, no effect on other ranks."""
        if self.wanted.optimizer:
            self._optimizer.check()
        if self.wanted.custom_load_fn is None:
            for part in self.parts:
                self._request_masters(part)
            self._request_others()
        if self.wanted.optimizer:
            self._optimizer.request()
        self._optimizer.account_others(wanted=self.wanted.optimizer)
        return self.checkpoint.plan(self._reads.requests)

    def read(self, planned: Planned, neighbours: Neighbours | None) -> None:
        """Fill all of that; what neighbours on this host want, too, is read once for all of them."""
        stats = self.checkpoint.fill(planned, verify=self.options.verify, neighbours=neighbours)
        self.report.bytes_read, self.report.bytes_needed = stats.bytes_read, stats.bytes_needed
        self.report.read_seconds = stats.seconds
        self._reads.finish()
        self._objects.read()

    def _request_masters(self, part: Partition) -> None:
        flat = self._reads.flat(part.master)
        dtype = name_of(part.master.dtype)
        for parameter in part.parameters:
            name = self.names.name(parameter)
            source = self._reads.source(name, "master") or self._reads.source(name, "weight")
            if source is not None:
                self._account_trained(name, parameter, source[1], dtype)
        for piece in part.pieces:
            name = self.names.name(piece.parameter)
            source = self._reads.source(name, "master") or self._reads.source(name, "weight")
            if source is not None:
                self._reads.fill(source[0], piece.lo, piece.hi, flat.narrow(0, piece.at, piece.hi - piece.lo))

    def _account_trained(self, name: str, parameter: torch.nn.Parameter, info: TensorInfo, master: str) -> None:
        if info.state == "master" and info.dtype == master:
            self.report.add(name, "master", "restored")
        else:
            self.report.add(name, "master", "cast", f"{info.dtype} {info.state} to {master} master")
        weight = self.checkpoint.info(self._stored[name], "weight")
        dtype = name_of(parameter.dtype)
        if weight is not None and weight.dtype == dtype:
            self.report.add(name, "weight", "restored")
            if weight.derived_from is not None and self._has_fragments(weight):
                self._request_override(weight, parameter)
        else:
            found = "master" if weight is None else f"{weight.dtype} weight"
            self.report.add(name, "weight", "cast", f"{found} to {dtype} weight")

    def _has_fragments(self, info: TensorInfo) -> bool:
        return bool(self.checkpoint.override_boxes(self.checkpoint.ids[info.key]))

    def _request_override(self, info: TensorInfo, parameter: torch.nn.Parameter) -> None:
        held = partitions.held(parameter)
        if held is None:
            return
        position = self.checkpoint.ids[info.key]
        overrides = self.checkpoint.override_boxes(position)
        at = 0
        for box in split_flat_range(info.shape, held.lo, held.hi):
            for override in overrides:
                common = box.intersect(override)
                if common is not None:
                    data = torch.empty(common.numel, dtype=torch_dtype(info.dtype))
                    self._reads.requests.append(Request(position, common, data))
                    self._overrides.append(_Override(parameter, at, box, common, data))
            at += box.numel

    def _request_others(self) -> None:
        """Frozen and other parameters outside the optimizer, and buffers."""
        optimized = {id(p) for part in self.parts for p in part.parameters}
        for name, parameter in self.names.parameters.items():
            if id(parameter) not in optimized and name in self._stored:
                held = partitions.held(parameter)
                self._request_plain(name, name_of(parameter.dtype), held)
                if held is not None and not held.live:
                    self._reads.copy_later(parameter, held.data)
        for name, buffer, _ in buffers(self.engine.module):
            if name in self._stored:
                flat = self._reads.flat(buffer)
                self._request_plain(name, name_of(buffer.dtype), Held(0, flat.numel(), flat, live=True, replicated=True))

    def _request_plain(self, name: str, dtype: str, held: Held | None) -> None:
        source = self._reads.source(name, "weight") or self._reads.source(name, "master")
        if source is None:
            raise MismatchError(f"{name}: the checkpoint has neither weight nor master of it")
        position, info = source
        if info.dtype == dtype:
            self.report.add(name, "weight", "restored")
        else:
            self.report.add(name, "weight", "cast", f"{info.dtype} {info.state} to {dtype} weight")
        if held is not None:
            self._reads.fill(position, held.lo, held.hi, held.data)

    # ---------------------------------------------------------------- after all ranks have read

    def finish(self) -> dict[str, Any]:
        """Weights from masters, hyperparameters, non-tensor state; returns the client state.

        Collective where DeepSpeed's own refresh of the weights is (ZeRO-1/2 gather them).
        """
        offload_again = partitions.reload_states(self.engine)
        if self.wanted.custom_load_fn is not None:
            self._custom_load(self.wanted.custom_load_fn)
        else:
            partitions.refresh_weights(self.engine)
            for override in self._overrides:
                override.apply()
        if self.wanted.optimizer:
            self._optimizer.apply(self._objects.of_this_rank(SCALARS))
        partitions.after_restore(self.engine)
        offload_again()
        client_state = self._objects.apply()
        self._require_all()
        return client_state

    def _custom_load(self, load: Callable[..., Any]) -> None:
        """The caller's own function, with a full state dict under this job's names."""
        from deepspeed import zero

        source = {}
        for name, stored in self._stored.items():
            state = "weight" if (stored, "weight") in self.checkpoint.ids else "master"
            source[name] = self.checkpoint.read_tensor(stored, state)
            self.report.add(name, "weight", "restored", "given to custom_load_fn")
        source |= {alias: source[name] for alias, name in self.names.aliases.items() if name in source}
        source = {self.names.own.get(name, name): tensor for name, tensor in source.items()}
        partitioned = [p for p in self.names.parameters.values() if internals.is_zero3(p)]
        with contextlib.ExitStack() as gathered:
            for parameter in partitioned:  # one by one: of several, DeepSpeed waits for the last only, and gloo is not in order
                gathered.enter_context(zero.GatheredParameters([parameter], modifier_rank=0))
            load(src=source, dst=self.engine.module)
        partitions.refresh_masters(self.engine)
        for part in self.parts:
            for name in map(self.names.name, part.parameters):
                self.report.add(name, "master", "cast", "from the weight that custom_load_fn set")

    def _require_all(self) -> None:
        """Nothing of the checkpoint and nothing of this job is without an entry."""
        back = {stored: name for name, stored in self._stored.items()}
        stored = [
            (back.get(info.name, info.name), info.state)
            for info in self.checkpoint.index.tensors
            if info.kind != "object" and info.state not in ("weight", "master")
        ]
        weights = [
            (back.get(i.name, i.name), "weight") for i in self.checkpoint.index.tensors if i.kind in ("parameter", "buffer")
        ]
        self.report.require(stored + weights, what="the checkpoint's tensors")
        own = [(name, "weight") for name, _, _ in self._own_names()]
        self.report.require(own, what="this job's tensors")

    def _own_names(self) -> Iterable[tuple[str, None, None]]:
        for name in self.names.parameters:
            yield name, None, None
        for name, _, _ in buffers(self.engine.module):
            yield name, None, None
