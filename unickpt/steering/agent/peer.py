"""An agent's part in the membership: it reports to the leader, holds a copy of the state, and takes over from a lost leader.

Everything that blocks happens in threads. What torchrun's agent asks is answered from the copy, so that a slow network never
delays it.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from unickpt.base.logs import logger, printable
from unickpt.steering.agent.answers import POLL_S, Answers
from unickpt.steering.agent.listening import Listener
from unickpt.steering.agent.local_copy import LocalCopy
from unickpt.steering.links.link_check import check
from unickpt.steering.policy.decisions import Decisions
from unickpt.steering.policy.reports import report_as_json
from unickpt.steering.publishing.chronicle import Chronicle
from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import Event, Heard, Joined, Membership, Paused, Tick, TookOver, holds_name, successors
from unickpt.steering.state.quorum import may_lead
from unickpt.steering.state.transitions import transition
from unickpt.steering.wire.addresses import (
    LOOPBACKS,
    any_address,
    await_name,
    is_local,
    is_loopback,
    loopback_of,
    no_contact,
    way_to,
)
from unickpt.steering.wire.codec import Frames, SteeringError, dial, event_as_json, join_address, split_address, state_from_json
from unickpt.steering.wire.last_members import file_of, forget, recall, recall_names, remember
from unickpt.steering.wire.probing import DIAL_S, Probe, Proof

TICK_S = 0.1
RETRY_S = 0.3
OBJECT_S = 1.0  # interval at which a leader looks for another one at the endpoint
PAUSE_S = 3.0  # gap between ticks after which the leader does not trust silence
WARN_S = 60.0
NAMES = 100  # agents of one machine


class Peer:
    """One agent of a job. ``start`` it, and ``close`` it at the end.

    ``read``, ``wait``, ``say``, ``keep``, ``found`` and ``order`` are those of its copy of the state (``LocalCopy``).

    Args:
        name: wanted name of the host. If another process of the job has it, ``#2``, ``#3`` ... is added.
        endpoint: ``host:port`` where the first leader is found.
        limits: rules of the job; those of the first leader count.
        key: key of the job.
        local_address: name or address of this host for the others; '' to use the one that leads to the endpoint.
        decisions: the policy, used while this agent leads; None: verdicts lead to no orders.
        chronicle: keeps the history; None for none.
        name_s: longest time to wait until the name of the endpoint resolves.
    """

    def __init__(
        self, name: str, endpoint: str, limits: Limits, key: bytes, local_address: str = "",
        decisions: Decisions | None = None, chronicle: Chronicle | None = None, name_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._name_s = name_s
        self.name, self.incarnation = name, secrets.token_hex(8)
        self._endpoint, self._limits, self._key = endpoint, limits, key
        self._local_address = local_address
        self._copy = copy = LocalCopy(self.incarnation, decisions, chronicle)
        self.read, self.wait, self.say = copy.read, copy.wait, copy.say
        self.keep, self.found, self.order = copy.keep, copy.found, copy.order
        self._probe = Probe(key)
        self._answers = Answers(self._copy, self._probe, key, self.incarnation, lambda: self.address, limits.expiry_s)
        self._listener = Listener(key, self._answers.answer, self._answers.look_after)
        self._stopped = threading.Event()
        self._holds_endpoint = False
        self._next_look_s = 0.0  # at the endpoint, while another agent leads
        self._former: tuple[str, ...] = ()  # addresses of lost leaders, which may come back from a failed network
        self._warned_s = -WARN_S
        self._begun_s = time.monotonic()
        self._members = file_of(key, name, endpoint)
        self._remembered: frozenset[str] = frozenset()
        self.last_names = recall_names(self._members)  # of the other hosts of the last round, as far as this host remembers
        self.trouble = self.remedy = ""  # why no leader is found, and what to do about it
        self.address = ""
        self.loopbacks: list[str] = []  # at which this agent can reach itself, the first one that answers
        self.workers = 0  # of this host, for the table of hosts

    # ------------------------------------------------------------ what the handler uses

    def start(self) -> None:
        """Open the listener and start the threads.

        Raises:
            OSError: no port can be opened, or the name of the endpoint does not resolve in time.
        """
        host, port = split_address(self._endpoint)
        await_name(host, lambda: bool(recall(self._members)), self._name_s)
        own = self._local_address or way_to(host, port) or self._way_to_members() or any_address()
        wide = loopback_of(own) if is_loopback(host) and is_loopback(own) else ""
        listener = self._listener.open(wide, 0 if is_local(host) else port) or self._listener.open(wide, 0)
        if listener is None:
            raise OSError(f"no port can be opened at {wide or 'any address of this host'}")
        self.address = join_address(own, listener.getsockname()[1])
        self.loopbacks = [join_address(each, listener.getsockname()[1]) for each in ([wide] if wide else [*LOOPBACKS, own])]
        threading.Thread(target=self._live, name="unickpt-steering", daemon=True).start()

    def _way_to_members(self) -> str:
        """Return the address of this host that leads to the others of the last round; '' if none is known."""
        return next((own for each in recall(self._members) if (own := way_to(*split_address(each)))), "")

    @property
    def _identity(self) -> str:
        return f"{self.name} ({self.incarnation})"

    @property
    def leads(self) -> bool:
        """Whether this agent is the leader."""
        return self._copy.leads

    @property
    def refused(self) -> int:
        """Number of messages that were not authentic, or malformed."""
        return self._listener.refused

    def close(self, last: Event | None = None) -> None:
        """End, after a last event. Never raises."""
        if self._stopped.is_set():
            return
        copy = self._copy
        with contextlib.suppress(Exception):
            if last is not None and copy.leads:
                with copy.changed:
                    copy.apply([last])
                    others = copy.state is not None and len(copy.state.hosts) > 0
                time.sleep(2 * POLL_S if others else 0.0)  # so that the others hear it
            elif last is not None and copy.leader_address:
                request = {"kind": "report", "events": [event_as_json(last)], "seen": [0, 0]}
                self._probe.ask(copy.leader_address, request)
        self._stopped.set()
        self._listener.close()
        if copy.state is not None and copy.state.closed:
            forget(self._members)

    def _joined(self) -> Joined:
        return Joined(self.name, self.incarnation, self.address, self.workers)

    def _lead(self, state: Membership) -> None:
        self._copy.lead(state, self._joined())
        threading.Thread(target=self._object, name="unickpt-steering-endpoint", daemon=True).start()
        threading.Thread(target=self._check_links, name="unickpt-steering-links", daemon=True).start()

    # ------------------------------------------------------------ the thread

    def _live(self) -> None:
        while not self._stopped.is_set():
            try:
                self._remember()
                if self._copy.leads:
                    self._tick()
                elif self._copy.state is None and not self._copy.leader_address:
                    self._find()
                else:
                    self._report()
            except Exception as err:
                if not self._stopped.is_set():
                    logger.warning("unickpt: steering: %s: %s", type(err).__name__, printable(str(err)))
                self._stopped.wait(1.0)

    def _tick(self) -> None:
        last_s = time.monotonic()
        while self._copy.leads and not self._stopped.wait(TICK_S):
            now_s = time.monotonic()
            with self._copy.changed:
                late = [Paused()] if now_s - last_s > PAUSE_S else []
                self._copy.apply([*late, self._joined(), Heard(self.name, self.incarnation)])
                self._copy.apply([*self._copy.news, *self._copy.kept, Tick()])
            self._remember()
            last_s = now_s

    def _find(self) -> None:
        """Find the leader at the endpoint, or become the first one there."""
        host, port = split_address(self._endpoint)
        try:
            if port:
                answer = self._probe.greet(self._endpoint, "")
                self._copy.follow(answer.contact or self._endpoint)
                return
        except ConnectionRefusedError as err:
            self.trouble, self.remedy = no_contact(self._endpoint, err)
        except (EOFError, SteeringError) as err:
            self.trouble, self.remedy = no_contact(self._endpoint, err)
            self._stopped.wait(RETRY_S)
            return
        except OSError as err:  # its machine is dead, or the network is: the job may go on elsewhere
            self.trouble, self.remedy = no_contact(self._endpoint, err)
            if not self._follows_members():
                self._stopped.wait(RETRY_S)
            return
        if port and self._follows_members():
            return
        if port and not self._take_endpoint():
            self._stopped.wait(RETRY_S)
            return
        self.address = join_address(self._local_address or host, split_address(self.address)[1])
        logger.info("unickpt: steering: this agent leads, at %s", self._endpoint)
        self._lead(Membership(self._limits, self._identity, secrets.token_hex(8), gathering_s=time.monotonic()))

    def _remember(self) -> None:
        """Keep the addresses of the other hosts of the job, if they have changed."""
        state = self._copy.read()
        if state is None or state.round is None or state.closed:
            return
        others = frozenset(host.address for host in state.hosts.values() if host.incarnation != self.incarnation)
        if others and others != self._remembered:
            self._remembered = others
            remember(self._members, others, [name for name in state.hosts if name != self.name])

    def _follows_members(self) -> bool:
        """Ask the hosts that were last in this job. Follow their leader, or wait while they look for one.

        Otherwise two groups of hosts would run the job: they go on without the endpoint, and this process would begin there.

        Returns:
            Whether there is a leader, or there may soon be one.
        """
        known = recall(self._members)
        if not known:
            return False
        with ThreadPoolExecutor(max_workers=min(32, len(known))) as pool:
            answers = list(pool.map(lambda address: self._probe.look(address, ""), known))
        found = [answer for answer in answers if answer.contact not in ("", self.address, self._endpoint)]
        if found:
            leader = max(found, key=lambda answer: answer.term).contact
            logger.info("unickpt: steering: the job runs without its endpoint; its leader is at %s", printable(leader))
            self._copy.follow(leader)
            return True
        if any(answer.term for answer in answers) and time.monotonic() - self._begun_s < self._limits.expiry_s:
            self._stopped.wait(RETRY_S)
            return True
        return False

    def _take_endpoint(self) -> bool:
        """Listen at the endpoint, if it is on this machine and free."""
        host, port = split_address(self._endpoint)
        if not self._holds_endpoint and is_local(host):
            self._holds_endpoint = self._listener.open(loopback_of(host) if is_loopback(host) else "", port) is not None
        return self._holds_endpoint

    def _serve_endpoint(self) -> None:
        """While this agent follows a leader elsewhere: answer at the endpoint, where newcomers and the command line ask.

        The endpoint is free if its machine has returned to a job that went on without it.
        """
        now_s, port = time.monotonic(), split_address(self._endpoint)[1]
        if self._holds_endpoint or self._copy.state is None or now_s < self._next_look_s or not port:
            return
        self._next_look_s = now_s + OBJECT_S
        if self._take_endpoint():
            logger.info("unickpt: steering: this agent answers at the endpoint %s", self._endpoint)

    def _report(self) -> None:
        """Report to the leader until the connection breaks; then look for what has happened to it."""
        address, refused = self._copy.leader_address, False
        try:
            frames = dial(address, self._key, DIAL_S)
            try:
                while not self._stopped.is_set() and self._copy.leader_address == address:
                    if not self._report_once(frames, address):
                        return
            finally:
                frames.close()
        except ConnectionRefusedError:
            refused = True
        except (OSError, EOFError):
            pass
        if self._stopped.is_set() or self._copy.leader_address != address:
            return
        if self._copy.state is None:
            self._copy.follow("")
            self._stopped.wait(RETRY_S)
        elif refused or time.monotonic() - self._copy.heard_s > self._copy.state.limits.expiry_s / 2:
            self._succeed()
        else:
            self._stopped.wait(RETRY_S / 3)

    def _report_once(self, frames: Frames, address: str) -> bool:
        with self._copy.changed:
            news, state = (*self._copy.news, *self._copy.kept), self._copy.state
        events = [self._joined(), Heard(self.name, self.incarnation), *news]
        seen = [state.term, state.version] if state is not None else [0, 0]
        report = self._copy.taken()
        about = None if report is None else report_as_json(report)
        frames.send({"kind": "report", "events": [event_as_json(event) for event in events], "seen": seen, "found": about})
        answer = frames.receive()
        if "leader" in answer:  # not the leader
            elsewhere = str(answer["leader"])
            if elsewhere and elsewhere != address:
                self._copy.follow(elsewhere)
            elif state is None:
                self._copy.follow("")
                self._stopped.wait(RETRY_S)
            else:
                self._succeed()
            return False
        self._remember()
        self._serve_endpoint()
        if answer.get("state") is None:
            with self._copy.changed:
                self._copy.heard_s = time.monotonic()
            return True
        found = state_from_json(answer["state"], time.monotonic())
        if state is not None and (found.term < state.term or (found.term == state.term and found.leader != state.leader)):
            self._succeed()  # a new process that knows nothing answers at the leader's address
            return False
        if found.hosts.get(self.name) is not None and not holds_name(found, self.name, self.incarnation) and state is None:
            self._rename()
            return True
        self._copy.adopt(found, address)
        return True

    def _rename(self) -> None:
        base, _, number = self.name.partition("#")
        if int(number or 1) >= NAMES:
            raise SteeringError(f"{NAMES} agents have the name {base}: give each a name of its own, --rdzv-conf host=NAME")
        self.name = f"{base}#{int(number or 1) + 1}"

    # ------------------------------------------------------------ succession

    def _succeed(self) -> None:
        """The leader is lost. Become the leader, or follow the agent that does."""
        with self._copy.changed:
            state = self._copy.state
        if state is None or state.closed:
            self._stopped.wait(RETRY_S)
            return
        others = [host for name, host in state.hosts.items() if name != self.name]
        with ThreadPoolExecutor(max_workers=max(1, min(32, len(others)))) as pool:
            found = dict(
                zip(others, pool.map(lambda host: self._probe.look(host.address, host.incarnation), others), strict=True)
            )
        for host, answer in found.items():
            if answer.proof is Proof.ALIVE and answer.leads and answer.term >= max(state.term, self._copy.promised):
                self._copy.follow(host.address)
                return
            if answer.contact and answer.contact not in (self.address, self._copy.leader_address) and answer.term > state.term:
                self._copy.follow(answer.contact)
                return
        alive = {host.name for host, answer in found.items() if answer.proof is Proof.ALIVE}
        ended = frozenset(host.name for host, answer in found.items() if answer.proof is Proof.ENDED)
        order = [name for name in successors(state) if name in alive or name == self.name]
        if order[:1] != [self.name] or not self._claim(state, [host for host in others if host.name in alive], ended):
            self._stopped.wait(RETRY_S)

    def _claim(self, state: Membership, alive: list[Any], ended: frozenset[str]) -> bool:
        """Ask the others to agree, and take over with the newest copy of the state among them."""
        with self._copy.changed:
            term = max(self._copy.promised, state.term) + 1
            self._copy.promised = term
        granted, newest = {self.name}, state
        for host in alive:
            with contextlib.suppress(OSError, EOFError, SteeringError):
                answer = self._probe.ask(host.address, {"kind": "claim", "term": term, "address": self.address})
                if answer.get("granted") is True:
                    copy = state_from_json(answer["state"], time.monotonic()) if answer.get("state") else newest
                    granted.add(host.name)  # one whose copy cannot be read does not count
                    newest = max(newest, copy, key=lambda each: (each.term, each.version))
        if not may_lead(newest, frozenset(granted), ended) or term != self._copy.promised:
            if time.monotonic() - self._warned_s > WARN_S:
                self._warned_s = time.monotonic()
                logger.warning(
                    "unickpt: steering: the leader %s is lost, and too few of the other hosts can be reached to go on. "
                    "Running workers are left alone. See 'lone' in the options of steering",
                    printable(state.leader),
                )
            return False
        proven = frozenset(name for name in ended if newest.hosts.get(name) == state.hosts[name])
        self._former = (*self._former[-3:], self._copy.leader_address)
        logger.info("unickpt: steering: %s takes over from %s", self.name, printable(state.leader))
        now_s = time.monotonic()
        silent_s = now_s - self._copy.heard_s if newest.leader == state.leader else 0.0
        self._lead(transition(newest, TookOver(self._identity, term, proven, silent_s), now_s))
        return True

    def _check_links(self) -> None:
        """While this agent leads: check the links that the policy asks for. Training goes on meanwhile."""
        while self._copy.leads and not self._stopped.is_set():
            try:
                wanted = self._copy.wanted_check(OBJECT_S)
                if wanted is not None:
                    self._copy.checked(wanted[0], check(wanted[0], wanted[1], self._probe, wanted[2]))
            except Exception as err:
                logger.warning("unickpt: steering: a check of links failed: %s: %s", type(err).__name__, printable(str(err)))

    def _object(self) -> None:
        """While this agent leads: tell processes that do not know it where the leader is, and serve a free endpoint."""
        while self._copy.leads and not self._stopped.wait(OBJECT_S):
            fixed = [self._endpoint] if split_address(self._endpoint)[1] and not self._holds_endpoint else []
            for address in [*fixed, *self._former]:
                try:
                    if self._probe.greet(address, "").leads:
                        self._probe.ask(address, {"kind": "moved", "term": self._copy.promised, "address": self.address})
                except ConnectionRefusedError:
                    if address == self._endpoint:
                        self._take_endpoint()
                except (OSError, EOFError, SteeringError):
                    pass
