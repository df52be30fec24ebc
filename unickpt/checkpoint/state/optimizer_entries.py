"""What an optimizer adds to its state dict by its own code, such as the step of torch's ``PostLocalSGDOptimizer``."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unickpt.checkpoint.format.object_encoder import digest_of
from unickpt.checkpoint.load.report import LoadReport

OPTIMIZERS = "optimizers"  # key among the objects of a rank
STATE = "state"  # key of an optimizer there
MOST_BYTES = 1 << 20  # of the tensors in an entry of each rank
_BASE = frozenset({"state", "param_groups"})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_DEEPEST = 8  # containers in containers that are searched for tensors
_ADD_NOTHING = frozenset({"AcceleratedOptimizer", "LightningOptimizer"})  # wrappers with the state dict of what is inside


@dataclass(frozen=True, slots=True)
class Captured:
    """What the optimizers of a rank add.

    Attributes:
        stored: class and further entries of each optimizer; nothing if none has any.
        left_out: what is not stored, each with the reason.
    """

    stored: list[dict[str, Any]]
    left_out: list[str]


def captured(chains: Sequence[Sequence[Any]]) -> Captured:
    """Return what the optimizers of this rank add. Each rank stores its own, so large tensors are left out.

    Args:
        chains: each optimizer that holds states behind the wrappers around it, the outermost first.
    """
    found, left_out = [], []
    for each, inner in _levels(chains):
        kind, (entries, failed) = type(each).__name__, _entries(each, inner)
        kept: dict[str, dict[Any, Any]] = {}
        for name, values in (("entries", entries), (STATE, _keyed(each))):
            large = [key for key, value in values.items() if _bytes_of(value) > MOST_BYTES]
            left_out += [f"{kind}.{key}: it has large tensors, or some that are divided among the ranks" for key in large]
            kept[name] = {key: value for key, value in values.items() if key not in large}
        left_out += [f"state_dict of {kind}: {failed}"] if failed else []
        found.append({"class": kind, **{name: values for name, values in kept.items() if values}})
    return Captured(found if any(len(each) > 1 for each in found) else [], left_out)


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
    entries, failed = _entries(optimizer, optimizer)
    if failed:
        return f"a state_dict that fails ({failed})"
    found = [str(key) for key, value in {**entries, **_keyed(optimizer)}.items() if _bytes_of(value, most_items=1)]
    return f"tensors of its own in its state dict ({', '.join(found)})" if found else ""


def _bytes_of(value: Any, most_items: int = 0, depth: int = 0) -> float:
    """Return the size of the tensors in a value, without those of so few items; infinity for parts of divided ones."""
    if isinstance(value, torch.Tensor):
        return math.inf if hasattr(value, "device_mesh") else value.nbytes if value.numel() > most_items else 0
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if not isinstance(value, (list, tuple, set)) or depth >= _DEEPEST:
        return 0
    return sum(_bytes_of(each, most_items, depth + 1) for each in value)


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
    """Return each optimizer and wrapper with the optimizer that holds the states, without wrappers that add nothing."""
    return [(each, chain[-1]) for chain in chains for each in chain if type(each).__name__ not in _ADD_NOTHING]


def _entries(each: Any, inner: torch.optim.Optimizer) -> tuple[dict[str, Any], str]:
    """Return the entries beside states and groups, and why they are not known, or ''.

    Only an optimizer with code of its own for its state dict can have some.
    """
    own = getattr(type(each), "state_dict", None) not in (None, torch.optim.Optimizer.state_dict)
    if not own and not getattr(each, "_optimizer_state_dict_post_hooks", None):
        return {}, ""
    if "ZeroRedundancyOptimizer" in (kind.__name__ for kind in type(each).__mro__):  # it gathers all states, and adds nothing
        return {}, ""
    try:
        found = _state_dict(each, inner)
    except Exception as err:  # it has another way to be saved
        return {}, f"{type(err).__name__}: {err}"
    return {key: value for key, value in found.items() if key not in _BASE and not _is_state_dict(value)}, ""


def _state_dict(each: Any, inner: torch.optim.Optimizer) -> Mapping[str, Any]:
    """Return a state dict without the states of parameters, if the code for it does not need them."""
    with contextlib.suppress(Exception), _without_states(each, inner):
        found: Mapping[str, Any] = each.state_dict()
        return found
    whole: Mapping[str, Any] = each.state_dict()
    return whole


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
    fit = [each.get("class") for each in saved] == [type(each).__name__ for each, _ in levels]
    nothing = "those of other optimizers were saved" if saved and not fit else "none was saved"
    why = f"{reason or nothing}: it keeps its own value"
    for at, (each, inner) in enumerate(levels):
        stored: Mapping[str, Any] = saved[at] if fit else {}
        entries, keyed, held = dict(stored.get("entries", {})), dict(stored.get(STATE, {})), _entries(each, inner)[0]
        label = f"optimizer[{at}]." if len(levels) > 1 else "optimizer."
        failed = ""
        if entries:
            try:
                whole = {**_state_dict(each, inner), **entries}
                with _without_states(each, inner):
                    each.load_state_dict(whole)
            except Exception as err:
                failed = f"its load_state_dict raised {type(err).__name__}: {err}"
        for key in entries:
            report.add(f"{label}{key}", "object", "left out" if failed else "restored", failed)
        for key in keyed:
            each.state[key] = keyed[key]
            report.add(f"{label}state[{key!r}]", "object", "restored")
        for key in _keyed(each).keys() - keyed.keys():
            report.add(f"{label}state[{key!r}]", "object", "left out", why)
        for key in held.keys() - entries.keys():
            report.add(f"{label}{key}", "object", "left out", why)
    for each in () if fit or not levels else saved:
        for key in (*each.get("entries", {}), *each.get(STATE, {})):
            report.add(f"{each.get('class')}.{key}", "object", "left out", "this job has other optimizers")


@contextlib.contextmanager
def _without_states(each: Any, inner: torch.optim.Optimizer) -> Iterator[None]:
    """Let code of an optimizer or of a wrapper run that leaves the states of parameters, and the groups, as they are.

    Without states, a state dict costs little, and exists where states are not those of parameters of the groups (ZeRO-3).
    torch's own loading casts states to the dtype of their parameters, and replaces groups, which an optimizer and the one
    inside it share.
    """
    near = [one for one in (each, inner, *getattr(each, "__dict__", {}).values()) if isinstance(one, torch.optim.Optimizer)]
    kept = [(one, "param_groups", vars(one)["param_groups"]) for one in near if "param_groups" in vars(one)]
    kept += [(one, "state", vars(one)["state"]) for one in near if "state" in vars(one) and (one is inner or one is not each)]
    for one, name, _ in kept:
        if name == "state":
            one.state = collections.defaultdict(dict)
    try:
        yield
    finally:
        for one, name, value in kept:
            setattr(one, name, value)
