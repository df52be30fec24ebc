"""Objects that ranks store for their positions (``ShardedObject``), requested at a position that the checkpoint lacks.

Megatron numbers the positions itself: of layers and experts, which do not depend on the parallel shape, but also of ranks. The
values of one key are then of another number of positions, and no rule can divide or merge them. That the stored ones are equal
does not say that they serve another position: one stored position is equal to itself. Three cases have an answer:

- the object is declared to be free of its position (``PositionFree``), and every stored position has the same value;
- the extra state of a module of TransformerEngine: the factors of fp8 scaling, which a new module finds again within its first
  steps. If the stored ones are equal, they serve every module. Otherwise the job keeps its own;
- random generators (``generators``).
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from unickpt.checkpoint.load.report import Outcome

ADVICE = "If its value is the same at every position, describe it with megatron_unickpt.PositionFree"
EXTRA_STATE = "_extra_state"  # Module.get_extra_state of torch; of Megatron's modules, those of TransformerEngine have one


@dataclass
class PositionFree(ShardedObject):  # type: ignore[misc]
    """A sharded object that has the same value at every position. Under another layout, every position gets this value.

    A load decides by the object that it is asked for. It is refused if the stored values are not equal.
    """


@dataclass(frozen=True, slots=True)
class Found:
    """What to load for a position.

    Attributes:
        value: the object; meaningless if ``refused``.
        own: it is the job's own.
        reason: why, for the report. Of a refusal: what the checkpoint has.
        outcome: for the report.
    """

    value: Any = None
    own: bool = False
    reason: str = ""
    refused: bool = False
    outcome: Outcome = "restored"


def may_move(item: ShardedObject) -> bool:
    """Whether the objects of other positions can replace this one, which depends on their values."""
    return isinstance(item, PositionFree) or item.key.endswith(EXTRA_STATE)


def at_another_position(item: ShardedObject, stored: Sequence[Any], names: Sequence[str]) -> Found:
    """Return the object for a position that the checkpoint lacks.

    Args:
        item: the request, whose data are the job's own object.
        stored: the objects of that key at every stored position, if ``may_move``.
        names: their names, with the positions.
    """
    if may_move(item) and stored and all(same(stored[0], other) for other in stored[1:]):
        return Found(stored[0], reason=f"the same at all {len(stored)} stored positions")
    if item.key.endswith(EXTRA_STATE):
        why = f"stored for other positions ({', '.join(names[:4])})" if names else "the checkpoint has none"
        reason = f"{why}: the job keeps its own, and fp8 scaling factors begin anew"
        return Found(item.data, own=True, reason=reason, outcome="re-seeded")
    if isinstance(item, PositionFree) and names:
        return Found(refused=True, reason=f"it has {', '.join(names[:4])}, which are not equal")
    return Found(refused=True, reason=f"it has {', '.join(names[:4])}" if names else "it has none of that name")


def same(a: Any, b: Any) -> bool:
    """Whether two decoded objects are equal, tensors and arrays bit by bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return bool(a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and np.array_equal(a, b))
    if isinstance(a, io.BytesIO):
        equal: bool = a.getvalue() == b.getvalue()
        return equal
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
