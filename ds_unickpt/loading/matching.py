"""Matches the parameters and buffers of this rank with the tensors of a checkpoint, by name and shape."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch

from ds_unickpt.framework.internals import plain
from ds_unickpt.held_state.names import ModuleNames, copied_from, of_all_ranks, original_of, spelled_plainly, without_rank
from ds_unickpt.held_state.vocabulary import PaddedRows
from ds_unickpt.loading.restore_optimizer import IN_A_MEAN
from unickpt.base.errors import MismatchError
from unickpt.base.listing import listed
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.report import LoadReport
from unickpt.transform.dialects.registry import is_unread


@dataclass(frozen=True, slots=True)
class OwnTensor:
    """A parameter or buffer of this rank that a checkpoint should have.

    Attributes:
        name: stored name.
        shape: shape of the whole tensor.
        trained: the optimizer of this job steps on it.
        averaged: the tensor-parallel ranks of this job have values of their own.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool
    averaged: bool = False


@dataclass
class Matching:
    """The result of a match on one rank. Other ranks may have other parameters.

    Attributes:
        stored: this job's name -> name in the checkpoint.
        missing: names of this rank, or of all ranks if they hold different parameters, that the checkpoint lacks.
        shapes: descriptions of tensors that have another shape in the checkpoint, as for ``missing``.
        other_rows: shape in the checkpoint of each vocabulary that has other padding there, by this job's name.
        means: names in the checkpoint of the values to average, by this job's name. The first one is that of ``stored``.
        unclaimed: names of the checkpoint that this rank neither uses nor explains, in the order of the checkpoint.
    """

    checkpoint: Checkpoint
    names: ModuleNames
    volatile: frozenset[str]
    padded: PaddedRows
    strict: bool
    report: LoadReport
    stored: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    other_rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    means: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unclaimed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = {info.name: info for info in self.checkpoint.index.tensors if info.kind in ("parameter", "buffer")}
        self._excluded = frozenset(map(plain, self.checkpoint.manifest.excluded))

    def match(self, own: Iterable[OwnTensor], *, optimizer: bool) -> None:
        """Find the tensor of the checkpoint for each tensor of this rank. ``optimizer``: every trained parameter needs one."""
        manifest = self.checkpoint.manifest
        aliases = {plain(alias): name for alias, name in manifest.aliases.items()} | manifest.aliases
        own_aliases: dict[str, list[str]] = {}
        for alias, name in self.names.aliases.items():
            own_aliases.setdefault(name, []).append(without_rank(alias))
        spelled = {name: stored for stored, name in spelled_plainly(self.known).items()}
        everything = (*self.known, *aliases)
        misfits = set()
        for tensor in own:
            candidates = [without_rank(tensor.name) if tensor.averaged else tensor.name, *own_aliases.get(tensor.name, [])]
            candidates += [copied_from(c, everything) for c in candidates]
            targets = [spelled.get(aliases.get(c, c), aliases.get(c, c)) for c in candidates]
            source = next((target for target in targets if target in self.known), None)
            if source is None:
                self._absent(tensor, optimizer)
            elif self.known[source].shape != tensor.shape and not self._fits(tensor, source):
                misfits.add(source)
            else:
                self.stored[tensor.name] = self._value(tensor, source)
        self._explain({*self.stored.values(), *misfits, *(name for names in self.means.values() for name in names)})

    def _value(self, tensor: OwnTensor, source: str) -> str:
        """Return the name in the checkpoint of this rank's values of a tensor. Notes those of which it takes the mean.

        The rule for parameters to average: each rank takes its own values if the number of tensor-parallel ranks is that of
        the checkpoint, else the mean, as ``ds_to_universal`` does (``merge_tp_slices``).
        """
        several = int(self.checkpoint.manifest.writer.topology.get("tensor") or 1) > 1  # else @tp1 is a name of the model
        values, ranks = of_all_ranks(source, self.known) if several else (source,), self.names.averaged
        if tensor.averaged and len(values) == ranks.ranks:
            return values[ranks.rank]
        if len(values) > 1:
            self.means[tensor.name] = values
        return source

    def _fits(self, tensor: OwnTensor, source: str) -> bool:
        """Whether a tensor of another shape in the checkpoint is a vocabulary with other padding. Notes it, or the misfit."""
        shape = self.known[source].shape
        rows = self.padded.rows(tensor.name, source, shape, tensor.shape)
        if rows is not None and not rows.refused:
            self.other_rows[tensor.name] = shape
            self.stored[tensor.name] = source
            return True
        what = f"{shape} in the checkpoint, {tensor.shape} in this job" if rows is None else rows.refused
        self.shapes.append(f"{tensor.name}: {what}{_remedy(tensor.name, self.known[source].kind, shape, tensor.shape)}")
        return False

    def other_padding(self, name: str) -> str:
        """Return the note of the report about a vocabulary that has other padding in the checkpoint; '' if it has not."""
        return (
            f"with {self.other_rows[name][0]:,} rows in the checkpoint: only padding differs" if name in self.other_rows else ""
        )

    def _absent(self, tensor: OwnTensor, optimizer: bool) -> None:
        if tensor.name in self._excluded and not tensor.trained and not self.strict:
            reason = "frozen, and left out when it was saved (exclude_frozen_parameters): keeps its value in this job's model"
            self.report.add(tensor.name, "weight", "left out", reason)
        elif self.strict or (tensor.trained and optimizer):
            # Also if strict is off, as in Trainer for every PEFT model: a job does not resume if a trained parameter keeps
            # its random initial value.
            self.missing.append(tensor.name)
        else:
            self.report.add(tensor.name, "weight", "left out", "not in the checkpoint; keeps its initial value")

    def _explain(self, used: Collection[str]) -> None:
        """Report the tensors of the checkpoint that this rank does not need. Collect the others."""
        accounted = {entry.name for entry in self.report.entries}
        averaged = {name for names in self.means.values() for name in names[1:]}
        for name in self.known:
            if name in averaged:
                self.report.add(name, "weight", "cast", IN_A_MEAN)
            if name in used or name in accounted:
                continue
            if plain(name) in self.names.aliases:
                self.report.add(name, "weight", "left out", f"tied to {self.names.aliases[plain(name)]} in this job")
            elif plain(name) in self.volatile:
                self.report.add(name, "weight", "recreated", "non-persistent buffers, which the model creates itself")
            else:
                self.unclaimed.append(name)

    @property
    def claimed(self) -> list[str]:
        """Names of the checkpoint that this rank uses or explains."""
        unclaimed = set(self.unclaimed)
        return [name for name in self.known if name not in unclaimed]

    def settle(self, unclaimed: Collection[str]) -> frozenset[str]:
        """Complain about tensors without counterpart, and report those that other ranks have.

        Args:
            unclaimed: names of the checkpoint that no rank of this job claims.

        Returns:
            The names of the checkpoint that only other ranks claim.

        Raises:
            MismatchError: lists all missing tensors, extra tensors and tensors of another shape.
        """
        extra = list(self.checkpoint.untranslated) if self.strict else []
        for name in self.checkpoint.untranslated if not self.strict else ():
            self.report.add(name, "weight", "left out", "this job has no counterpart")
        for name in self.checkpoint.unread:
            self.report.add(name, "weight", "left out", "no model reads it")
        for name in unclaimed:
            original = original_of(name)
            if original in self.known and self._is_spare(name, original):
                reason = "a copy of a tied parameter that this pipeline does not have; it has no effect on the model"
                self.report.add(name, "weight", "left out", reason)
            elif self.strict:
                extra.append(name)
            else:
                self.report.add(name, "weight", "left out", "this job has no such parameter or buffer")
        self._complain(extra)
        elsewhere = frozenset(self.unclaimed).difference(unclaimed)
        for name in self.unclaimed:
            if name in elsewhere:
                self.report.add(name, "weight", "on other ranks")
        return elsewhere

    def _is_spare(self, name: str, original: str) -> bool:
        """Whether a copy of a tied parameter has no effect: its dialect says so, it got no gradient, or all are equal."""
        if is_unread(self.checkpoint.manifest.writer.dialect, name):
            return True
        states = [info for info in self.checkpoint.index.tensors if info.kind == "optimizer" and info.name == name]
        if states and not any(self.checkpoint.read_tensor(name, info.state).count_nonzero() for info in states):
            return True
        copies = [other for other in self.known if original in (other, original_of(other))]
        key = "master" if (name, "master") in self.checkpoint.ids else "weight"
        value = self.checkpoint.read_tensor(name, key)
        return all(torch.equal(value, self.checkpoint.read_tensor(other, key)) for other in copies)

    def _complain(self, extra: list[str]) -> None:
        lines = listed("in this job but not in the checkpoint", self.missing)
        lines += listed("in the checkpoint but not in this job", extra)
        lines += listed("of another shape", self.shapes, separator="; ")
        if not lines:
            return
        hint = ""
        if not set(self.stored) or len(self.shapes) > len(self.stored):
            hint += " Most tensors differ, so this is probably another model: compare the name of the model and the folder."
        excluded = self._excluded.intersection(self.missing)
        if excluded:
            hint = f" exclude_frozen_parameters=True left out {len(excluded)} of them."
        if self.missing or extra:
            hint += " load_module_strict=False allows differing names, except those of trained parameters; together with"
            hint += " load_optimizer_states=False it allows those, too. 'unickpt edit --rename' gives parameters other names."
        raise MismatchError(
            f"{self.checkpoint.storage} does not fit this model: " + "; ".join(lines) + f".{hint} Nothing is loaded."
        )


_OF_TOKENS = re.compile(r"embed|wte|vocab|output_layer|(?:^|[._])head\b", re.IGNORECASE)


def _remedy(name: str, kind: str, stored: tuple[int, ...], own: tuple[int, ...]) -> str:
    """Return what helps against another shape, as the end of its line: '' if only another model does."""
    if kind == "buffer":
        return (
            " (a buffer, whose shape follows from the settings of the model: use those of the saved job. If it follows from "
            "the data, as the scales of fake quantization, run one forward pass before the load)"
        )
    if _OF_TOKENS.search(name) and len(stored) == len(own) > 0 and stored[1:] == own[1:]:
        return " (if the rows are tokens, 'unickpt edit --vocabulary' gives the checkpoint another number of them)"
    return ""
