"""When a running round takes more hosts in: at a checkpoint, and later each time for hosts that come and go. Pure."""

from __future__ import annotations

from unickpt.steering.state.membership import Host, Membership, Round, available

FRESH_S = (1.0, 10.0)  # after a commit: the framework writes files of its own, and then steps would be lost
OFTEN_S = 3.0  # between two commits, on average: then few steps are lost at any time
LEAVES = 2  # that a host may leave without a longer wait


def growth(state: Membership, round_: Round, now_s: float) -> str:
    """Return why a running round ends so that more hosts take part; '' if it goes on.

    A host that has left again and again waits for as long as a host that is out for a fault. A round that ends for another
    reason takes every host, without a wait.
    """
    limits = state.limits
    outside = [host for host in available(state) if round_.rank(host.name, host.incarnation) < 0]
    ready = [host for host in outside if waited_s(host, now_s) >= _settles_s(state, host.name)]
    more = limits.size(len(round_.members) + len(ready)) > len(round_.members)
    others_settle = any(waited_s(host, now_s) < limits.settle_s for host in outside)
    if not (limits.grow and ready and more) or others_settle:
        return ""
    if not at_boundary(state, round_, now_s) and min(waited_s(host, now_s) for host in ready) < limits.boundary_s:
        return ""
    return f"{', '.join(host.name for host in ready)} can be used"


def at_boundary(state: Membership, round_: Round, now_s: float) -> bool:
    """Return whether no steps are lost if the round ends now.

    The round has just begun or has just committed a checkpoint, or the job does not say when it saves. If it commits all the
    time, as with a save at every step, few steps are lost whenever it ends.
    """
    if state.commits < 0 or now_s - round_.since_s < state.limits.join_s:
        return True
    first_s, last_s = FRESH_S
    often = state.commits > 1 and now_s - round_.since_s < OFTEN_S * state.commits
    return state.committed_s is not None and (0.0 if often else first_s) <= now_s - state.committed_s <= last_s


def waited_s(host: Host, now_s: float) -> float:
    """Return for how long a host has asked for a round."""
    return 0.0 if host.arrived_s is None else now_s - host.arrived_s


def waits_for(state: Membership, name: str, now_s: float) -> str:
    """Return what a host outside of the running round waits for, for a person; '' if it is simply not needed."""
    host, round_ = state.hosts.get(name), state.round
    if host is None or host.arrived_s is None or round_ is None or state.limits.size(len(round_.members) + 1) == 0:
        return ""
    if name in state.suspects:
        return "measures itself before it is admitted"
    least_s = _settles_s(state, name)
    if least_s > max(state.limits.settle_s, waited_s(host, now_s)):
        return f"has left the job {state.losses[name]} times: waits for {least_s:.0f} s"
    more = state.limits.size(len(round_.members) + 1) > len(round_.members)
    return "waits for the next checkpoint" if more and state.limits.grow and not at_boundary(state, round_, now_s) else ""


def _settles_s(state: Membership, name: str) -> float:
    """Return for how long a host waits at least, outside of a running round."""
    losses = state.losses.get(name, 0)
    return state.limits.settle_s if losses < LEAVES else max(state.limits.settle_s, state.limits.out_for_s(losses - LEAVES))
