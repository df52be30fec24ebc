"""What DeepSpeed's own compressed communication has not sent: of its 1-bit optimizers, and of LoCo-ZeRO++.

DeepSpeed drops these states at a load, and the first step of a new 1-bit optimizer compresses the momentum instead of a step on
the weights. Here each rank stores its own among the shared objects of a checkpoint, and the optimizer goes on as it was. On
another number of ranks each rank gets the mean of what the ranks had not sent, and its slice of what they had not sent back.

A ``ZeroOneAdam`` with local steps has other masters and momenta on each rank between two exchanges. They are stored as well. On
another number of ranks each rank gets their mean.

Sources: ``runtime/fp16/onebit/{adam,zoadam,lamb}.py``, ``runtime/comm/compressed.py`` and
``runtime/comm/coalesced_collectives.py`` of DeepSpeed 0.18.6. DeepSpeed 0.19.8 has neither.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ds_unickpt.framework import internals, partition_updates
from ds_unickpt.framework.partitions import Partition
from ds_unickpt.held_state.engine_view import EngineView
from ds_unickpt.held_state.names import ModuleNames, Naming
from ds_unickpt.held_state.optimizer_record import place_of
from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.checksums import digest
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.report import LoadReport
from unickpt.checkpoint.state.first_step import STEP
from unickpt.training.compression.carried import OF_OPTIMIZERS as STORED
from unickpt.training.compression.carried import NamedTensors, Residuals, resized

_SENT, _RETURNED, _PADDING, _ACCUMULATED = "worker_error", "server_error", "padding", "momentum_accumulator"
_LOCAL = (_ACCUMULATED, "exp_avg")
_LOCO = ("intra_ef_buf", "inter_ef_buf")  # each a list: int8 codes, scales


def sizes_of(elements: int, world: int) -> tuple[int, int]:
    """Return the number of elements with padding, and of the slice of one rank, as the 1-bit optimizers compute them."""
    unit = world * (world * 8 // math.gcd(world, 8))
    whole = math.ceil(elements / unit) * unit
    return whole, whole // world


def slice_of(elements: int, rank: int, world: int) -> tuple[int, int]:
    """Return the range of a flat tensor whose sum a rank computes and sends back. It may be empty."""
    size = sizes_of(elements, world)[1]
    return min(rank * size, elements), min((rank + 1) * size, elements)


class _OneBit:
    """A 1-bit optimizer and its tensors.

    Attributes:
        base: the optimizer.
        parts: its partitions, which every rank has whole.
        keys: key of each partition: a digest of its parameter ranges.
    """

    def __init__(self, base: Any, parts: Sequence[Partition], name: Naming) -> None:
        """``name`` gives the name of a parameter in the checkpoint."""
        self.base, self.parts = base, parts
        places = [place_of(part, name) for part in parts]
        self.keys = [digest(json.dumps(place).encode()) for place in places]
        self._all = digest(json.dumps(places).encode())
        self.numbered = hasattr(base, "worker_errors")

    def state(self, part: Partition) -> dict[str, Any]:
        """Return the live state of a partition."""
        found: dict[str, Any] = self.base.state.get(part.master, {})
        return found

    def elements(self) -> dict[str, int]:
        """Return the number of elements of each tensor that is compressed, by key."""
        found = {key: part.master.numel() for key, part in zip(self.keys, self.parts, strict=True)}
        return {self._all: sum(found.values())} if self.numbered else found

    @property
    def local(self) -> bool:
        """Whether the ranks step by themselves between two exchanges (``ZeroOneAdam``)."""
        return bool(getattr(self.base, "freeze_key", False))

    def captured(self) -> tuple[NamedTensors, NamedTensors]:
        """Return what this rank did not send, and what it did not send back. The tensors are live, 1-D."""
        sent: NamedTensors = {}
        returned: NamedTensors = {}
        if self.numbered and self.base.worker_errors:
            sent[f"{_SENT}:{self._all}"] = self.base.worker_errors[0]
            returned[f"{_RETURNED}:{self._all}"] = self.base.server_errors[0]
            sent[f"{_PADDING}:{self._all}"] = self.base.exp_avg_flat[0][self.elements()[self._all] :]
        for key, part in zip(self.keys, self.parts, strict=True):
            state = self.state(part)
            if _SENT in state:
                sent[f"{_SENT}:{key}"], returned[f"{_RETURNED}:{key}"] = state[_SENT], state[_RETURNED]
            if self.local:
                local = {**{each: state[each] for each in _LOCAL if each in state}, "master": part.master}
                sent |= {f"{each}:{key}": tensor.detach().reshape(-1) for each, tensor in local.items()}
        return sent, returned

    def restore(self, found: Residuals) -> None:
        """Set what ``captured`` returned, and continue in the stage of the steps that were made. Missing errors are zero."""
        world = int(self.base.size)
        steps = [int(self.state(part).get(STEP, 0)) for part in self.parts]
        if not steps or not max(steps):
            self._begin_anew()
            return
        if self.numbered:
            self._restore_numbered(found)
        for key, part in zip(self.keys, self.parts, strict=True):
            state, elements = self.state(part), part.master.numel()
            if self.numbered or not state:
                continue
            whole, chunk = sizes_of(elements, world)
            state |= {"tensor_size": elements, "corrected_tensor_size": whole, "server_chunk_size": chunk}
            for each, held, size in ((_SENT, found.sent, whole), (_RETURNED, found.returned, chunk)):
                state[each] = held.get(f"{each}:{key}", torch.zeros(size)).to(part.master.device).clone()
            if hasattr(self.base, "var_freeze_step"):
                state[_ACCUMULATED] = torch.zeros_like(part.master.detach())
                for name, target in {**{each: state[each] for each in _LOCAL}, "master": part.master}.items():
                    if f"{name}:{key}" in found.sent:
                        target.detach().view(-1).copy_(found.sent[f"{name}:{key}"])
        self._set_stage(steps[0])

    def _restore_numbered(self, found: Residuals) -> None:
        base, device, key = self.base, self.parts[0].master.device, self._all
        whole, chunk = sizes_of(self.elements()[key], int(base.size))
        base.worker_errors[:] = [found.sent.get(f"{_SENT}:{key}", torch.zeros(whole)).to(device).clone()]
        base.server_errors[:] = [found.returned.get(f"{_RETURNED}:{key}", torch.zeros(chunk)).to(device).clone()]
        base.corrected_tensor_sizes[:], base.server_chunk_sizes[:] = [whole], [chunk]
        momenta = [self.state(part)["exp_avg"] for part in self.parts]
        padding = found.sent.get(f"{_PADDING}:{key}", torch.zeros(0)).to(device)
        padding = torch.nn.functional.pad(padding, (0, whole - self.elements()[key] - len(padding)))
        base.dummy_exp_avg.clear()
        if len(padding):
            base.dummy_exp_avg[0] = padding.clone()
        flat = torch.cat([each.detach().reshape(-1) for each in momenta] + [padding])
        base.exp_avg_flat[:] = [flat]  # the momenta are views of it, as after the optimizer's first step
        at = 0
        for each in momenta:
            each.data = flat[at : at + each.numel()].view(each.shape)
            at += each.numel()
        if len(padding):
            base.dummy_exp_avg[0].data = flat[at:]

    def _begin_anew(self) -> None:
        """Forget the stage and the errors of an optimizer whose states the load has removed."""
        base = self.base
        for name in ("worker_errors", "server_errors", "corrected_tensor_sizes", "server_chunk_sizes", "exp_avg_flat"):
            getattr(base, name, []).clear()
        getattr(base, "dummy_exp_avg", {}).clear()
        for name in ("initialize", "adam_freeze_key", "lamb_freeze_key", "freeze_key", "reinitial_error_buffer"):
            if hasattr(base, name):
                setattr(base, name, False)
        setattr(base.deepspeed, self._switch, True)

    @property
    def _switch(self) -> str:
        return "pipeline_enable_backward_allreduce" if self.base.using_pipeline else "enable_backward_allreduce"

    def _set_stage(self, step: int) -> None:
        """Continue with or without compression. The conditions are those at the end of the optimizer's own ``step``."""
        base = self.base
        base.initialize = True
        if hasattr(base, "var_freeze_step"):
            base.freeze_key = base.reinitial_error_buffer = step > base.var_freeze_step
            interval = int(self.state(self.parts[0]).get("var_interval", 1))
            whole_gradients = not base.freeze_key and (step + 1) % interval == 0
        else:
            whole_gradients = step < base.freeze_step
            setattr(base, "lamb_freeze_key" if self.numbered else "adam_freeze_key", not whole_gradients)
        setattr(base.deepspeed, self._switch, whole_gradients)


