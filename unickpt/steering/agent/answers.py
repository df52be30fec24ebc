"""Answers of an agent to the requests of other agents, and of the command line."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from unickpt.steering.agent.local_copy import LocalCopy
from unickpt.steering.links import link_check
from unickpt.steering.policy.reports import report_from_json
from unickpt.steering.state import orders
from unickpt.steering.state.membership import PERSON, Event, Joined, Left, Lost, Ordered
from unickpt.steering.wire.codec import SteeringError, state_as_json
from unickpt.steering.wire.probing import Probe, Proof

POLL_S = 0.25  # that the leader keeps a report without news
PER_HOST_S = 0.001  # added to it for each host, so that one leader serves thousands


class Answers:
    """Answers from this agent's copy of the state.

    Args:
        copy: the copy.
        probe: looks at other agents.
        key: key of the job.
        incarnation: identifier of this process.
        address: returns the address of this agent.
        expiry_s: time after which a silent leader is lost, before the state is known.
    """

    def __init__(
        self, copy: LocalCopy, probe: Probe, key: bytes, incarnation: str, address: Callable[[], str], expiry_s: float
    ) -> None:
        self._copy, self._probe, self._incarnation, self._address = copy, probe, incarnation, address
        self._key, self._expiry_s = key, expiry_s

    def answer(self, request: dict[str, Any], events: list[Event]) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            SteeringError: the request is unknown or malformed.
        """
        kinds: dict[Any, Callable[[], dict[str, Any]]] = {
            "report": lambda: self._report(request, events),
            "hello": self._hello,
            "hosts": self._hosts,
            "measure": lambda: link_check.answer(request, self._copy.read(), self._key),
            "order": lambda: self._order(request),
            "claim": lambda: self._claim(int(request["term"]), str(request["address"])),
            "moved": lambda: self._moved(int(request["term"]), str(request["address"])),
        }
        kind = request.get("kind")
        if not isinstance(kind, str) or kind not in kinds:
            raise SteeringError(f"unknown request {str(kind)[:40]!r}")
        try:
            return kinds[kind]()
        except (KeyError, TypeError, ValueError, OverflowError) as err:
            raise SteeringError(f"malformed request: {type(err).__name__}") from None

    # ------------------------------------------------------------ reports

    def _report(self, request: dict[str, Any], events: list[Event]) -> dict[str, Any]:
        term, version = request["seen"]
        found = None if request.get("found") is None else report_from_json(request["found"])
        self._make_room(events)
        copy = self._copy
        with copy.changed:
            if not copy.leads or copy.state is None:
                return {"leader": copy.leader_address if not copy.leads else ""}
            copy.apply(events)
            if found is not None:
                copy.decide(found)
            poll_s = POLL_S + PER_HOST_S * len(copy.state.hosts)
            leaving = any(isinstance(event, Left) for event in events)
            if not leaving:
                copy.changed.wait_for(lambda: not copy.leads or self._newer((term, version)), poll_s)
            if not self._leads():
                return {"leader": copy.leader_address}
            state = copy.state if self._newer((term, version)) else None
        return {"state": None if state is None else state_as_json(state, time.monotonic())}

    def _leads(self) -> bool:
        return self._copy.leads

    def _newer(self, seen: tuple[Any, Any]) -> bool:
        state = self._copy.state
        return state is not None and (state.term, state.version) != seen

    def _make_room(self, events: list[Event]) -> None:
        """If an agent has been started again before the end of the one before it was noticed: notice it now."""
        state = self._copy.state
        for event in events if self._copy.leads and state is not None else []:
            known = state.hosts.get(event.name) if isinstance(event, Joined) and state is not None else None
            if isinstance(event, Joined) and known is not None and known.incarnation != event.incarnation:
                self.look_after(Joined(known.name, known.incarnation, known.address), pauses_s=(0.0,))

    def look_after(self, reporter: Joined, pauses_s: tuple[float, ...] = (0.0, 0.2, 0.5, 1.0)) -> None:
        """When an agent's connection has ended, look whether the agent has ended."""
        for pause_s in pauses_s if self._copy.leads else ():
            time.sleep(pause_s)
            proof = self._probe.look(reporter.address, reporter.incarnation).proof
            if proof is Proof.ENDED:
                with self._copy.changed:
                    if self._copy.leads:
                        self._copy.apply([Lost(reporter.name, reporter.incarnation)])
            if proof is not Proof.UNKNOWN:
                return

    # ------------------------------------------------------------ the command line

    def _hosts(self) -> dict[str, Any]:
        """Return the state from the leader, and from another agent the leader's address."""
        with self._copy.changed:
            if not self._copy.leads or self._copy.state is None:
                return {"leader": self._copy.leader_address}
            return {"state": state_as_json(self._copy.state, time.monotonic())}

    def _order(self, request: dict[str, Any]) -> dict[str, Any]:
        """Park or admit a host as a person has asked."""
        with self._copy.changed:
            if not self._copy.leads or self._copy.state is None:
                return {"leader": self._copy.leader_address}
            try:
                order = orders.asked(request["action"], request["host"], request["by"], self._copy.state)
            except ValueError as err:
                return {"error": str(err)}
            log = Ordered(str(request["id"])[:64], order.text, action=order.action.value, cause=PERSON)
            state = self._copy.order([log, *orders.events(order, self._copy.state)])
            return {"done": order.text, "note": orders.consequence(state)}

    # ------------------------------------------------------------ succession

    def _hello(self) -> dict[str, Any]:
        copy = self._copy
        with copy.changed:
            state = copy.state
            heard = time.monotonic() - copy.heard_s
            contact = copy.leader_address if state is not None and heard < state.limits.expiry_s / 2 else ""
            return {
                "incarnation": self._incarnation,
                "leads": copy.leads,
                "contact": self._address() if copy.leads else contact,
                "term": state.term if state else 0,
                "version": state.version if state else 0,
            }

    def _claim(self, term: int, address: str) -> dict[str, Any]:
        """Agree to a new leader, unless this agent leads or has just heard from the leader, or has agreed to another."""
        copy = self._copy
        with copy.changed:
            expiry_s = self._expiry_s if copy.state is None else copy.state.limits.expiry_s
            hears = time.monotonic() - copy.heard_s < expiry_s / 2
            if copy.leads or term <= copy.promised:
                return {"granted": False}
            leader = copy.leader_address
        if hears and self._probe.look(leader, "").proof is not Proof.ENDED:
            return {"granted": False}
        with copy.changed:
            if copy.leads or term <= copy.promised:
                return {"granted": False}
            copy.promised, copy.leader_address = term, address
            state = copy.state
        return {"granted": True, "state": state_as_json(state, time.monotonic()) if state is not None else None}

    def _moved(self, term: int, address: str) -> dict[str, Any]:
        """A leader of a later term exists: follow it."""
        self._copy.step_down(term, address)
        return {}
