"""Optimizer states that are neither of their parameter's shape nor scalars: factors, preconditioners, statistics of blocks.

Such a state belongs to the tensor that the optimizer steps on, its *owner*: a parameter, or a flat partition under ZeRO. It
cannot be cut at other boundaries. A checkpoint has it under a digest of the owner's shape and parameter ranges. A job with
the same owner gets it back exactly, on any rank and any number of ranks. Any other job is refused before anything is loaded.

Tensor-parallel ranks step on parts of parameters. Their owners also have the boxes of these parts, and the number of the rank.
A job whose ranks divide the parameters otherwise has other owners.

A block of such an optimizer may contain padding, so the padding of the owner's master and states is stored with them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ds_unickpt.framework.internals import BF16, FP16_FUSED, ZERO_1_2, ZERO_3, layer_of
from ds_unickpt.framework.partitions import Partition, states_of
from ds_unickpt.held_state.engine_view import EngineView
from ds_unickpt.held_state.names import ModuleNames, Naming
from ds_unickpt.held_state.optimizer_record import classify, place_of
from ds_unickpt.placing.slices import Slices
from unickpt.base.errors import MismatchError
from unickpt.base.listing import some
from unickpt.checkpoint.format.checksums import digest
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.state.first_step import first_states
from unickpt.checkpoint.state.saved_optimizer import OWNERS

STATES = "optimizer_states/"  # + digest: states and padding by key

_ADVICE = (
    "Nothing is loaded. Use the world size and the ZeRO stage that saved the checkpoint, or load_optimizer_states=False for "
    "the weights alone."
)
_FLAT = (ZERO_1_2, ZERO_3, BF16, FP16_FUSED)  # wrappers whose masters are flat


def _owner(part: Partition, name: Naming, division: OwnDivision) -> list[Any]:
    """Return an owner as JSON: shape, parameter ranges, and of parts of parameters ``OwnDivision.of``."""
    divided = division.of(part)
    return [list(part.elements.shape), place_of(part, name), *([divided] if divided else [])]


def _key(owner: list[Any]) -> str:
    return digest(json.dumps(owner).encode())


@dataclass(frozen=True, slots=True)
class OwnDivision:
    """How the parameters of this rank are divided among ranks.

    Attributes:
        names: names of the parameters.
        slices: the part of each parameter on this rank.
        tensor, tensors: those of ``Placement``.
    """

    names: ModuleNames
    slices: Slices
    tensor: int
    tensors: int

    def of(self, part: Partition) -> list[Any]:
        """Return as JSON how a partition is divided, or [] if it has whole parameters of a job without tensor parallelism.

        Tensor-parallel rank, number of ranks, and for each range the global shape and the boxes: begin on this rank, shape, and
        begin in the whole parameter.
        Experts that the tensor-parallel ranks do not divide have rank 0 of 1: they are laid out among all ranks.
        """
        layer = layer_of(self.names.name(part.parameters[0]), self.names.experts)
        apart = layer is not None and not layer.slices
        cut = [self.slices.of(piece.parameter) for piece in part.pieces]
        if all(each.replicated for each in cut) and (apart or self.tensors == 1):
            return []
        boxes = [
            [list(each.shape), [[list(b.local.start), list(b.local.shape), list(b.whole.start)] for b in each.boxes]]
            for each in cut
        ]
        return [*([0, 1] if apart else [self.tensor, self.tensors]), boxes]


def captured(view: EngineView) -> dict[str, Any]:
    """Return the shared objects that this rank stores. An owner that several ranks have is stored by one of them."""
    base, names, placed = view.base, view.names, view.placed
    if base is None:
        return {}
    owned = view.kinds.owned
    division = OwnDivision(names, view.slices, placed.tensor, placed.tensors)
    owners, found = [], {}
    for number, part in enumerate(view.parts if owned else ()):
        held = states_of(base, part)
        states = {key: held[key] for key in sorted(owned) if held.get(key) is not None}
        first = names.name(part.parameters[0])
        if part.replicated:
            copies = placed.copies(names.holders(first))
            stored = first not in names.elsewhere and copies.rank >= 0 and number % copies.world == copies.rank
        else:
            stored = part.stored
        if states and stored:
            owners.append(_owner(part, names.name, division))
            found[f"{STATES}{_key(owners[-1])}"] = {"states": states, "padding": _padding(part, base)}
    return {f"{OWNERS}{placed.rank}": owners, **found} if owners else {}


def _padding(part: Partition, base: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the elements of the master and of the elementwise states that belong to no parameter, by key. 1-D."""
    found = {}
    for key, flat in _flats(part, base).items():
        gaps = _gaps(part, flat.numel())
        if gaps and key not in part.whole:
            found[key] = torch.cat([flat[lo:hi] for lo, hi in gaps])
    return found


