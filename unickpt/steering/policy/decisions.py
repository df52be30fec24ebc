"""The leader's decisions: it applies the policy to the reports of the running round, and gives the orders."""

from __future__ import annotations

import queue
import secrets
from collections.abc import Iterable
from dataclasses import replace

from unickpt.base.options.steering import SteeringOptions
from unickpt.steering.policy.policy import Fault, Finding, History, decide
from unickpt.steering.policy.reports import HubReport
from unickpt.steering.state.link_verdicts import Blame, LinkFinding, Pair, pair
from unickpt.steering.state.membership import Event, JobPhase, Membership, Ordered, Reached, Round
from unickpt.steering.state.orders import Action, Order, events

NOTED_S = 60.0  # interval at which the step of the job is noted in the state
AGAIN_S = 600.0  # after which a link is checked again
_LONGER = 1.5  # a pause is noted if it is so many times as long as the longest one before


class Decisions:
    """Memory of the leader between reports, apart from the state of the job."""

    def __init__(self, options: SteeringOptions) -> None:
        self._options = options
        self._checks: dict[tuple[str, ...], tuple[float, LinkFinding | None]] = {}
        self.wanted: queue.SimpleQueue[tuple[Pair, float]] = queue.SimpleQueue()
        self._said: set[tuple[object, ...]] = set()
        self._noted_s = 0.0

    def take(self, report: HubReport, state: Membership, now_s: float) -> list[Event]:
        """Return the events of a report: orders, and progress. A report about another round has none."""
        round_ = state.round
        if state.closed or state.phase is not JobPhase.RUNNING or round_ is None or round_.epoch != report.epoch:
            return []
        progress = Reached(report.epoch, report.step, report.pause_s)
        found: list[Event] = []
        for order in decide(
            self._with_blame(report.findings, now_s, state), self._history(report, state, round_, now_s), state, self._options
        ):
            if order.action is Action.CHECK:
                self._checks[order.hosts] = (now_s, None)
                self.wanted.put((pair(*order.hosts), self._options.check_seconds))
            if self._options.act and order.action is not Action.CHECK:
                found += [progress, _ordered(order, order.text), *events(order, state)]
            else:
                found += self._once(order, report.epoch)
        if not found and self._is_news(progress, state, now_s):
            self._noted_s = now_s
            found = [progress]
        return found

    def checked(self, ends: Pair, finding: LinkFinding, state: Membership) -> list[Event]:
        """Take the result of a check of links, and return its log entry."""
        if ends in self._checks:
            self._checks[ends] = (self._checks[ends][0], finding)
        return [Ordered(secrets.token_hex(8), f"check of {ends[0]} and {ends[1]}: {finding.text}")] if state.round else []

    def _with_blame(self, findings: Iterable[Finding], now_s: float, state: Membership) -> list[Finding]:
        """Add the results of checks to findings about links. Old results are forgotten, so that a link is checked again."""
        self._checks = {ends: found for ends, found in self._checks.items() if now_s - found[0] < AGAIN_S}
        known = []
        for finding in findings:
            found = self._checks.get(tuple(sorted(finding.hosts)), (0.0, None))[1]
            if found is not None and finding.fault in (Fault.DEAD_LINK, Fault.SLOW_LINK):
                finding = replace(finding, blamed=_blamed(found, finding, self._options, state))
            known.append(finding)
        return known

    def _history(self, report: HubReport, state: Membership, round_: Round, now_s: float) -> History:
        fruitful = report.step > state.furthest or now_s - round_.since_s >= state.limits.fruitful_s
        return History(
            longest_pause_s=max(state.pause_s, report.pause_s),
            fruitless=0 if fruitful else state.fruitless + 1,
            evictions=state.evictions,
            checked=frozenset(self._checks),
        )

    def _once(self, order: Order, epoch: tuple[int, int]) -> list[Event]:
        """Return the log entry of an order that does not change the job, the first time in a round."""
        key = (epoch, order.action, order.hosts, order.reason)
        if key in self._said:
            return []
        self._said = {each for each in self._said if each[0] == epoch} | {key}
        text = order.text if order.action is Action.CHECK else f"not executed (act=false): {order.text}"
        return [_ordered(order, text, log_only=True)]

    def _is_news(self, progress: Reached, state: Membership, now_s: float) -> bool:
        """Return whether progress is to be noted in the state, which every host receives."""
        fruit = progress.step > state.furthest >= state.reached
        first = progress.step > state.reached == 0
        pause = progress.pause_s > _LONGER * max(state.pause_s, 1.0)
        return first or fruit or pause or (progress.step > state.reached and now_s - self._noted_s > NOTED_S)


def _blamed(found: LinkFinding, finding: Finding, options: SteeringOptions, state: Membership) -> str:
    """Return the host that a check blames, or that the option ``bad_link`` names in its place; '' for none."""
    if found.blame is not Blame.LINK or options.bad_link != "park" or state.round is None:
        return found.host
    names = [name for name, _ in state.round.members]
    return max(finding.hosts, key=lambda name: names.index(name) if name in names else -1)


def _ordered(order: Order, text: str, log_only: bool = False) -> Ordered:
    if log_only:
        action = order.action.value if order.action is Action.CHECK else ""
        return Ordered(secrets.token_hex(8), text, action=action, cause=order.reason)
    return Ordered(secrets.token_hex(8), text, order.ranks, order.action.value, order.reason)
