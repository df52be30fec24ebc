"""Values that are not finite, or far too large: where they first appear, and whether data or hardware is the cause."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum

MOST_MICRO_BATCHES = 1024  # of a step that are looked at: a program may never step


class Cause(str, Enum):
    """Why values are not finite.

    Attributes:
        DATA_OR_MODEL: two other ranks that repeat the micro-batch find the same.
        HARDWARE: two other ranks that repeat it find finite values, or this rank does the second time.
        UNDECIDED: nobody repeated it, or they disagree.
    """

    DATA_OR_MODEL = "DATA_OR_MODEL"
    HARDWARE = "HARDWARE"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True, slots=True)
class Counted:
    """What is not finite in one micro-batch on one rank.

    Attributes:
        forward: layers whose output has values that are not finite, in forward order.
        backward: the same of the gradient of the output, in forward order too.
    """

    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where values that are not finite first appear.

    Attributes:
        layer: name of the layer; '' is the whole model.
        backward: in the gradient of its output.
        micro_batch: of the step, from 0.
    """

    layer: str
    backward: bool
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """What a rank finds that repeats the micro-batch.

    Attributes:
        rank: global rank.
        host: its host.
        first: what stands for the place with the first values that are not finite; None if all are finite.
    """

    rank: int
    host: str
    first: Hashable


def first_place(micro_batches: Sequence[Counted], usual: Collection[str] = ()) -> Place | None:
    """Return the first place with values that are not finite, in the order of the computation; None if there is none.

    The whole model '' comes last in forward order, and so its gradient, which is that of the loss, first in backward order.

    Args:
        micro_batches: of a step.
        usual: layers whose output is not finite in sound steps either, such as a mask with infinities.
    """
    for at, each in enumerate(micro_batches):
        for layer in sorted(each.forward, key=lambda name: name == ""):
            if layer not in usual:
                return Place(layer, False, at)
        for layer in sorted(reversed(each.backward), key=lambda name: name != ""):
            return Place(layer, True, at)
    return None


def cause(own: Repeat, repeats: Sequence[Repeat]) -> Cause:
    """Return why values of a rank are not finite.

    Two other ranks decide, if they agree. On the host of the rank they count only if all are there. One other rank alone can
    confirm what the rank has found. The rank itself can only find that its values are finite the second time.

    Args:
        own: what the rank had found, which is a place.
        repeats: by other ranks, and by the rank itself.
    """
    elsewhere = [each for each in repeats if each.host != own.host]
    others = elsewhere or [each for each in repeats if each.rank != own.rank]
    found = {each.first for each in others}
    itself = {each.first for each in repeats if each.rank == own.rank}
    if found == {own.first} and (len(others) > 1 or itself == found):
        return Cause.DATA_OR_MODEL
    if (found == {None} and len(others) > 1) or (itself == {None} and found <= {None}):
        return Cause.HARDWARE
    return Cause.UNDECIDED


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Values that are not finite, which reach a gradient, or that are far larger than those of the steps before.

    Attributes:
        place: where they appear first on this rank.
        step: optimizer step, from 1.
        rank: global rank.
        host: its host.
        cause: why.
        batch: file with the micro-batch, or ''.
        times: the largest value relative to the largest of the steps before; 0 if values are not finite.
    """

    place: Place
    step: int
    rank: int
    host: str
    cause: Cause = Cause.UNDECIDED
    batch: str = ""
    times: float = 0.0

    @property
    def kind(self) -> str:
        """OUTLIER, or NONFINITE."""
        return "OUTLIER" if self.times else "NONFINITE"
