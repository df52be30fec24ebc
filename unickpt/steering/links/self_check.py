"""A host measures itself: in the background when it starts, and before it is admitted after a fault."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable

from unickpt.base.logs import logger, printable
from unickpt.diagnosis.agent.launch import run_isolated
from unickpt.steering.links.link_speed import measure
from unickpt.steering.links.self_measure import DEVICES
from unickpt.steering.state.membership import Host, JobPhase, Measured, Membership, natural
from unickpt.steering.state.scores import Score, best, failure, score_from
from unickpt.steering.wire.codec import SteeringError

MODULE = "unickpt.steering.links.self_measure"
LIMIT_S = 60.0  # of the process; a GPU needs seconds for its first use
LINK_S = 2.0
REPEATS, REPEAT_S = 3, 1.0  # of a measurement that is not good enough, and the pause before it is repeated
PARTNER_S = 60.0  # that a host waits for others when it starts
_LONGEST = 4096


class SelfCheck:
    """Measurements of this host, in threads. Only that which was asked for last has a result. No method raises.

    Args:
        key: key of the job.
        addresses: returns addresses at which this agent can reach itself. The first one that answers is measured.
        read: returns the state of the job.
        done: takes the result.
    """

    def __init__(
        self,
        key: bytes,
        addresses: Callable[[], list[str]],
        read: Callable[[], Membership | None],
        done: Callable[[Measured], None],
    ) -> None:
        self._key, self._addresses, self._read, self._done = key, addresses, read, done
        self._latest = -1  # number of the measurement that was asked for last; 0: the first one of this process
        self._lock = threading.Lock()

    def follow(self, state: Membership, name: str, incarnation: str) -> None:
        """Begin a measurement if the leader asks for one, or the first one of this process."""
        if not state.limits.self_check or state.limits.max_nodes == 1:
            return
        attempt = state.suspects.get(name, 0)
        with self._lock:
            if attempt == self._latest or (not attempt and self._latest > 0):
                return
            self._latest = attempt  # another leader, whose job is a new one, may count from 1 again
        threading.Thread(target=self._run, args=(name, incarnation, attempt), name="unickpt-self-check", daemon=True).start()

    def _run(self, name: str, incarnation: str, attempt: int) -> None:
        try:
            score = self._repeated(name, attempt)
        except Exception as err:  # not of the host
            logger.warning(
                "unickpt: steering: this host cannot measure itself: %s: %s", type(err).__name__, printable(str(err))
            )
            score = Score()
        if score.wrong:
            logger.warning("unickpt: steering: self-check of %s: %s", printable(name), printable(score.wrong))
        counts = self._tell(Measured(name, incarnation, attempt, score))
        if counts and not attempt and not score.wrong:
            with contextlib.suppress(Exception):  # as above, and said there
                self._confirm(name, incarnation, score)

    def _tell(self, found: Measured) -> bool:
        """Pass a result on, unless another one has been asked for since: it would take the place of that one's."""
        with self._lock:
            counts = found.check == self._latest
            if counts:
                self._done(found)
            return counts

    def _confirm(self, name: str, incarnation: str, score: Score) -> None:
        """At the start of a job: measure again if this host is not good enough beside the others. Once proves nothing."""
        state, end_s = self._read(), time.monotonic() + PARTNER_S
        if state is None or state.limits.start_check == "off":
            return
        while not self._all_measured():
            if time.monotonic() > end_s:
                return
            time.sleep(0.2)
        for _ in range(1, REPEATS):
            if not self._fails(name, score):
                return
            time.sleep(REPEAT_S)
            again = self._with_links(_of_process(devices=False), name, 0)
            score = again if again.wrong else best(score, again)
            if score.wrong:
                break
        if self._fails(name, score):
            self._tell(Measured(name, incarnation, 0, score, confirmed=True))

    def _all_measured(self) -> bool:
        state = self._read()
        return state is not None and len(state.hosts) > 1 and all(host in state.scores for host in state.hosts)

    def _repeated(self, name: str, attempt: int) -> Score:
        """Return the best of some measurements. A wrong result, or the first good enough measurement, is the last one."""
        found: Score | None = None
        for turn in range(REPEATS if attempt else 1):
            if turn:
                time.sleep(REPEAT_S)
            of_process = _of_process(devices=attempt > 0)
            score = self._with_links(of_process, name, attempt + turn)
            if of_process.wrong:
                return score
            found = score if found is None else best(found, score)
            if not self._fails(name, found):
                break
        assert found is not None
        return found

    def _fails(self, name: str, score: Score) -> bool:
        """Return whether the leader will find this host not good enough."""
        state = self._read()
        others = [each for other, each in state.scores.items() if other != name] if state is not None else []
        return bool(failure(score, others, state.limits.check_share if state is not None else 0.0))

    def _with_links(self, score: Score, name: str, attempt: int) -> Score:
        loopback, wrong = self._speed(self._addresses())
        if wrong:
            score = score._replace(wrong=score.wrong or f"loop-back: {wrong}")
        speed, wrong = self._speed([partner.address for partner in self._partners(name, attempt)])
        if wrong and attempt:
            score = score._replace(wrong=score.wrong or f"no link to other hosts: {wrong}")
        return score._replace(loopback=loopback, link=speed)

    def _speed(self, addresses: list[str]) -> tuple[float, str]:
        """Return GB/s to the first agent that can be reached, and why there is none."""
        wrong = ""
        for address in addresses:
            try:
                return 1e-9 * measure(address, self._key, LINK_S).slowest, ""
            except SteeringError:
                continue  # it serves others, or is no agent of the job
            except (OSError, EOFError) as err:
                wrong = f"{address}: {type(err).__name__}: {err}"
        return 0.0, wrong

    def _partners(self, name: str, attempt: int) -> list[Host]:
        """Return the hosts to which the link is measured, in order: another one at each attempt."""
        end_s = time.monotonic() + (0.0 if attempt else PARTNER_S)
        while True:
            state = self._read()
            others = partners(state, name, attempt) if state is not None else []
            if others or time.monotonic() > end_s:
                return others[:2]
            time.sleep(0.2)


def partners(state: Membership, name: str, attempt: int) -> list[Host]:
    """Return the other hosts, members of a running round first, beginning with the one after this host. Pure."""
    running = state.round.members if state.round is not None and state.phase is JobPhase.RUNNING else ()
    names = [member for member, _ in running if member in state.hosts] or sorted(state.hosts, key=natural)
    if len(names) < 2 and name in names:
        return []
    at = names.index(name) + 1 if name in names else 0
    turned = [names[(at + attempt + step) % len(names)] for step in range(len(names))]
    return [state.hosts[each] for each in turned if each != name]


def _of_process(devices: bool) -> Score:
    """Return what the process measures. One that crashes or hangs is a finding.

    ``devices``: whether it uses GPUs. No workers must run, because they may need a GPU for themselves.
    """
    with run_isolated([DEVICES] if devices else [], module=MODULE, stdout=subprocess.PIPE) as process:
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=LIMIT_S)
            return Score(wrong=f"compute, memory and GPU could not be measured within {LIMIT_S:.0f} s")
    if process.returncode < 0:
        return Score(wrong=f"the process that measures compute, memory and GPU was ended by signal {-process.returncode}")
    compute, device, memory, wrong, busy = json.loads(said[:_LONGEST])
    return score_from([compute, device, memory, 0.0, 0.0, wrong, busy])
