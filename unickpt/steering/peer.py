"""An agent's part in the membership: it reports to the leader, holds a copy of the state, and takes over from a lost leader.

Everything that blocks happens in threads of this module. What torchrun's agent asks is answered from the copy, so that a slow
network never delays it.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from unickpt.logs import printable
from unickpt.steering.codec import (
    Frames,
    SteeringError,
    accept,
    dial,
    event_as_json,
    event_from_json,
    join_address,
    split_address,
    state_as_json,
    state_from_json,
)
from unickpt.steering.membership import (
    Event,
    Heard,
    Joined,
    Left,
    Limits,
    Lost,
    Membership,
    Paused,
    Tick,
    TookOver,
    holds_name,
    may_lead,
    successors,
    transition,
)

logger = logging.getLogger("unickpt")

TICK_S = 0.1
POLL_S = 0.25  # that the leader keeps a report without news
PER_HOST_S = 0.001  # added to it for each host, so that one leader serves thousands
DIAL_S = 2.0
RETRY_S = 0.3
OBJECT_S = 1.0  # interval at which a leader looks for another one at the endpoint
PAUSE_S = 3.0  # gap between ticks after which the leader does not trust silence
WARN_S = 60.0
MOST_CONNECTIONS = 4096
NAMES = 100  # agents of one machine


class Proof(enum.Enum):
    """What a look at an agent's address shows."""

    ALIVE = "alive"
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a greeting.

    Attributes:
        proof: whether the process lives.
        term, version: of its copy of the state.
        leads: whether it is the leader.
        contact: address of the leader that it is in contact with; ''.
    """

    proof: Proof
    term: int = 0
    version: int = 0
    leads: bool = False
    contact: str = ""


class Peer:
    """One agent of a job. ``start`` it, and ``close`` it at the end.

    Args:
        name: wanted name of the host. If another process of the job has it, ``#2``, ``#3`` ... is added.
        endpoint: ``host:port`` where the first leader is found.
        limits: rules of the job; those of the first leader count.
        key: key of the job.
        local_address: name or address of this host for the others; '' to use the one that leads to the endpoint.
    """

    def __init__(self, name: str, endpoint: str, limits: Limits, key: bytes, local_address: str = "") -> None:
        self.name, self.incarnation = name, secrets.token_hex(8)
        self._wanted, self._endpoint, self._limits, self._key = name, endpoint, limits, key
        self._local_address = local_address
        self._changed = threading.Condition()
        self._state: Membership | None = None
        self._leads = False
        self._leader_address = ""
        self._heard_leader_s = 0.0
        self._promised = 0  # highest term that this agent has seen or agreed to
        self._news: tuple[Event, ...] = ()
        self._stopped = threading.Event()
        self._listeners: list[socket.socket] = []
        self._holds_endpoint = False
        self._former: tuple[str, ...] = ()  # addresses of lost leaders, which may come back from a failed network
        self._connections = 0
        self._warned_s = -WARN_S
        self.refused = 0  # messages that were not authentic
        self.address = ""

    # ------------------------------------------------------------ what the handler uses

    def start(self) -> None:
        """Open the listener and start the threads.

        Raises:
            OSError: no port can be opened.
        """
        host, port = split_address(self._endpoint)
        own = self._local_address or _way_to(host, port)
        wide = "127.0.0.1" if _is_loopback(host) and _is_loopback(own) else ""
        listener = self._listen(wide, 0 if _is_local(host) else port) or self._listen(wide, 0)
        if listener is None:
            raise OSError("no port can be opened")
        self.address = join_address(own, listener.getsockname()[1])
        threading.Thread(target=self._live, name="unickpt-steering", daemon=True).start()

    def read(self) -> Membership | None:
        """Return the copy of the state; None before the first contact."""
        with self._changed:
            return self._state

    def wait(self, seen: Membership | None, timeout_s: float) -> Membership | None:
        """Return the state as soon as it differs from ``seen``, or after a time."""
        with self._changed:
            self._changed.wait_for(lambda: self._state is not seen, timeout_s)
            return self._state

    def say(self, *news: Event) -> None:
        """Set the events that are reported again and again, because a repeated event changes nothing."""
        with self._changed:
            self._news = news
            if self._leads:
                self._apply(news)

    def order(self, events: Iterable[Event]) -> None:
        """Apply orders. Only the leader can.

        Raises:
            SteeringError: this agent does not lead.
        """
        with self._changed:
            if not self._leads:
                raise SteeringError("only the leader applies orders")
            self._apply(events)

    @property
    def _identity(self) -> str:
        return f"{self.name} ({self.incarnation})"

    @property
    def leads(self) -> bool:
        """Whether this agent is the leader."""
        return self._leads

    def close(self, last: Event | None = None) -> None:
        """End, after a last event. Never raises."""
        if self._stopped.is_set():
            return
        with contextlib.suppress(Exception):
            if last is not None and self._leads:
                with self._changed:
                    self._apply([last])
                    others = self._state is not None and len(self._state.hosts) > 0
                time.sleep(2 * POLL_S if others else 0.0)  # so that the others hear it
            elif last is not None and self._leader_address:
                self._ask(self._leader_address, {"kind": "report", "events": [event_as_json(last)], "seen": [0, 0]})
        self._stopped.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    # ------------------------------------------------------------ state

    def _apply(self, events: Iterable[Event]) -> None:
        """Apply events as the leader. The caller holds the lock."""
        if self._state is None:
            return
        before, now_s = self._state, time.monotonic()
        for event in events:
            self._state = transition(self._state, event, now_s)
        if self._state.version != before.version:
            if self._state.reason != before.reason and self._state.reason:
                logger.info("unickpt: steering: the round ends: %s", printable(self._state.reason))
            self._changed.notify_all()

    def _adopt(self, state: Membership, address: str) -> None:
        """Take over the state that a leader has sent."""
        with self._changed:
            if self._state is None or (state.term, state.version) != (self._state.term, self._state.version):
                self._state = state
                self._changed.notify_all()
            self._promised = max(self._promised, state.term)
            self._leader_address, self._heard_leader_s = address, time.monotonic()

    def _follow(self, address: str) -> None:
        with self._changed:
            self._leads, self._leader_address = False, address

    def _lead(self, state: Membership) -> None:
        with self._changed:
            self._state, self._leads, self._leader_address = state, True, self.address
            self._promised = max(self._promised, state.term)
            self._apply([Joined(self.name, self.incarnation, self.address), *self._news])
            self._changed.notify_all()
        threading.Thread(target=self._object, name="unickpt-steering-endpoint", daemon=True).start()

    # ------------------------------------------------------------ the thread

    def _live(self) -> None:
        while not self._stopped.is_set():
            try:
                if self._leads:
                    self._tick()
                elif self._state is None and not self._leader_address:
                    self._find()
                else:
                    self._report()
            except Exception as err:
                if not self._stopped.is_set():
                    logger.warning("unickpt: steering: %s: %s", type(err).__name__, printable(str(err)))
                self._stopped.wait(1.0)

    def _tick(self) -> None:
        last_s = time.monotonic()
        while self._leads and not self._stopped.wait(TICK_S):
            now_s = time.monotonic()
            with self._changed:
                late = [Paused()] if now_s - last_s > PAUSE_S else []
                self._apply([*late, Joined(self.name, self.incarnation, self.address), Heard(self.name, self.incarnation)])
                self._apply([*self._news, Tick()])
            last_s = now_s

    def _find(self) -> None:
        """Find the leader at the endpoint, or become the first one there."""
        host, port = split_address(self._endpoint)
        try:
            if port:
                answer = self._greet(self._endpoint, "")
                self._follow(answer.contact or self._endpoint)
                return
        except ConnectionRefusedError:
            pass
        except OSError:
            self._stopped.wait(RETRY_S)
            return
        if port and not self._take_endpoint():
            self._stopped.wait(RETRY_S)
            return
        self.address = join_address(self._local_address or host, split_address(self.address)[1])
        logger.info("unickpt: steering: this agent leads, at %s", self._endpoint)
        self._lead(Membership(self._limits, self._identity, gathering_s=time.monotonic()))

    def _take_endpoint(self) -> bool:
        """Listen at the endpoint, if it is on this machine and free."""
        host, port = split_address(self._endpoint)
        if not self._holds_endpoint and _is_local(host):
            self._holds_endpoint = self._listen("127.0.0.1" if _is_loopback(host) else "", port) is not None
        return self._holds_endpoint

    def _report(self) -> None:
        """Report to the leader until the connection breaks; then look for what has happened to it."""
        address, refused = self._leader_address, False
        try:
            frames = dial(address, self._key, DIAL_S)
            try:
                while not self._stopped.is_set() and self._leader_address == address:
                    if not self._report_once(frames, address):
                        return
            finally:
                frames.close()
        except ConnectionRefusedError:
            refused = True
        except (OSError, EOFError):
            pass
        if self._stopped.is_set() or self._leader_address != address:
            return
        if self._state is None:
            self._follow("")
            self._stopped.wait(RETRY_S)
        elif refused or time.monotonic() - self._heard_leader_s > self._state.limits.expiry_s / 2:
            self._succeed()
        else:
            self._stopped.wait(RETRY_S / 3)

    def _report_once(self, frames: Frames, address: str) -> bool:
        with self._changed:
            news, state = self._news, self._state
        events = [Joined(self.name, self.incarnation, self.address), Heard(self.name, self.incarnation), *news]
        seen = [state.term, state.version] if state is not None else [0, 0]
        frames.send({"kind": "report", "events": [event_as_json(event) for event in events], "seen": seen})
        answer = frames.receive()
        if "leader" in answer:  # not the leader
            elsewhere = str(answer["leader"])
            if elsewhere and elsewhere != address:
                self._follow(elsewhere)
            elif state is None:
                self._follow("")
                self._stopped.wait(RETRY_S)
            else:
                self._succeed()
            return False
        if answer.get("state") is None:
            with self._changed:
                self._heard_leader_s = time.monotonic()
            return True
        found = state_from_json(answer["state"], time.monotonic())
        if state is not None and (found.term < state.term or (found.term == state.term and found.leader != state.leader)):
            self._succeed()  # a new process that knows nothing answers at the leader's address
            return False
        if found.hosts.get(self.name) is not None and not holds_name(found, self.name, self.incarnation) and state is None:
            self._rename()
            return True
        self._adopt(found, address)
        return True

    def _rename(self) -> None:
        base, _, number = self.name.partition("#")
        if int(number or 1) >= NAMES:
            raise SteeringError(f"{NAMES} agents have the name {base}: give each a name of its own, --rdzv-conf host=NAME")
        self.name = f"{base}#{int(number or 1) + 1}"

    # ------------------------------------------------------------ succession

    def _succeed(self) -> None:
        """The leader is lost. Become the leader, or follow the agent that does."""
        with self._changed:
            state = self._state
        if state is None or state.closed:
            self._stopped.wait(RETRY_S)
            return
        others = [host for name, host in state.hosts.items() if name != self.name]
        with ThreadPoolExecutor(max_workers=max(1, min(32, len(others)))) as pool:
            found = dict(zip(others, pool.map(lambda host: self._look(host.address, host.incarnation), others), strict=True))
        for host, answer in found.items():
            if answer.proof is Proof.ALIVE and answer.leads and answer.term >= max(state.term, self._promised):
                self._follow(host.address)
                return
            if answer.contact and answer.contact not in (self.address, self._leader_address) and answer.term > state.term:
                self._follow(answer.contact)
                return
        alive = {host.name for host, answer in found.items() if answer.proof is Proof.ALIVE}
        ended = frozenset(host.name for host, answer in found.items() if answer.proof is Proof.ENDED)
        order = [name for name in successors(state) if name in alive or name == self.name]
        if order[:1] != [self.name] or not self._claim(state, [host for host in others if host.name in alive], ended):
            self._stopped.wait(RETRY_S)

    def _claim(self, state: Membership, alive: list[Any], ended: frozenset[str]) -> bool:
        """Ask the others to agree, and take over with the newest copy of the state among them."""
        with self._changed:
            term = max(self._promised, state.term) + 1
            self._promised = term
        granted, newest = {self.name}, state
        for host in alive:
            with contextlib.suppress(OSError, EOFError, SteeringError):
                answer = self._ask(host.address, {"kind": "claim", "term": term, "address": self.address})
                if answer.get("granted") is True:
                    granted.add(host.name)
                    copy = state_from_json(answer["state"], time.monotonic()) if answer.get("state") else newest
                    newest = max(newest, copy, key=lambda each: (each.term, each.version))
        if not may_lead(newest, frozenset(granted), ended) or term != self._promised:
            if time.monotonic() - self._warned_s > WARN_S:
                self._warned_s = time.monotonic()
                logger.warning(
                    "unickpt: steering: the leader %s is lost, and too few of the other hosts can be reached to go on. "
                    "Running workers are left alone. See 'lone' in the options of steering",
                    printable(state.leader),
                )
            return False
        proven = frozenset(name for name in ended if newest.hosts.get(name) == state.hosts[name])
        self._former = (*self._former[-3:], self._leader_address)
        logger.info("unickpt: steering: %s takes over from %s", self.name, printable(state.leader))
        self._lead(transition(newest, TookOver(self._identity, term, proven), time.monotonic()))
        return True

    def _object(self) -> None:
        """While this agent leads: tell processes that do not know it where the leader is, and serve a free endpoint."""
        while self._leads and not self._stopped.wait(OBJECT_S):
            fixed = [self._endpoint] if split_address(self._endpoint)[1] and not self._holds_endpoint else []
            for address in [*fixed, *self._former]:
                try:
                    if self._greet(address, "").leads:
                        self._ask(address, {"kind": "moved", "term": self._promised, "address": self.address})
                except ConnectionRefusedError:
                    if address == self._endpoint:
                        self._take_endpoint()
                except (OSError, EOFError, SteeringError):
                    pass

    # ------------------------------------------------------------ requests

    def _ask(self, address: str, request: dict[str, Any]) -> dict[str, Any]:
        frames = dial(address, self._key, DIAL_S)
        try:
            frames.send(request)
            return frames.receive()
        finally:
            frames.close()

    def _greet(self, address: str, incarnation: str) -> Answer:
        answer = self._ask(address, {"kind": "hello"})
        same = not incarnation or answer.get("incarnation") == incarnation
        return Answer(
            Proof.ALIVE if same else Proof.ENDED, int(answer.get("term", 0)), int(answer.get("version", 0)),
            answer.get("leads") is True, str(answer.get("contact", "")),
        )  # fmt: skip

    def _look(self, address: str, incarnation: str) -> Answer:
        """Return whether a process lives. Only its own machine can prove that it does not."""
        try:
            return self._greet(address, incarnation)
        except ConnectionRefusedError:
            return Answer(Proof.ENDED)
        except (OSError, EOFError, SteeringError, ValueError, TypeError):
            return Answer(Proof.UNKNOWN)

    # ------------------------------------------------------------ listening

    def _listen(self, host: str, port: int) -> socket.socket | None:
        try:
            listener = socket.create_server((host, port), backlog=128)
        except OSError:
            return None
        self._listeners.append(listener)
        threading.Thread(target=self._accept, args=(listener,), name="unickpt-steering-listener", daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if self._connections >= MOST_CONNECTIONS:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="unickpt-steering-serves", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of one connection. When an agent's connection ends, look whether the agent has ended."""
        reporter: Joined | None = None
        self._connections += 1
        try:
            frames = accept(connection, self._key, secrets.token_hex(16), timeout_s=30.0)
            while not self._stopped.is_set():
                request = frames.receive()
                events = [event_from_json(value) for value in request.get("events", [])]
                reporter = next((event for event in events if isinstance(event, Joined)), reporter)
                frames.send(self._answer(request, events))
        except SteeringError as err:
            self.refused += 1
            if self.refused in (1, 10, 100) or self.refused % 1000 == 0:
                logger.warning("unickpt: steering: refused message %d: %s", self.refused, printable(str(err)))
        except (OSError, EOFError, ValueError):
            pass
        finally:
            self._connections -= 1
            connection.close()
        if reporter is not None and self._leads and not self._stopped.is_set():
            self._look_after(reporter)

    def _look_after(self, reporter: Joined, pauses_s: tuple[float, ...] = (0.0, 0.2, 0.5, 1.0)) -> None:
        for pause_s in pauses_s:
            if self._stopped.wait(pause_s):
                return
            proof = self._look(reporter.address, reporter.incarnation).proof
            if proof is Proof.ENDED:
                with self._changed:
                    if self._leads:
                        self._apply([Lost(reporter.name, reporter.incarnation)])
            if proof is not Proof.UNKNOWN:
                return

    def _answer(self, request: dict[str, Any], events: list[Event]) -> dict[str, Any]:
        kinds: dict[Any, Callable[[], dict[str, Any]]] = {
            "report": lambda: self._answer_report(request, events),
            "hello": self._answer_hello,
            "claim": lambda: self._answer_claim(int(request["term"]), str(request["address"])),
            "moved": lambda: self._answer_moved(int(request["term"]), str(request["address"])),
        }
        if request.get("kind") not in kinds:
            raise SteeringError(f"unknown request {str(request.get('kind'))[:40]!r}")
        try:
            return kinds[request["kind"]]()
        except (KeyError, TypeError, ValueError) as err:
            raise SteeringError(f"malformed request: {type(err).__name__}") from None

    def _answer_report(self, request: dict[str, Any], events: list[Event]) -> dict[str, Any]:
        term, version = request["seen"]
        self._make_room(events)
        with self._changed:
            if not self._leads or self._state is None:
                return {"leader": self._leader_address if not self._leads else ""}
            self._apply(events)
            poll_s = POLL_S + PER_HOST_S * len(self._state.hosts)
            leaving = any(isinstance(event, Left) for event in events)
            if not leaving:
                self._changed.wait_for(lambda: not self._leads or self._newer((term, version)), poll_s)
            if not self.leads:
                return {"leader": self._leader_address}
            state = self._state if self._newer((term, version)) else None
        return {"state": None if state is None else state_as_json(state, time.monotonic())}

    def _make_room(self, events: list[Event]) -> None:
        """If an agent has been started again before the end of the one before it was noticed: notice it now."""
        state = self._state
        for event in events if self._leads and state is not None else []:
            known = state.hosts.get(event.name) if isinstance(event, Joined) and state is not None else None
            if isinstance(event, Joined) and known is not None and known.incarnation != event.incarnation:
                self._look_after(Joined(known.name, known.incarnation, known.address), pauses_s=(0.0,))

    def _newer(self, seen: tuple[Any, Any]) -> bool:
        return self._state is not None and (self._state.term, self._state.version) != seen

    def _answer_hello(self) -> dict[str, Any]:
        with self._changed:
            state = self._state
            heard = time.monotonic() - self._heard_leader_s
            contact = self._leader_address if state is not None and heard < state.limits.expiry_s / 2 else ""
            return {
                "incarnation": self.incarnation, "leads": self._leads, "contact": self.address if self._leads else contact,
                "term": state.term if state else 0, "version": state.version if state else 0,
            }  # fmt: skip

    def _answer_claim(self, term: int, address: str) -> dict[str, Any]:
        """Agree to a new leader, unless this agent leads or has just heard from the leader, or has agreed to another."""
        with self._changed:
            expiry_s = self._limits.expiry_s if self._state is None else self._state.limits.expiry_s
            hears = time.monotonic() - self._heard_leader_s < expiry_s / 2
            if self._leads or term <= self._promised:
                return {"granted": False}
            leader = self._leader_address
        if hears and self._look(leader, "").proof is not Proof.ENDED:
            return {"granted": False}
        with self._changed:
            if self._leads or term <= self._promised:
                return {"granted": False}
            self._promised, self._leader_address = term, address
            state = self._state
        return {"granted": True, "state": state_as_json(state, time.monotonic()) if state is not None else None}

    def _answer_moved(self, term: int, address: str) -> dict[str, Any]:
        """A leader of a later term exists: follow it."""
        with self._changed:
            if self._leads and self._state is not None and term > self._state.term:
                logger.info("unickpt: steering: the leader is at %s", printable(address))
                self._leads, self._leader_address, self._promised = False, address, term
                self._state = None if self._state.round is None else replace(self._state, closed="")
                self._changed.notify_all()
        return {}


# ---------------------------------------------------------------- addresses


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _is_local(host: str) -> bool:
    """Return whether a name is one of this machine: only then can a socket be bound to it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _way_to(host: str, port: int) -> str:
    """Return the address of this machine that leads to a host. Of the host itself, its name."""
    if _is_loopback(host):
        return "127.0.0.1"
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                found = str(probe.getsockname()[0])
                return host if _is_loopback(found) else found
    return socket.gethostname()
