"""Which end of a bad link is at fault: from measured links between the two hosts and others to a finding. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from unickpt.steering.state.membership import Membership, holds_name

BAD_SHARE = 0.4  # of the speed of the fastest measured link; training uses the links as well
BAD_LATENCY, LEAST_LATENCY_S = 10.0, 0.005  # times that of the quickest link, and at least
THIRDS = 2  # hosts to which both ends are measured
Pair = tuple[str, str]  # sorted names of hosts


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What a measurement of a link has found.

    Attributes:
        latency_s: shortest time of a small request and its answer.
        sends: bytes per second to the other agent.
        receives: bytes per second from it.
    """

    latency_s: float
    sends: float
    receives: float

    @property
    def slowest(self) -> float:
        """Bytes per second in the slower direction."""
        return min(self.sends, self.receives)


@dataclass(frozen=True, slots=True)
class LinkFinding:
    """Result of a check.

    Attributes:
        blame: kind.
        host: the end at fault; '' for none.
        text: the result with its measurements.
    """

    blame: Blame
    host: str
    text: str


class Blame(enum.Enum):
    """Result of a check."""

    ONE_END = "one end is at fault"
    BOTH_ENDS = "the links of both ends are bad, so none is blamed"
    LINK = "only this link is bad, so no host is at fault"
    SOUND = "the link is sound now"
    UNKNOWN = "it cannot be told which end is at fault"


def pair(one: str, other: str) -> Pair:
    """Return a pair in order."""
    return (one, other) if one <= other else (other, one)


def thirds(state: Membership, ends: Pair) -> list[str]:
    """Return the members to which both ends are measured, those that have never left first."""
    members = state.round.members if state.round is not None else ()
    names = [name for name, incarnation in members if holds_name(state, name, incarnation) and name not in ends]
    return sorted(names, key=lambda name: state.losses.get(name, 0))[:THIRDS]


def pairs_to_measure(ends: Pair, others: list[str]) -> list[Pair]:
    """Return the links between both ends and the others, the suspected one first."""
    return [pair(*each) for each in combinations([*ends, *others], 2)]


def judge(ends: Pair, speeds: Mapping[Pair, LinkSpeed | None]) -> LinkFinding:
    """Return which end of a link is at fault.

    An end is at fault if its links to third hosts are bad as well, and those of the other end are not.

    Args:
        ends: the two hosts.
        speeds: measured links; None for a link that could not be used. Links that are missing are unknown.

    Returns:
        The finding. A link is bad relative to the fastest one, so nothing can be told from one link.
    """
    others = sorted({name for each in speeds for name in each} - set(ends))
    measured = [speed for speed in speeds.values() if speed is not None]
    best = max((speed.slowest for speed in measured), default=0.0)
    quickest_s = min((speed.latency_s for speed in measured), default=0.0)

    def bad(one: str, other: str) -> bool | None:
        """Return whether a link is bad; None if it is unknown."""
        key = pair(one, other)
        speed = speeds.get(key)
        if key not in speeds or speed is None:
            return None if key not in speeds else True
        late = speed.latency_s > max(BAD_LATENCY * quickest_s, LEAST_LATENCY_S)
        return speed.slowest < BAD_SHARE * best or late

    def said(blame: Blame, host: str = "") -> LinkFinding:
        links = ", ".join(f"{one}-{other} {_text(speed)}" for (one, other), speed in speeds.items())
        who = f"{host} is at fault, its links to other hosts are bad as well" if host else blame.value
        few = " with two hosts" if blame is Blame.UNKNOWN and not others else ""
        return LinkFinding(blame, host, f"{who}{few}: {links or 'nothing could be measured'}")

    if not others:
        return said(Blame.UNKNOWN)
    if bad(*ends) is not True:
        return said(Blame.SOUND if bad(*ends) is False else Blame.UNKNOWN)
    faults = [_mostly([bad(end, other) for other in others]) for end in ends]
    if faults[0] and faults[1]:
        return said(Blame.BOTH_ENDS)
    if faults[0] or faults[1]:
        return said(Blame.ONE_END, ends[0] if faults[0] else ends[1])
    return said(Blame.UNKNOWN if None in faults else Blame.LINK)


def _mostly(links: list[bool | None]) -> bool | None:
    """Return whether more than half of the known links are bad; None if none is known."""
    known = [each for each in links if each is not None]
    return 2 * sum(known) > len(known) if known else None


def _text(speed: LinkSpeed | None) -> str:
    return "unusable" if speed is None else f"{speed.slowest / 1e6:.4g} MB/s {speed.latency_s * 1e3:.2g} ms"