def _one_bit(view: EngineView, name: Naming) -> _OneBit | None:
    base = view.base
    return None if base is None or not internals.keys_of_rank(base) else _OneBit(base, view.parts, name)


def _of_loco(names: ModuleNames) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, p) for name, p in names.parameters.items() if all(hasattr(p, each) for each in _LOCO))


def captured(view: EngineView) -> dict[str, Any]:
    """Return the shared objects that this rank stores; none if DeepSpeed does not compress by itself."""
    if not internals.uses_loco(view.engine) and (view.base is None or not internals.keys_of_rank(view.base)):
        return {}
    found = _one_bit(view, view.names.name)
    sent, returned = ({}, {}) if found is None else found.captured()
    value = Residuals(view.rank, view.world, sent, returned).to_object()
    elements = {} if found is None else found.elements()
    buffers = {name: [list(getattr(p, each)) for each in _LOCO] for name, p in _of_loco(view.names)}
    return {f"{STORED}{view.rank}": {**value, "elements": elements, "loco": buffers}}


class RestoredOptimizerResiduals:
    """The residuals of one load. ``read`` runs on all ranks before anything is set, ``apply`` after all ranks have read."""

    def __init__(self, view: EngineView, checkpoint: Checkpoint, name: Naming, *, wanted: bool) -> None:
        """``name`` gives the name of a parameter in the checkpoint. ``wanted``: the load includes the optimizer."""
        self._view, self._checkpoint, self._wanted = view, checkpoint, wanted
        self._rank, self._world = view.rank, view.world
        self._one_bit = _one_bit(view, name) if wanted else None
        self._name = name
        self._stored = {key for key in checkpoint.shared_names() if key.startswith(STORED)}
        self._found = Residuals(self._rank, self._world)
        self._loco: dict[str, Any] = {}
        self._same, self._strange, self._unread = True, 0, False

    def _object(self, rank: int) -> dict[str, Any]:
        key = f"{STORED}{rank}"
        if key not in self._stored:
            raise FormatError(f"{self._checkpoint.storage}: the residuals of the optimizer of rank {rank} are missing")
        value = self._checkpoint.shared_object(key).value
        if not _well_formed(value):
            raise FormatError(f"{self._checkpoint.storage}: {key} does not have the expected form")
        found: dict[str, Any] = value
        return found

    def read(self) -> None:
        """Read the residuals of this rank, or those of all ranks if their number has changed.

        Raises:
            UnickptError: they are damaged or incomplete.
        """
        if not self._wanted or not self._stored or (self._one_bit is None and not internals.uses_loco(self._view.engine)):
            return
        first = self._object(0)
        before = Residuals.from_object(first)
        self._same = before.world == self._world
        if self._same:
            own = first if self._rank == 0 else self._object(self._rank)
            self._found, self._loco = Residuals.from_object(own), own["loco"]
        elif self._one_bit is not None and int(self._one_bit.base.size) == self._world:
            states = (_without_padding(self._object(rank)) for rank in range(before.world))
            self._found = _padded(resized(states, self._rank, self._world, slice_of), self._world)
        else:
            self._unread = self._one_bit is not None
        self._strange = self._keep_fitting()

    def _keep_fitting(self) -> int:
        """Forget tensors that this job lacks or has in another size. Returns their number."""
        elements = {} if self._one_bit is None else self._one_bit.elements()
        world = self._world if self._one_bit is None else int(self._one_bit.base.size)
        strange = 0
        for held in (self._found.sent, self._found.returned):
            for name in list(held):
                state, key = name.split(":", 1)
                known = elements if state in (_SENT, _RETURNED, _PADDING) else self._partitions()
                whole, chunk = sizes_of(known.get(key, 0), world)
                size = {_SENT: whole, _RETURNED: chunk, _PADDING: whole - known.get(key, 0)}.get(state, known.get(key, 0))
                if key not in known or len(held[name]) != size:
                    del held[name]
                    strange += 1
        return strange

    def _partitions(self) -> dict[str, int]:
        found = self._one_bit
        return {} if found is None else {k: part.master.numel() for k, part in zip(found.keys, found.parts, strict=True)}

    def apply(self, report: LoadReport) -> None:
        """Set the residuals, and report them."""
        if self._one_bit is not None:
            self._one_bit.restore(self._found)
            if any(name.startswith("master:") for name in self._found.sent):
                partition_updates.refresh_weights(self._view.engine, self._view.parts)
        loco = self._set_loco() if internals.uses_loco(self._view.engine) else 0
        key, state = "optimizer_residuals", "object"
        if not self._stored:
            if self._one_bit is not None:
                report.add(key, state, "left out", "none was saved: they start at zero")
        elif not self._wanted:
            report.add(key, state, "left out", "not requested (load_optimizer_states or load_module_only)")
        elif self._one_bit is None and not loco:
            report.add(key, state, "left out", "this job does not compress by itself, or has another number of ranks")
        elif self._unread:
            report.add(key, state, "left out", "another number of ranks with model parallelism: they start at zero")
        elif self._strange:
            report.add(key, state, "set", f"{self._strange} tensors are divided otherwise, so theirs are zero")
        elif self._same:
            report.add(key, state, "restored")
        else:
            report.add(key, state, "set", "another number of ranks: every rank has the mean of what the ranks had not sent")

    def _set_loco(self) -> int:
        """Set the error buffers of LoCo, which are those of the same number of ranks. Returns how many parameters have them."""
        found = 0
        for parameter in dict.fromkeys(p for part in self._view.parts for p in part.parameters):
            buffers = self._loco.get(self._name(parameter))
            for each in _LOCO:
                if hasattr(parameter, each):
                    delattr(parameter, each)
                if buffers is not None:
                    held = [tensor.to(parameter.device) for tensor in buffers[_LOCO.index(each)]]
                    setattr(parameter, each, held)
            found += buffers is not None
        return found


