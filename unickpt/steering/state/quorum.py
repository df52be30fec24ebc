"""Which hosts may go on after a network failure. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from unickpt.steering.state.membership import Membership, holds_name, natural


def quorum(state: Membership) -> bool:
    """Return whether the hosts in contact may start a round without risk that others do so as well.

    After a network failure, two groups of hosts may each believe that the other is gone. Only one may go on, because both
    would write the same checkpoints. It is the group with more than half of the last round's members. Members that are known
    to have ended do not count. Of two halves, the one with the lowest rank goes on. ``Limits.lone`` disables the rule.
    """
    present = frozenset(name for name, incarnation in state.electorate if holds_name(state, name, incarnation))
    return state.limits.lone or not state.electorate or _majority([name for name, _ in state.electorate], present)


def may_lead(state: Membership, granted: frozenset[str], ended: frozenset[str]) -> bool:
    """Return whether a host may take over from a lost leader. The rule is that of ``quorum``.

    Args:
        state: newest copy of the state among the hosts that agree.
        granted: hosts that agree, and the one that asks.
        ended: hosts whose agents are proven to have ended.
    """
    asked = [name for name, _ in state.electorate] or sorted(state.hosts, key=natural)
    left = [name for name in asked if name not in ended]
    return state.limits.lone or not left or _majority(left, granted)


def _majority(names: Sequence[str], present: frozenset[str]) -> bool:
    count = sum(name in present for name in names)
    return 2 * count > len(names) or (2 * count == len(names) and names[0] in present)
