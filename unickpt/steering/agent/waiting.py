"""What a host that waits for a round says: at once enough to act on, and then rarely."""

from __future__ import annotations

import time

from unickpt.base.logs import logger, printable
from unickpt.steering.agent.peer import Peer
from unickpt.steering.state.admission import waits_for
from unickpt.steering.state.forming import Expected, gathering, other_nodes, without_contact
from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import Membership, Standing, standing

FIRST_S = 8.0  # that a host waits before it says for what
AGAIN_S, SAME_S = 15.0, 300.0  # after which it says something else, and the same


class WaitingNotice:
    """Says what one wait for a round is for.

    Args:
        peer: this agent's part in the membership.
        limits: rules that this host was started with.
        expected: hosts that should come.
        alone: the endpoint, if no other machine can reach it; ''.
    """

    def __init__(self, peer: Peer, limits: Limits, expected: Expected, alone: str = "") -> None:
        self._peer, self._limits, self._expected, self._alone = peer, limits, expected, alone
        self._began_s = self._said_s = time.monotonic()
        self._said, self._compared = "", False

    def begin(self) -> None:
        """A wait begins."""
        self._began_s, self._said = time.monotonic(), ""

    def look(self, state: Membership | None) -> None:
        """Say what is waited for, if it is time to."""
        now_s = time.monotonic()
        self._look_at_nodes(state)
        out = self._is_out(state)
        if not out and now_s - self._began_s < FIRST_S:
            return
        text, then = self.text(state)
        since_s = now_s - self._said_s
        if not text or (self._said and since_s < (SAME_S if text == self._said else 0.0 if out else AGAIN_S)):
            return
        self._said, self._said_s = text, now_s
        if out or not then:
            logger.info("unickpt: steering: waiting: %s", printable(text))
            return
        logger.warning(
            "unickpt: steering: no round has begun for %.0f s: %s. next: %s",
            now_s - self._began_s,
            printable(text),
            printable(then),
        )

    def _look_at_nodes(self, state: Membership | None) -> None:
        if state is not None and not self._compared:
            self._compared = True
            if differs := other_nodes(state, self._limits):
                logger.warning("unickpt: steering: %s. Use one command on all hosts", differs)

    def text(self, state: Membership | None) -> tuple[str, str]:
        """Return what is waited for, and what to do next; '' for nothing."""
        name = self._peer.name
        if state is None:
            return without_contact(name, self._peer.trouble), self._peer.remedy
        if name in state.parked:
            return f"{name} is parked: {state.parked[name].reason}", ""
        if self._is_out(state):
            return f"{name} is a spare" + (f": {waits}" if (waits := waits_for(state, name, time.monotonic())) else ""), ""
        return gathering(state, self._expected, time.monotonic(), self._alone)

    def _is_out(self, state: Membership | None) -> bool:
        """Whether this host waits while it is parked or a spare."""
        return state is not None and standing(state, self._peer.name) in (Standing.PARKED, Standing.SPARE)