def _well_formed(value: Any) -> bool:
    """Whether an object is one of ``captured``. ``Residuals.from_object`` checks the tensors."""

    def mapping(key: str) -> dict[str, Any] | None:
        found = value.get(key) if isinstance(value, dict) else None
        return found if isinstance(found, dict) and all(isinstance(name, str) for name in found) else None

    sent, returned, elements, loco = map(mapping, ("sent", "returned", "elements", "loco"))
    if sent is None or returned is None or elements is None or loco is None:
        return False
    buffers = [each for held in loco.values() if isinstance(held, list) for each in held]
    return (
        all(":" in name for name in (*sent, *returned))
        and all(isinstance(number, int) for number in elements.values())
        and all(isinstance(held, list) and len(held) == len(_LOCO) for held in loco.values())
        and all(isinstance(each, list) and all(isinstance(part, torch.Tensor) for part in each) for each in buffers)
    )


def _without_padding(value: dict[str, Any]) -> Residuals:
    """Return the residuals of one rank without the padding, which depends on the number of ranks."""
    found, elements = Residuals.from_object(value), value["elements"]
    sent = {}
    for name, tensor in found.sent.items():
        state, key = name.split(":", 1)
        if state != _PADDING:
            sent[name] = tensor[: elements.get(key, len(tensor))]
    returned = {}
    for name, tensor in found.returned.items():
        lo, hi = slice_of(elements.get(name.split(":", 1)[1], 0), found.rank, found.world)
        returned[name] = tensor[: hi - lo]
    return Residuals(found.rank, found.world, sent, returned)


def _padded(found: Residuals, world: int) -> Residuals:
    """Return residuals with the padding of another number of ranks, which is zero."""
    sent, returned = dict(found.sent), dict(found.returned)
    for name, tensor in found.sent.items():
        state, key = name.split(":", 1)
        if state == _SENT:
            whole, chunk = sizes_of(len(tensor), world)
            sent[name] = torch.nn.functional.pad(tensor, (0, whole - len(tensor)))
            back = returned[f"{_RETURNED}:{key}"]
            returned[f"{_RETURNED}:{key}"] = torch.nn.functional.pad(back, (0, chunk - len(back)))
    return Residuals(found.rank, world, sent, returned)
