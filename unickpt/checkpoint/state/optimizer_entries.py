"""What an optimizer adds to its state dict by its own code, such as the step of torch's ``PostLocalSGDOptimizer``."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from unickpt.checkpoint.load.report import LoadReport

OPTIMIZERS = "optimizers"  # key among the objects of a rank
_BASE = frozenset({"state", "param_groups"})
_ADD_NOTHING = frozenset({"AcceleratedOptimizer", "LightningOptimizer"})  # wrappers with the state dict of what is inside


def captured(chains: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return class and further entries of each optimizer of this rank; nothing if no optimizer has any.

    Args:
        chains: each optimizer that holds states behind the wrappers around it, the outermost first.
    """
    found = [{"class": type(each).__name__, "entries": _entries(each, inner)} for each, inner in _levels(chains)]
    return found if any(each["entries"] for each in found) else []


def _levels(chains: Sequence[Sequence[Any]]) -> list[tuple[Any, torch.optim.Optimizer]]:
    """Return each optimizer and wrapper with the optimizer that holds the states."""
    return [(each, chain[-1]) for chain in chains for each in chain]


def _entries(each: Any, inner: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the entries beside states and groups. Only an optimizer with code of its own for its state dict can have some."""
    own = getattr(type(each), "state_dict", None) not in (None, torch.optim.Optimizer.state_dict)
    if not own and not getattr(each, "_optimizer_state_dict_post_hooks", None):
        return {}
    if type(each).__name__ in _ADD_NOTHING or isinstance(each, ZeroRedundancyOptimizer):
        return {}
    try:
        with _without_states(inner):
            found = each.state_dict()
        return {key: value for key, value in found.items() if key not in _BASE and not _is_state_dict(value)}
    except Exception:  # it has another way to be saved
        return {}


def _is_state_dict(value: Any) -> bool:
    """Whether a value is the state dict of an optimizer, such as the one inside."""
    return isinstance(value, Mapping) and value.keys() >= _BASE


def restore(chains: Sequence[Sequence[Any]], saved: Sequence[Mapping[str, Any]], report: LoadReport) -> None:
    """Give the optimizers their entries. The states and groups of those that hold states stay as they are.

    Args:
        chains: of this rank, as for ``captured``.
        saved: as of ``captured``.
        report: gets a line for each entry.
    """
    levels = _levels(chains)
    for at, (each, inner) in enumerate(levels):
        stored = saved[at] if len(saved) == len(levels) and saved[at].get("class") == type(each).__name__ else {}
        entries, held = dict(stored.get("entries", {})), _entries(each, inner)
        label = f"optimizer[{at}]." if len(levels) > 1 else "optimizer."
        failed = ""
        if entries:
            try:
                with _without_states(inner):
                    each.load_state_dict({**each.state_dict(), **entries})
            except Exception as err:
                failed = f"its load_state_dict raised {type(err).__name__}: {err}"
        for key in entries:
            report.add(f"{label}{key}", "object", "left out" if failed else "restored", failed)
        for key in held.keys() - entries.keys():
            report.add(f"{label}{key}", "object", "left out", "none was saved: it keeps its own value")


@contextlib.contextmanager
def _without_states(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let code of an optimizer run that leaves its states and groups as they are.

    Without states, a state dict costs little, and exists where states are not those of parameters of the groups (ZeRO-3).
    torch's own loading casts states to the dtype of their parameters, and replaces groups.
    """
    own = {key: vars(optimizer)[key] for key in _BASE if key in vars(optimizer)}
    states = {} if "state" in own else dict(optimizer.state)  # those of another optimizer, around which this one is
    if "state" in own:
        optimizer.state = collections.defaultdict(dict)
    try:
        yield
    finally:
        vars(optimizer).update(own)
        for parameter, state in states.items():
            optimizer.state[parameter] = state
