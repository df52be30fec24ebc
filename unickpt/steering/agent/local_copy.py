"""This agent's copy of the state of the job. The leader's copy is the state: it applies events and gives orders.

Thread-safe.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import replace

from unickpt.base.logs import logger, printable
from unickpt.steering.policy.decisions import Decisions
from unickpt.steering.policy.reports import HubReport
from unickpt.steering.publishing.chronicle import Chronicle
from unickpt.steering.state.link_verdicts import LinkFinding, Pair
from unickpt.steering.state.membership import Event, Joined, Membership
from unickpt.steering.state.transitions import transition
from unickpt.steering.wire.codec import SteeringError

WARN_S = 60.0


class LocalCopy:
    """Copy of the state, and what this agent knows about the leader.

    Args:
        incarnation: identifier of this process.
        decisions: the policy, used while this agent leads; None: verdicts lead to no orders.
        chronicle: keeps the history; None for none.

    Attributes:
        changed: condition and lock of all attributes.
        state: copy of the state; None before the first contact.
        leads: whether this agent is the leader.
        leader_address: address of the leader; '' if unknown.
        heard_s: time at which the leader was heard.
        promised: highest term that this agent has seen or agreed to.
        news: events that are reported again and again, because a repeated event changes nothing.
        kept: further ones, which the next news do not replace.
        report: report of the agent on this host that is to be sent to the leader.
    """

    def __init__(self, incarnation: str, decisions: Decisions | None = None, chronicle: Chronicle | None = None) -> None:
        self._incarnation, self._decisions, self._chronicle = incarnation, decisions, chronicle
        self.changed = threading.Condition()
        self.state: Membership | None = None
        self.leads = False
        self.leader_address = ""
        self.heard_s = 0.0
        self.promised = 0
        self.news: tuple[Event, ...] = ()
        self.kept: tuple[Event, ...] = ()
        self.report: HubReport | None = None
        self._logged = -1  # number of the last order that was logged
        self._warned_s = -WARN_S

    def read(self) -> Membership | None:
        """Return the copy."""
        with self.changed:
            return self.state

    def wait(self, seen: Membership | None, timeout_s: float) -> Membership | None:
        """Return the state as soon as it differs from ``seen``, or after a time."""
        with self.changed:
            self.changed.wait_for(lambda: self.state is not seen, timeout_s)
            return self.state

    def say(self, *news: Event) -> None:
        """Set the events that are reported again and again, because a repeated event changes nothing."""
        with self.changed:
            self.news = news
            if self.leads:
                self.apply(news)

    def keep(self, event: Event) -> None:
        """Set the event of its kind that is reported again and again beside the news."""
        with self.changed:
            self.kept = (*(each for each in self.kept if type(each) is not type(event)), event)
            if self.leads:
                self.apply(self.kept)

    def order(self, events: Iterable[Event]) -> Membership:
        """Apply orders and return the state. Only the leader can.

        Raises:
            SteeringError: this agent does not lead.
        """
        with self.changed:
            if not self.leads or self.state is None:
                raise SteeringError("only the leader applies orders")
            self.apply(events)
            return self.state

    def found(self, report: HubReport) -> None:
        """Take a report of the agent on this host: decide about it, or keep it for the leader."""
        with self.changed:
            if self.leads:
                self.decide(report)
            else:
                self.report = report
                if self._chronicle is not None:
                    self._chronicle.reported(report)

    def taken(self) -> HubReport | None:
        """Return the report for the leader, once."""
        with self.changed:
            report, self.report = self.report, None
            return report

    def decide(self, report: HubReport) -> None:
        """Apply the policy as the leader. Never raises: without orders, a healthy run goes on."""
        with self.changed:
            if self._chronicle is not None:
                self._chronicle.reported(report)
            if self._decisions is None or self.state is None:
                return
            try:
                self.apply(self._decisions.take(report, self.state, time.monotonic()))
            except Exception as err:
                if time.monotonic() - self._warned_s > WARN_S:
                    self._warned_s = time.monotonic()
                    logger.warning(
                        "unickpt: steering: the policy failed, so it gives no order. Training is not affected (%s: %s)",
                        type(err).__name__,
                        printable(str(err)),
                    )

    def wanted_check(self, wait_s: float) -> tuple[Pair, Membership, float] | None:
        """Return the ends of a link that the leader checks next, the state and the time limit; None without one in time."""
        if self._decisions is None:
            time.sleep(wait_s)
            return None
        try:
            ends, limit_s = self._decisions.wanted.get(timeout=wait_s)
        except queue.Empty:
            return None
        state = self.read()
        return (ends, state, limit_s) if state is not None else None

    def checked(self, ends: Pair, finding: LinkFinding) -> None:
        """Take the result of a check of links."""
        with self.changed:
            if self.leads and self.state is not None and self._decisions is not None:
                self.apply(self._decisions.checked(ends, finding, self.state))

    # ------------------------------------------------------------ changes

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events as the leader. The caller holds the lock."""
        if self.state is None:
            return
        before, now_s = self.state, time.monotonic()
        for event in events:
            self.state = transition(self.state, event, now_s)
        if self.state.version != before.version:
            if self.state.reason != before.reason and self.state.reason:
                logger.info("unickpt: steering: the round ends: %s", printable(self.state.reason))
            self._note(before)
            self.changed.notify_all()

    def adopt(self, state: Membership, address: str) -> None:
        """Take over the state that a leader has sent."""
        with self.changed:
            if self.state is None or (state.term, state.version) != (self.state.term, self.state.version):
                before, self.state = self.state, state
                self._note(before)
                self.changed.notify_all()
            self.promised = max(self.promised, state.term)
            self.leader_address, self.heard_s = address, time.monotonic()

    def follow(self, address: str) -> None:
        """Report to the leader at this address."""
        with self.changed:
            if self.leads:
                self._logged = -1  # another job than that which this agent has led for a moment: its orders are old
            self.leads, self.leader_address = False, address

    def step_down(self, term: int, address: str) -> None:
        """Follow the leader of a later term, if this agent leads. A job that has not begun here is forgotten."""
        with self.changed:
            if not self.leads or self.state is None or term <= self.state.term:
                return
            logger.info("unickpt: steering: the leader is at %s", printable(address))
            self.follow(address)
            self.promised = term
            self.state = None if self.state.round is None else replace(self.state, closed="")
            self.changed.notify_all()

    def lead(self, state: Membership, joined: Joined) -> None:
        """Become the leader of a job in this state."""
        with self.changed:
            before = self.state
            self.state, self.leads, self.leader_address = state, True, joined.address
            self.promised = max(self.promised, state.term)
            self._note(before)
            self.apply([joined, *self.news])
            self.changed.notify_all()

    def _note(self, before: Membership | None) -> None:
        """Log the orders that are new here, and tell the chronicle. A host that has just joined does not repeat old orders."""
        if self._chronicle is not None and self.state is not None:
            self._chronicle.changed(before, self.state)
        orders = self.state.orders if self.state is not None else ()
        newest = orders[-1].number if orders else 0
        if self._logged < 0:
            self._logged = newest
        for order in orders:
            if order.number > self._logged:
                logger.warning("unickpt: steering: order: %s", printable(order.text))
        self._logged = max(self._logged, newest)
