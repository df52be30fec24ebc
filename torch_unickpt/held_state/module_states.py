"""State of modules beside parameters and buffers: ``get_extra_state``, and what only a module's own state dict has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from torch_unickpt.held_state.names import Names, plain, without_ddp
from unickpt.api.holders import Holders
from unickpt.base.errors import MismatchError
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.report import LoadReport
from unickpt.checkpoint.state.own_entries import of_module

EXTRA_STATE = "module_extra_state"  # as the adapter for DeepSpeed stores it; the shared objects of other ranks start with it
_NO_TENSORS = "only the module's own state dict has it, which no checkpoint stores: it keeps this job's value"


def extra_key(name: str) -> str:
    """Return the key of a module with an extra state that a rank has."""
    return f"extra state {name}"


def captured(names: Names, holders: Holders, rank: int) -> dict[str, Any]:
    """Return the extra states of the modules that this rank is the first one to have, by name."""
    found: dict[str, Any] = {}
    for name, module in names.extra.items():
        state: Any = module.get_extra_state()  # on every rank: it may call a collective
        if holders.first(extra_key(name)) == rank:
            found[name] = state
    return found


def shared(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return extra states under their keys in the shared objects."""
    return {f"{EXTRA_STATE}/{name}": state for name, state in states.items()}


def own_entries(module: torch.nn.Module, names: Names) -> list[str]:
    """Return the entries of a state dict that neither parameters nor buffers nor extra states have, by name.

    Modules without code of their own for a state dict are not asked.
    """
    module = without_ddp(module)
    tensors = {**names.parameters, **names.buffers}
    aliases = {alias: tensors[name] for alias, name in names.aliases.items() if name in tensors}
    return of_module(module, {**aliases, **tensors}, set(map(id, names.extra.values())), plain)


class RestoredExtraStates:
    """The extra states of one load. ``read`` first, ``apply`` after all tensors.

    Args:
        modules: of this rank that have an extra state, by name.
        own: ``own_entries`` of the module.
        report: gets an entry for each.
        world: number of ranks of this job.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module], own: Collection[str], report: LoadReport, world: int) -> None:
        self._modules, self._own, self._report, self._world = modules, own, report, world
        self._saved: dict[str, Any] = {}
        self._refused: dict[str, str] = {}

    def read(self, checkpoint: Checkpoint, *, allow_pickle: bool) -> None:
        """Read what the checkpoint has of the modules of this rank."""
        decoded = checkpoint.objects(allow_pickle=allow_pickle)
        self._saved = {plain(str(name)): state for name, state in (decoded.value.get(EXTRA_STATE) or {}).items()}
        prefix = f"{EXTRA_STATE}."
        for each in decoded.left_out:
            if each.path.startswith(prefix):
                self._refused[self._module_at(each.path.removeprefix(prefix))] = each.reason
        keys = {f"{EXTRA_STATE}/{name}": name for name in self._modules}
        checkpoint.fetch_shared(keys)
        for key in checkpoint.shared_names():
            if key in keys:
                found = checkpoint.shared_object(key, allow_pickle=allow_pickle)
                self._saved[keys[key]] = found.value
                if found.left_out:
                    self._refused[keys[key]] = found.left_out[0].reason

    def _module_at(self, path: str) -> str:
        """Return the module whose extra state has a value at this path."""
        known = {plain(name): None for name in (*self._saved, *self._modules)}
        fits: Iterator[str] = (name for name in known if f"{path}.".startswith(f"{name}.") or path.startswith(f"{name}["))
        return max(fits, key=len, default=plain(path))

    def apply(self) -> None:
        """Set the states. A module of which a part cannot be read here keeps its own, whole."""
        for name in dict.fromkeys((*self._saved, *self._refused, *self._modules)):
            if name not in self._modules:
                self._note(name, "left out", f"this {'job' if self._world == 1 else 'rank'} has no such module")
            elif name in self._refused:
                self._note(name, "left out", f"{self._refused[name]}: the module keeps its own")
            elif name not in self._saved:
                self._note(name, "left out", "none was saved: the module keeps its own")
            else:
                self._set(name)
                self._note(name, "restored")
        for name in self._own:
            self._report.add(name, "object", "left out", _NO_TENSORS)

    def _set(self, name: str) -> None:
        module = self._modules[name]
        try:
            module.set_extra_state(self._saved[name])
        except Exception as err:  # of the program
            raise MismatchError(
                f"extra state of module {name or 'the model'}: set_extra_state of {type(module).__name__} refuses what the "
                f"checkpoint has ({type(err).__name__}: {err}). Weights and optimizer states are loaded already: end this job, "
                "or load another checkpoint"
            ) from err

    def _note(self, name: str, outcome: Any, reason: str = "") -> None:
        self._report.add(f"{EXTRA_STATE}.{name}", "object", outcome, reason)
