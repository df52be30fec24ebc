"""What an optimizer adds to its state dict by its own code, such as the step of torch's ``PostLocalSGDOptimizer``."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from unickpt.checkpoint.format.object_encoder import digest_of
from unickpt.checkpoint.load.report import LoadReport

OPTIMIZERS = "optimizers"  # key among the objects of a rank
STATE = "state"  # key of an optimizer there
_BASE = frozenset({"state", "param_groups"})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_DEEPEST = 8  # containers in containers that are searched for tensors
_ADD_NOTHING = frozenset({"AcceleratedOptimizer", "LightningOptimizer"})  # wrappers with the state dict of what is inside


def captured(chains: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return class and further entries of each optimizer of this rank; nothing if no optimizer has any.

    Args:
        chains: each optimizer that holds states behind the wrappers around it, the outermost first.
    """
    found = [
        {"class": type(each).__name__, "entries": _entries(each, inner), **({STATE: keyed} if (keyed := _keyed(each)) else {})}
        for each, inner in _levels(chains)
    ]
    return found if any(each["entries"] or STATE in each for each in found) else []


def _keyed(each: Any) -> dict[Any, Any]:
    """Return the states under keys that are no parameters, such as ``optimizer.state["step"]``."""
    state = vars(each).get("state") if isinstance(each, torch.optim.Optimizer) else None
    if not isinstance(state, Mapping) or set(map(type, state)) <= _TENSORS:
        return {}
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


def unplaced(optimizer: torch.optim.Optimizer) -> str:
    """Return which tensors an optimizer has beside its states that only its own layout can place; '' if it has none."""
    others = (other for other in vars(optimizer).values() if isinstance(other, torch.optim.Optimizer))
    inside = next((other for other in others if other is not optimizer and other.state is not optimizer.state), None)
    if inside is not None:
        return f"another optimizer inside ({type(inside).__name__}), with states of its own"
    every = {**_entries(optimizer, optimizer), **_keyed(optimizer)}
    found = [str(key) for key, value in every.items() if _has_tensors(value)]
    return f"tensors of its own in its state dict ({', '.join(found)})" if found else ""


def _has_tensors(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    inside = isinstance(value, (list, tuple, set)) and depth < _DEEPEST and any(_has_tensors(each, depth + 1) for each in value)
    return isinstance(value, torch.Tensor) or inside


def of_rank(ranks: Mapping[int, Mapping[str, Any]], rank: int, before: int, world: int) -> tuple[Sequence[Any], str]:
    """Return what this rank restores, and why it restores nothing, or ''.

    Args:
        ranks: the objects of ranks of the saving job: of rank 0, of rank 1 if there was one, and of this one if there was.
        rank: this rank.
        before, world: number of ranks of the saving job, and of this one.
    """
    first, second = (ranks.get(number, {}).get(OPTIMIZERS) or () for number in (0, 1))
    if before == world:
        return ranks.get(rank, {}).get(OPTIMIZERS) or (), ""
    if before > 1 and digest_of(list(first)) != digest_of(list(second)):
        return (), f"the {before} ranks that saved have different values, and this job has another number of ranks"
    return first, ""


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


def restore(chains: Sequence[Sequence[Any]], saved: Sequence[Mapping[str, Any]], report: LoadReport, reason: str = "") -> None:
    """Give the optimizers their entries. The states and groups of those that hold states stay as they are.

    Args:
        chains: of this rank, as for ``captured``.
        saved: as of ``captured``.
        report: gets a line for each entry.
        reason: why nothing is restored, or ''.
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
        keyed = _keyed(each)
        for key, value in stored.get(STATE, {}).items():
            each.state[key] = value
            report.add(f"{label}state[{key!r}]", "object", "restored")
        for key in keyed.keys() - stored.get(STATE, {}).keys():
            report.add(f"{label}state[{key!r}]", "object", "left out", f"{reason or 'none was saved'}: it keeps its own value")
        for key in held.keys() - entries.keys():
            report.add(f"{label}{key}", "object", "left out", f"{reason or 'none was saved'}: it keeps its own value")


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
