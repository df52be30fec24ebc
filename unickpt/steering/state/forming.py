"""A round that does not form: which hosts have come, which are missing, and what to look at. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import JobPhase, Membership, available, natural

MOST = 8  # names in a list
_LISTED = 100_000  # names that a list of nodes may stand for
_SLURM = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
_PARTS = re.compile(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*")


@dataclass(frozen=True, slots=True)
class Expected:
    """Hosts that should come.

    Attributes:
        names: their names; empty if they are not known.
        source: what names them.
    """

    names: tuple[str, ...] = ()
    source: str = ""


def expected_hosts(options: Mapping[str, Sequence[str]], environment: Mapping[str, str], last: Sequence[str]) -> Expected:
    """Return the hosts that should come, from the first source that knows them.

    Args:
        options: lists of the options of steering, by their name.
        environment: of the agent; Slurm names the hosts of a job.
        last: hosts of the last round, as far as this host remembers.
    """
    for option, names in options.items():
        if names:
            return Expected(tuple(names), f"--rdzv-conf {option}=")
    for variable in _SLURM:
        if names := nodes_of(environment.get(variable, "")):
            return Expected(names, variable)
    return Expected(tuple(last), "the last round") if last else Expected()


def nodes_of(text: str) -> tuple[str, ...]:
    """Return the names that a list of Slurm's stands for: ``node[1-3,7],gpu01`` for five; none if it cannot be read."""
    found: list[str] = []
    for part in _PARTS.findall(text):
        names = [""]
        for fixed, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", part.strip()):
            names = [name + fixed + middle for name in names for middle in (_numbers(ranges) if ranges else [""])]
            if len(names) + len(found) > _LISTED:
                return ()
        found += names
    return tuple(dict.fromkeys(name for name in found if name))


def _numbers(ranges: str) -> list[str]:
    found: list[str] = []
    for each in ranges.split(","):
        first, dash, last = each.partition("-")
        if dash and first.isdigit() and last.isdigit():
            if int(last) - int(first) > _LISTED:
                return []
            found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        else:
            found.append(each)
    return found


def absent(expected: Expected, there: Iterable[str]) -> list[str]:
    """Return the expected hosts that are not there. Domains and the numbers of several agents of a host do not count.

    If none of them is there, the hosts have other names than expected, and nothing is known.
    """
    known = {_short(name) for name in there}
    if not any(_short(name) in known for name in expected.names):
        return []
    return sorted((name for name in expected.names if _short(name) not in known), key=natural)


def _short(name: str) -> str:
    plain = name.partition("#")[0].lower()
    return plain if plain.replace(".", "").isdigit() or ":" in plain else plain.partition(".")[0]


def without_contact(name: str, trouble: str) -> str:
    """Return what is said on a host that has found no leader. ``trouble``: why, as far as it is known."""
    return f"{name} has no contact with the other hosts" + (f": {trouble}" if trouble else "")


def other_nodes(state: Membership, own: Limits) -> str:
    """Return how ``--nnodes`` of this host differs from that of the job, as a text; '' if it does not."""
    limits = state.limits
    if (own.min_nodes, own.max_nodes) == (limits.min_nodes, limits.max_nodes):
        return ""
    return f"this host was started with --nnodes {_nodes(own)}, and the job with --nnodes {_nodes(limits)}, which counts"


def gathering(state: Membership, expected: Expected, now_s: float, alone: str = "") -> tuple[str, str]:
    """Return what a job without a running round waits for, and what to do next; ('', '') if it waits for no host.

    Args:
        state: state of the job.
        expected: hosts that should come.
        now_s: time on this agent's clock.
        alone: the endpoint, if no other machine can reach it.
    """
    if state.phase is JobPhase.OPENING and state.round is not None:
        return _opening(state, now_s)
    if state.phase is not JobPhase.GATHERING or state.closed:
        return "", ""
    limits, there, ready = state.limits, sorted(state.hosts, key=natural), len(available(state))
    needed = min((size for size in limits.sizes if size >= limits.min_nodes), default=limits.min_nodes)
    said = [f"{len(there)} of {_bounds(needed, limits.max_nodes)} {_hosts(limits.max_nodes)} have come: {_some(there)}"]
    slow = sorted((host.name for host in state.hosts.values() if host.arrived_s is None), key=natural)
    out = sorted({*state.parked, *state.suspects} & set(state.hosts), key=natural)
    missing = absent(expected, there)
    said += [f"not ready, because their workers still end: {_some(slow)}"] * bool(slow)
    said += [f"parked, or not checked yet: {_some(out)}"] * bool(out)
    if missing:
        said.append(f"not come, of {expected.source}: {_some(missing)}")
    if ready >= needed:
        return "; ".join(said), ""
    if len(there) < needed and not missing:
        said.append(f"{needed - len(there)} more must come")
    return "; ".join(said), _next(missing, len(there) < needed, alone)


def _next(missing: Sequence[str], few: bool, alone: str) -> str:
    if missing:
        whom = _some(missing[:3])
        found = f"look whether torchrun runs on {whom}, at its log, and whether it has the same --rdzv-endpoint and --rdzv-id"
    elif few:
        found = (
            "look at the log of torchrun on each host that is not in this list: its last line says why it has not come. "
            "With --rdzv-conf hosts=NAME+NAME this line names it"
        )
    else:
        return ""
    return found + (
        f". {alone} is each machine itself: several machines need the name of one in --rdzv-endpoint" if alone else ""
    )


def _opening(state: Membership, now_s: float) -> tuple[str, str]:
    """Hosts that have come and cannot connect to the first one."""
    round_ = state.round
    assert round_ is not None
    late, first = [name for name, _ in round_.members if name not in round_.ready], round_.members[0][0]
    left_s = max(0.0, state.limits.arrive_s - (now_s - round_.since_s))
    if not round_.store:
        return f"{first} has not opened the store of the round yet", f"look at the log of torchrun on {first}"
    if not late:
        return "", ""
    host, _, port = round_.store.rpartition(":")
    return (
        f"{_some(late)} cannot connect to the store of the round at {round_.store} ({first}). The round waits {left_s:.0f} s "
        "more",
        f"type on {late[0]}: nc -vz {host.strip('[]')} {port}. A firewall lets only the port of the endpoint through, or the "
        "address is one of another network (--local-addr)",
    )


def _bounds(needed: int, most: int) -> str:
    return str(most) if needed == most else f"{needed} to {most}"


def _nodes(limits: Limits) -> str:
    return str(limits.max_nodes) if limits.min_nodes == limits.max_nodes else f"{limits.min_nodes}:{limits.max_nodes}"


def _hosts(count: int) -> str:
    return "host" if count == 1 else "hosts"


def _some(names: Collection[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MOST} more" if len(listed) > MOST else ""
    return f"{', '.join(listed[:MOST])}{more}" if listed else "none"
