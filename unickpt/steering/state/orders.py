"""Orders: what the policy, or a person, does to a running job. An order is a value, and acts as events of the membership."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from unickpt.steering.state.membership import NEVER_S, Admit, Close, Event, Membership, Park, Restart, natural


class Action(enum.Enum):
    """Kind of an order."""

    PARK = "park"  # take hosts out; their agents wait
    ADMIT = "admit"  # let parked hosts in again
    RESTART = "restart"  # start the workers again on the same hosts
    CHECK = "check"  # measure links, workers go on
    STOP = "stop"  # end the job on all hosts
    END = "end"  # tell all agents to end, as SIGTERM does: the workers can save together


@dataclass(frozen=True, slots=True)
class Order:
    """One order.

    Attributes:
        action: kind.
        hosts: hosts that it concerns; of CHECK, the ends of the link. Empty for RESTART and STOP.
        reason: row of the policy that made it, or the name of the person.
        evidence: text of the finding.
        for_s: of PARK, seconds until the host is admitted by itself; ``NEVER_S`` for no limit.
        ranks: ranks of workers that are killed, because they may not react to SIGTERM.
    """

    action: Action
    hosts: tuple[str, ...] = ()
    reason: str = ""
    evidence: str = ""
    for_s: float = NEVER_S
    ranks: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The order with its evidence, for the log."""
        whom = f" {', '.join(self.hosts)}" if self.hosts else ""
        limit = "" if self.for_s == NEVER_S else f" for {self.for_s:.0f} s"
        return f"{self.action.value}{whom}{limit}: {': '.join(filter(None, [self.reason, self.evidence]))}"


def events(order: Order, state: Membership) -> list[Event]:
    """Return the events that execute an order on a job in this state.

    A CHECK changes no membership, and on an END each agent acts by itself. A RESTART concerns the round of ``state``, so that
    an order that arrives late ends no later round.
    """
    why = ": ".join(filter(None, [order.reason, order.evidence]))
    if order.action is Action.PARK:
        return [Park(host, why, order.for_s) for host in order.hosts]
    if order.action is Action.ADMIT:
        return [Admit(host) for host in order.hosts]
    if order.action is Action.RESTART and state.round is not None:
        return [Restart(state.round.epoch, why)]
    return [Close(why)] if order.action is Action.STOP else []


def asked(action: object, host: object, by: object, state: Membership) -> Order:
    """Return the order of a person.

    Args:
        action: ``park``, ``admit`` or ``end``.
        host: name of the host; '' for ``end``.
        by: name of the person.
        state: state of the job.

    Raises:
        ValueError: there is no such order or host.
    """
    if action == Action.END.value and host == "" and isinstance(by, str):
        return Order(Action.END, (), f"asked by {by[:128]}")
    if action not in (Action.PARK.value, Action.ADMIT.value) or not isinstance(host, str) or not isinstance(by, str):
        raise ValueError("an order is park or admit, with a host, or end without one")
    known = {*state.hosts, *state.parked, *state.losses}
    if host not in known:
        raise ValueError(f"no host {host[:64]!r}; the job has {', '.join(sorted(known, key=natural))}")
    if action == Action.ADMIT.value and host not in state.parked:
        raise ValueError(f"{host} is not parked")
    return Order(Action(action), (host,), f"asked by {by[:128]}")


def is_to_end(state: Membership) -> bool:
    """Return whether a person has asked the whole job to end."""
    return any(order.action == Action.END.value for order in state.orders)


def consequence(state: Membership) -> str:
    """Return what a person must know about the hosts that are left; '' for nothing."""
    if is_to_end(state):
        return "the workers of all hosts get SIGTERM now, and have 30 s to save; the agents then end with exit code 143"
    left = sum(name not in state.parked for name in state.hosts)
    if state.limits.size(left):
        return ""
    return f"{left} hosts are left, and {state.limits.min_nodes} are needed: the job waits for more"
