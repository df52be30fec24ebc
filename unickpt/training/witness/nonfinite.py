"""Values that are not finite: where they first appear, and whether data or hardware is the cause."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Cause(str, Enum):
    """Why values are not finite.

    Attributes:
        DATA_OR_MODEL: two other hosts that repeat the micro-batch find the same.
        HARDWARE: two other hosts that repeat it find finite values.
        UNDECIDED: fewer than two other hosts repeated it, or they disagree.
    """

    DATA_OR_MODEL = "DATA_OR_MODEL"
    HARDWARE = "HARDWARE"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts of one micro-batch on one rank.

    Attributes:
        forward: number of values that are not finite in the output of each layer, in forward order. Others are left out.
        backward: the same of the gradient of the output, in forward order too.
    """

    forward: Mapping[str, int] = field(default_factory=dict)
    backward: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where values that are not finite first appear.

    Attributes:
        layer: name of the layer; '' is the whole model.
        backward: in the gradient of its output.
        micro_batch: of the step, from 0.
        count: number of such values there.
    """

    layer: str
    backward: bool
    micro_batch: int
    count: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """What another rank finds that repeats the micro-batch.

    Attributes:
        host: its host.
        layer: layer with the first values that are not finite; None if all are finite.
    """

    host: str
    layer: str | None


def first_place(micro_batches: Sequence[Counted], usual: Collection[str] = ()) -> Place | None:
    """Return the first place with values that are not finite, in the order of the computation; None if there is none.

    The whole model '' comes last in forward order, and so its gradient, which is that of the loss, first in backward order.

    Args:
        micro_batches: counts of each micro-batch of a step.
        usual: layers whose output is not finite in sound steps either, such as a mask with infinities.
    """
    for at, each in enumerate(micro_batches):
        for layer in sorted(each.forward, key=lambda name: name == ""):
            if each.forward[layer] and layer not in usual:
                return Place(layer, False, at, each.forward[layer])
        for layer in sorted(reversed(list(each.backward)), key=lambda name: name != ""):
            if each.backward[layer]:
                return Place(layer, True, at, each.backward[layer])
    return None


def cause(host: str, layer: str, repeats: Sequence[Repeat]) -> Cause:
    """Return why the values of a layer are not finite on a host. Two other hosts decide, if they agree."""
    by_host: dict[str, set[str | None]] = {}
    for each in repeats:
        if each.host != host:
            by_host.setdefault(each.host, set()).add(each.layer)
    found = list(by_host.values())
    if len(found) < 2 or any(len(layers) > 1 or layers != found[0] for layers in found):
        return Cause.UNDECIDED
    if found[0] == {None}:
        return Cause.HARDWARE
    return Cause.DATA_OR_MODEL if found[0] == {layer} else Cause.UNDECIDED


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Values that are not finite, which reach a gradient.

    Attributes:
        place: where they appear first on this rank.
        step: optimizer step, from 1.
        rank: global rank.
        host: its host.
        cause: why.
    """

    place: Place
    step: int
    rank: int
    host: str
    cause: Cause
