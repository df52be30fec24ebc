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

from ds_unickpt import capture, internals
from ds_unickpt.capture import NOT_HYPERPARAMETERS, Names
from ds_unickpt.config import Options
from ds_unickpt.internals import Held, Partition
from ds_unickpt.restore_objects import RestoredObjects
from ds_unickpt.wanted import Wanted
from unickpt import objects
from unickpt.dtypes import name_of, torch_dtype
from unickpt.errors import MismatchError
from unickpt.fragments import split_flat_range
from unickpt.index import TensorInfo
from unickpt.loading import Checkpoint, Planned
from unickpt.neighbours import Neighbours
from unickpt.reading import Request
from unickpt.report import LoadReport
from unickpt.topology import describe
from unickpt.translated import translated_from

logger = logging.getLogger("unickpt")

_FAMILIES = {"adamw": "adam"}
_DECORATIONS = ("deepspeedcpu", "fused", "zenflow", "cpu")


def family_of(name: str) -> str:
    """Optimizers of one family have the same states: Adam, AdamW, FusedAdam, DeepSpeedCPUAdam, ..."""
    plain = name.lower()
    for decoration in _DECORATIONS:
        plain = plain.removeprefix(decoration)
    return _FAMILIES.get(plain, plain)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A temporary that has to be copied into a tensor which cannot be filled in place."""

    target: torch.Tensor
    flat: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Override:
    """Stored weights that are not the cast of their masters: put over the cast once that is made."""

    region: torch.Tensor  # live view
    data: torch.Tensor


class Restore:
    """One load into one engine. ``report`` is complete after ``finish``."""

    def __init__(self, engine: Any, checkpoint: Checkpoint, options: Options, wanted: Wanted) -> None:
        self.engine, self.checkpoint, self.options, self.wanted = engine, checkpoint, options, wanted
        self.names = Names.read(engine.module)
        self.parts = internals.partitions(engine)
        self.base = internals.base_optimizer(engine)
        source = checkpoint.manifest.writer
        self.report = LoadReport(
            source=f"{checkpoint.storage} (step {checkpoint.manifest.step}, {source.framework} "
            f"{source.framework_version}, {describe(source.topology)}{translated_from(checkpoint)})",
            target=describe(capture.topology(engine)),
        )
        self._stored = self._match()
        self._requests: list[Request] = []
        self._overrides: list[_Override] = []
        self._copies: list[_Copy] = []
        self._objects = RestoredObjects(engine, checkpoint, options, wanted, self.report)

    # ---------------------------------------------------------------- names and shapes

    def _match(self) -> dict[str, str]:
        """This job's parameter and buffer names -> names in the checkpoint.

        Raises:
            MismatchError: missing, extra or differently shaped tensors, all of them listed.
        """
        manifest = self.checkpoint.manifest
        aliases = {**manifest.aliases}
        own_aliases: dict[str, list[str]] = {}
        for alias, name in self.names.aliases.items():
            own_aliases.setdefault(name, []).append(alias)
        known = {info.name: info for info in self.checkpoint.index.tensors if info.kind in ("parameter", "buffer")}
        optimized = {id(p) for part in self.parts for p in part.parameters}
        matched: dict[str, str] = {}
        missing: list[str] = []
        shapes: list[str] = []
        for name, shape, parameter in self._own_tensors():
            candidates = [name, *own_aliases.get(name, [])]
            source = next((aliases.get(c, c) for c in candidates if aliases.get(c, c) in known), None)
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
        for name, buffer, persistent in capture.buffers(self.engine.module):
            if persistent or self._restores_buffer(name, buffer):
                yield name, tuple(buffer.shape), None
            else:
                self.report.add(name, "weight", "left out", "non-persistent buffer: the model makes it anew")

    def _restores_buffer(self, name: str, buffer: torch.Tensor) -> bool:
        info = self.checkpoint.info(name, "weight")
        wanted = self.options.non_persistent_buffers and info is not None
        return wanted and info is not None and info.shape == tuple(buffer.shape)

    def _absent(self, name: str, optimized: bool, missing: list[str]) -> None:
        if name in self.checkpoint.manifest.excluded and not optimized:
            self.report.add(name, "weight", "left out", "excluded when it was saved (exclude_frozen_parameters)")
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
            if name in self.names.aliases:
                self.report.add(name, "weight", "left out", f"tied to {self.names.aliases[name]} in this job")
            elif self.wanted.strict and not self._is_volatile(name):
                extra.append(name)
            else:
                self.report.add(name, "weight", "left out", "this job has no such parameter or buffer")
        return extra

    def _is_volatile(self, name: str) -> bool:
        return name in internals.non_persistent_names(self.engine.module)

    def _complain(self, missing: list[str], extra: list[str], shapes: list[str]) -> None:
        lines = []
        if missing:
            lines.append(f"in this job but not in the checkpoint ({len(missing)}): {_some(missing)}")
        if extra:
            lines.append(f"in the checkpoint but not in this job ({len(extra)}): {_some(extra)}")
        if shapes:
            lines.append(f"of another shape ({len(shapes)}): {_some(shapes, '; ')}")
        if lines:
            hint = ""
            if missing or extra:
                hint = " load_module_strict=False lets names differ, except of trained parameters"
                hint += " (with load_optimizer_states=False, of those, too)."
            raise MismatchError(
                f"{self.checkpoint.storage} does not fit this model: " + "; ".join(lines) + f".{hint} Nothing is loaded."
            )

    # ---------------------------------------------------------------- tensors

    def plan(self) -> Planned:
        """Match, check, and ask for everything that is to be read from storage. No collective, no effect on other ranks."""
        if self.wanted.optimizer:
            self._check_optimizer()
        if self.wanted.custom_load_fn is None:
            for part in self.parts:
                self._request_masters(part)
            self._request_others()
        if self.wanted.optimizer and self.base is not None:
            kinds = self._state_kinds()
            for part in self.parts:
                self._request_states(part, kinds)
        self._account_states()
        return self.checkpoint.plan(self._requests)

    def read(self, planned: Planned, neighbours: Neighbours | None) -> None:
        """Fill all of that; what neighbours on this host want, too, is read once for all of them."""
        stats = self.checkpoint.fill(planned, verify=self.options.verify, neighbours=neighbours)
        self.report.bytes_read, self.report.bytes_needed = stats.bytes_read, stats.bytes_needed
        self.report.read_seconds = stats.seconds
        for copy in self._copies:
            copy.target.detach().copy_(copy.flat.view(copy.target.shape))
        self._objects.read()

    def _source(self, name: str, state: str) -> tuple[int, TensorInfo] | None:
        """A stored (not derived) tensor of one of this job's names."""
        position = self.checkpoint.ids.get((self._stored.get(name, ""), state))
        if position is None or self.checkpoint.index.tensors[position].derived_from is not None:
            return None
        return position, self.checkpoint.index.tensors[position]

    def _flat(self, tensor: torch.Tensor, copies: list[_Copy]) -> torch.Tensor:
        """A 1-D tensor through which ``tensor`` is filled in row-major order."""
        data = tensor.detach()
        if data.is_contiguous():
            return data.view(-1)
        flat = data.reshape(-1).clone()
        copies.append(_Copy(tensor, flat))
        return flat

    def _fill(self, position: int, lo: int, hi: int, flat: torch.Tensor, requests: list[Request]) -> None:
        """Ask for the flat range ``[lo, hi)`` of a stored tensor, into ``hi - lo`` elements."""
        at = 0
        for box in split_flat_range(self.checkpoint.index.tensors[position].shape, lo, hi):
            requests.append(Request(position, box, flat.narrow(0, at, box.numel)))
            at += box.numel

    def _request_masters(self, part: Partition) -> None:
        flat = self._flat(part.master, self._copies)
        dtype = name_of(part.master.dtype)
        for parameter in part.parameters:
            name = self.names.name(parameter)
            source = self._source(name, "master") or self._source(name, "weight")
            if source is not None:
                self._account_trained(name, parameter, source[1], dtype)
        for piece in part.pieces:
            name = self.names.name(piece.parameter)
            source = self._source(name, "master") or self._source(name, "weight")
            if source is not None:
                self._fill(source[0], piece.lo, piece.hi, flat.narrow(0, piece.at, piece.hi - piece.lo), self._requests)

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
        held = internals.held(parameter)
        if held is None:
            return
        position = self.checkpoint.ids[info.key]
        overrides = self.checkpoint.override_boxes(position)
        at = 0
        for box in split_flat_range(info.shape, held.lo, held.hi):
            live = held.data.narrow(0, at, box.numel).view(box.shape) if held.live else parameter.detach()[box.slices()]
            at += box.numel
            for override in overrides:
                common = box.intersect(override)
                if common is not None:
                    data = torch.empty(common.numel, dtype=torch_dtype(info.dtype))
                    self._requests.append(Request(position, common, data))
                    self._overrides.append(_Override(live[common.within(box).slices()], data.view(common.shape)))

    def _request_others(self) -> None:
        """Frozen and other parameters outside the optimizer, and buffers."""
        optimized = {id(p) for part in self.parts for p in part.parameters}
        for name, parameter in self.names.parameters.items():
            if id(parameter) not in optimized and name in self._stored:
                held = internals.held(parameter)
                self._request_plain(name, name_of(parameter.dtype), held)
                if held is not None and not held.live:
                    self._copies.append(_Copy(parameter, held.data))
        for name, buffer, _ in capture.buffers(self.engine.module):
            if name in self._stored:
                flat = self._flat(buffer, self._copies)
                self._request_plain(name, name_of(buffer.dtype), Held(0, flat.numel(), flat, live=True, replicated=True))

    def _request_plain(self, name: str, dtype: str, held: Held | None) -> None:
        source = self._source(name, "weight") or self._source(name, "master")
        if source is None:
            raise MismatchError(f"{name}: the checkpoint has neither weight nor master of it")
        position, info = source
        if info.dtype == dtype:
            self.report.add(name, "weight", "restored")
        else:
            self.report.add(name, "weight", "cast", f"{info.dtype} {info.state} to {dtype} weight")
        if held is not None:
            self._fill(position, held.lo, held.hi, held.data, self._requests)

    # ---------------------------------------------------------------- optimizer

    def _check_optimizer(self) -> None:
        """The checkpoint's optimizer has to be one whose states this job's optimizer has.

        Raises:
            MismatchError: names both, or the parameters that the checkpoint's optimizer did not hold.
        """
        record = self.checkpoint.manifest.optimizer
        if self.base is None:
            return
        own = type(self.base).__name__
        hint = "load_optimizer_states=False loads the weights alone"
        if record is None:
            raise MismatchError(f"{self.checkpoint.storage} holds no optimizer, this job has {own}; {hint}")
        if family_of(record.name) != family_of(own):
            states = sorted({info.state for info in self.checkpoint.index.tensors if info.kind == "optimizer"})
            raise MismatchError(
                f"{self.checkpoint.storage} was trained with {record.name} (states {', '.join(states) or 'none'}), "
                f"this job uses {own}; its states cannot be made from those. {hint}."
            )
        trained = {name for group in record.groups for name in group.parameters}
        untrained = [
            name
            for part in self.parts
            for name, parameter in ((self.names.name(p), p) for p in part.parameters)
            if name in self._stored and self._stored[name] not in trained and internals.numel_of(parameter)
        ]
        if untrained:
            raise MismatchError(
                f"{self.checkpoint.storage}: {len(untrained)} parameters that this job trains were not trained there, so "
                f"there is no optimizer state for them: {_some(untrained)}; {hint}"
            )

    def _state_kinds(self) -> set[str]:
        return {info.state for info in self.checkpoint.index.tensors if info.kind == "optimizer"}

    def _request_states(self, part: Partition, states: set[str]) -> None:
        """Elementwise states of one partition: in place where they exist, otherwise created."""
        assert self.base is not None
        names = [self.names.name(p) for p in part.parameters]
        for state in sorted(states):
            sources = {name: self._source(name, state) for name in names}
            infos = [source[1] for source in sources.values() if source is not None]
            if not infos:
                continue
            tensor = self._state_tensor(part, state, infos[0])
            flat = self._flat(tensor, self._copies)
            for piece in part.pieces:
                view = flat.narrow(0, piece.at, piece.hi - piece.lo)
                source = sources[self.names.name(piece.parameter)]
                if source is None:
                    view.zero_()
                else:
                    self._fill(source[0], piece.lo, piece.hi, view, self._requests)
            for name, source in sources.items():
                self._account_state(name, state, source, name_of(tensor.dtype))
        self._refuse_unknown_states(part, states)

    def _refuse_unknown_states(self, part: Partition, states: set[str]) -> None:
        """A state that this job's optimizer has and the checkpoint lacks would stay at a stale value."""
        assert self.base is not None
        own = capture.classify([part], self.base.state).tensors
        unknown = sorted(key for key in own - states if self.base.state[part.master].get(key) is not None)
        if unknown and states:
            raise MismatchError(
                f"this job's optimizer has state {', '.join(unknown)}, which the checkpoint lacks "
                f"(it has {', '.join(sorted(states))})"
            )

    def _state_tensor(self, part: Partition, state: str, info: TensorInfo) -> torch.Tensor:
        assert self.base is not None
        held = self.base.state[part.master]
        tensor = held.get(state)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != part.master.shape:
            master = self._source(self.names.name(part.parameters[0]), "master")
            same = master is not None and master[1].dtype == name_of(part.master.dtype)
            dtype = torch_dtype(info.dtype) if same else part.master.dtype
            tensor = torch.zeros_like(part.master, dtype=dtype, requires_grad=False)
            held[state] = tensor
        return tensor

    def _account_state(self, name: str, state: str, source: tuple[int, TensorInfo] | None, dtype: str) -> None:
        if source is None:
            if name in self._stored:
                self.report.add(name, state, "re-seeded", "it had no state yet where it was saved: zeros")
        elif source[1].dtype == dtype:
            self.report.add(name, state, "restored")
        else:
            self.report.add(name, state, "cast", f"{source[1].dtype} to {dtype}")

    def _account_states(self) -> None:
        """Optimizer states of the checkpoint that nothing here takes."""
        back = {stored: name for name, stored in self._stored.items()}
        known = {(entry.name, entry.state) for entry in self.report.entries}
        if not self.wanted.optimizer:
            reason = "not asked for (load_optimizer_states or load_module_only)"
        elif self.base is None:
            reason = "this job has no optimizer"
        else:
            reason = "this job does not train it"
        for info in self.checkpoint.index.tensors:
            if info.kind == "optimizer" and (back.get(info.name, info.name), info.state) not in known:
                self.report.add(back.get(info.name, info.name), info.state, "left out", reason)

    # ---------------------------------------------------------------- after all ranks have read

    def finish(self) -> dict[str, Any]:
        """Weights from masters, hyperparameters, non-tensor state; returns the client state.

        Collective where DeepSpeed's own refresh of the weights is (ZeRO-1/2 gather them).
        """
        if self.wanted.custom_load_fn is not None:
            self._custom_load(self.wanted.custom_load_fn)
        else:
            internals.refresh_weights(self.engine)
            for override in self._overrides:
                override.region.copy_(override.data)
        if self.wanted.optimizer and self.base is not None:
            self._set_hyperparameters()
        internals.after_restore(self.engine)
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
        partitioned = [p for p in self.names.parameters.values() if internals.is_zero3(p)]
        with contextlib.ExitStack() as gathered:
            for parameter in partitioned:  # one by one: of several, DeepSpeed waits for the last only, and gloo is not in order
                gathered.enter_context(zero.GatheredParameters([parameter], modifier_rank=0))
            load(src=source, dst=self.engine.module)
        internals.refresh_masters(self.engine)
        for part in self.parts:
            for name in map(self.names.name, part.parameters):
                self.report.add(name, "master", "cast", "from the weight that custom_load_fn set")

    def _set_hyperparameters(self) -> None:
        assert self.base is not None
        record = self.checkpoint.manifest.optimizer
        assert record is not None
        where = self.checkpoint.storage.where()
        of = {name: at for at, group in enumerate(record.groups) for name in group.parameters}
        values = [objects.decode(g.hyperparameters, tensors={}, where=where).value for g in record.groups]
        members: dict[int, tuple[Any, list[str]]] = {}
        for part in self.parts:
            listed = [self._stored[n] for n in map(self.names.name, part.parameters) if n in self._stored]
            members.setdefault(id(part.group), (part.group, []))[1].extend(listed)
        for number, (group, listed) in enumerate(members.values()):
            sources = [values[at] for at in sorted({of[name] for name in listed if name in of})]
            self._set_group(number, group, sources)
        scalars = [
            (set(g.parameters), objects.decode(g.hyperparameters, tensors={}, where=where).value) for g in record.scalars
        ]
        for part in self.parts:
            self._set_scalars(part, scalars)

    def _set_group(self, number: int, group: Any, sources: list[dict[str, Any]]) -> None:
        label = f"param_groups[{number}]"
        for key in dict.fromkeys(key for source in sources for key in source):
            if key in NOT_HYPERPARAMETERS:
                continue
            found = [source[key] for source in sources if key in source]
            if any(value != found[0] for value in found):
                text = f"{key} differs between the groups that became one ({_some(map(str, found))}); keeps {group.get(key)}"
                self.report.add(f"{label}.{key}", "hyperparameter", "left out", text)
            elif key not in group and key != "initial_lr":
                self.report.add(f"{label}.{key}", "hyperparameter", "left out", "this job's optimizer has no such setting")
            else:
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(found[0])
                else:
                    group[key] = found[0]
                self.report.add(f"{label}.{key}", "hyperparameter", "restored")

    def _set_scalars(self, part: Partition, scalars: list[tuple[set[str], dict[str, Any]]]) -> None:
        assert self.base is not None
        listed = {self._stored[n] for n in map(self.names.name, part.parameters) if n in self._stored}
        label = self.names.name(part.parameters[0]) + (
            f" and {len(part.parameters) - 1} more" if len(part.parameters) > 1 else ""
        )
        found: dict[str, list[Any]] = {}
        for names, values in scalars:
            if names & listed:
                for key, value in values.items():
                    found.setdefault(key, []).append(value)
        for key, candidates in found.items():
            value = max(candidates)
            held = self.base.state[part.master]
            in_group = key == "step" and "step" in part.group
            if in_group:
                part.group["step"] = value
            if not in_group or "step" in held:
                held[key] = self._like(held.get(key), value, part)
            if len(set(candidates)) > 1:
                text = f"parameters that lie in one partition here had {sorted(set(candidates))}; the largest is used"
                self.report.add(label, key, "cast", text)
            else:
                self.report.add(label, key, "restored")

    def _like(self, existing: Any, value: Any, part: Partition) -> Any:
        """A scalar state in the form that this optimizer keeps it in."""
        if isinstance(existing, torch.Tensor):
            return torch.full_like(existing, value)
        if existing is not None or not type(self.base).__module__.startswith("torch.optim"):
            return int(value) if float(value).is_integer() and not isinstance(existing, float) else value
        on_device = part.group.get("capturable") or part.group.get("fused")
        return torch.tensor(float(value), dtype=torch.float32, device=part.master.device if on_device else "cpu")

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
        for name, _, _ in capture.buffers(self.engine.module):
            yield name, None, None


def _some(items: Iterable[str], separator: str = ", ", most: int = 10) -> str:
    listed = list(items)
    return separator.join(listed[:most]) + (f"{separator}and {len(listed) - most} more" if len(listed) > most else "")