def _flats(part: Partition, base: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return live views of the master and of the elementwise states, 1-D."""
    held = states_of(base, part)
    tensors = {key: held[key] for key in classify([part], base).tensors if held.get(key) is not None}
    return {key: tensor.detach().reshape(-1) for key, tensor in {"master": part.master, **tensors}.items()}


def _gaps(part: Partition, numel: int) -> list[tuple[int, int]]:
    """Return the ranges of a flat tensor that hold no element of a parameter."""
    found, at = [], 0
    for piece in sorted(part.pieces, key=lambda piece: piece.at):
        found.append((at, piece.at))
        at = piece.at + piece.hi - piece.lo
    return [(lo, hi) for lo, hi in (*found, (at, numel)) if lo < hi]


def restore(part: Partition, base: torch.optim.Optimizer, states: dict[str, Any]) -> None:
    """Set what ``OwnedStates.read`` returned. The elementwise states exist already."""
    for key, value in states["states"].items():
        (part.stepped_by or base).state[part.master][key] = value
    flats = _flats(part, base)
    for key, padding in states["padding"].items():
        at = 0
        for lo, hi in _gaps(part, flats[key].numel()):
            flats[key][lo:hi] = padding[at : at + hi - lo]
            at += hi - lo


class OwnedStates:
    """The owned states of one load into one engine."""

    def __init__(self, checkpoint: Checkpoint, name: Naming, division: OwnDivision, *, allow_pickle: bool) -> None:
        """``name`` gives the name of a parameter in the checkpoint."""
        self.checkpoint, self.name, self.division, self.allow_pickle = checkpoint, name, division, allow_pickle
        self._flat = checkpoint.manifest.writer.topology.get("optimizer_wrapper") in _FLAT
        self._stored = {key for key in checkpoint.shared_names() if key.startswith(STATES)}

    def read(
        self, part: Partition, optimizer: torch.optim.Optimizer, *, others: bool, none: frozenset[str], fresh: bool
    ) -> dict[str, Any] | None:
        """Return the states and the padding of a partition, for ``restore``; empty if the checkpoint has none for it.

        Args:
            part: the partition.
            optimizer: the optimizer that steps on it.
            others: the checkpoint has other states of the partition. If not, it had none when it was saved.
            none: keys of its states that were None.
            fresh: return None if the checkpoint lacks states that the optimizer needs.

        Raises:
            MismatchError: the checkpoint has such states of an owner with other boundaries, lacks them although the optimizer
                needs them, or has one that needs a pickle.
        """
        key = _key(_owner(part, self.name, self.division))
        if f"{STATES}{key}" not in self._stored:
            self._refuse_others(part)
            lacking = self._lacking(part, optimizer) - none if others else frozenset()
            if lacking and not fresh:
                self._refuse(part, optimizer, lacking)
            return None if lacking else {}
        found = self.checkpoint.shared_object(f"{STATES}{key}", allow_pickle=self.allow_pickle)
        if found.left_out:
            raise MismatchError(
                f"{self.checkpoint.storage}: optimizer states of {self._first(part)} are pickles: "
                f"{some(found.left_out, separator='; ')}. "
                'Nothing is loaded. "allow_pickle" loads them, only from a checkpoint that you trust.'
            )
        return {kind: _on(values, part.master.device) for kind, values in found.value.items()}

    def _first(self, part: Partition) -> str:
        return self.name(part.parameters[0])

    @cached_property
    def _owners(self) -> list[Any]:
        ranks = [key for key in self.checkpoint.shared_names() if key.startswith(OWNERS)]
        return [owner for key in ranks for owner in self.checkpoint.shared_object(key).value]

    def _refuse_others(self, part: Partition) -> None:
        """Raise if an owner in the checkpoint shares elements with a partition that is no owner there."""
        if not self._stored:
            return
        own = {name: (lo, hi) for name, lo, hi, _ in place_of(part, self.name)[1]}
        for shape, (_, pieces), *divided in self._owners:
            for other, lo, hi, _ in pieces:
                begin, end = own.get(other, (0, 0))
                if lo < end and begin < hi:
                    raise MismatchError(
                        f"{self.checkpoint.storage}: the optimizer kept states for a tensor of shape {tuple(shape)} with "
                        f"elements {lo} to {hi} of {other}. They are not of the parameter's shape and cannot be cut. In this "
                        f"job the optimizer steps on a tensor of shape {tuple(part.master.shape)} with elements {begin} to "
                        f"{end}{_compared(divided, self.division.of(part))}. {_ADVICE}"
                    )

    def _lacking(self, part: Partition, optimizer: torch.optim.Optimizer) -> frozenset[str]:
        """Return the states that the optimizer keeps for this partition, none of which the checkpoint has."""
        own = classify([part], optimizer).owned
        if not own and self._flat and part.replicated and part.master.dim() > 1:
            own = _owned_by_a_matrix(optimizer, part)
        return own

    def _refuse(self, part: Partition, optimizer: torch.optim.Optimizer, own: frozenset[str]) -> None:
        raise MismatchError(
            f"{self.checkpoint.storage} lacks the state {', '.join(sorted(own))}, which {type(optimizer).__name__} keeps "
            f"for {self._first(part)} in this job. The state is not of the parameter's shape and cannot be made from other "
            f"states. {_ADVICE}"
        )


def _compared(before: Sequence[Any], now: Sequence[Any]) -> str:
    """Return how many tensor-parallel ranks divided the parameters, and how many do, as the end of a sentence; '' if none."""
    counts = [int(each[1]) if each else 1 for each in (before[0] if before else [], now)]
    if not before and not now:
        return ""
    return f" (of a part: {counts[0]} tensor-parallel ranks divided the parameters, and {counts[1]} do here)"


def _owned_by_a_matrix(optimizer: torch.optim.Optimizer, part: Partition) -> frozenset[str]:
    """Return the owned states that an optimizer creates for a matrix.

    ZeRO's flat partitions have one dimension, and some optimizers keep other states for matrices (Adafactor). The empty set
    for classes that are known not to, and if it is unknown.
    """
    kind = type(optimizer)
    if kind.__module__.startswith(("torch.optim", "deepspeed.", "apex.")) and kind.__name__ != "Adafactor":
        return frozenset()
    found = first_states(optimizer, part.group, torch.empty(1, 1, dtype=part.master.dtype, device=part.master.device))
    return frozenset() if found is None else found.owned


def _on(value: Any, device: torch.device) -> Any:
    """Return a state with its tensors on a device, except tensors with one element, which optimizers keep on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.to(device) if value.numel() > 1 else value
    if isinstance(value, (list, tuple)):
        return type(value)(_on(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _on(item, device) for key, item in value.items()}
    return value
