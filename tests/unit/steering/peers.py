"""Agents of one job in this process, over real connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from unickpt.steering.agent.peer import Peer
from unickpt.steering.policy.decisions import Decisions
from unickpt.steering.publishing.chronicle import Chronicle
from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import Arrived, Heard, JobPhase, Opened, Ready
from unickpt.steering.wire.codec import join_address, key_of
from unickpt.testing.launch import free_port

KEY = key_of("job")


class Job:
    """Peers of one job."""

    def __init__(self, limits: Limits, decisions: Callable[[], Decisions] | None = None, key: bytes = KEY) -> None:
        self.limits, self.endpoint = limits, f"localhost:{free_port()}"
        self.decisions, self.key = decisions, key
        self.peers: list[Peer] = []

    def start(self, name: str, chronicle: Chronicle | None = None, local: str = "") -> Peer:
        decisions = self.decisions() if self.decisions is not None else None
        peer = Peer(name, self.endpoint, self.limits, self.key, local, decisions, chronicle)
        peer.start()
        self.peers.append(peer)
        return peer


def begin_round(a: Peer, b: Peer) -> None:
    """Let two hosts, of which ``a`` leads, begin their first round."""
    for peer in (a, b):
        peer.say(Arrived(peer.name, peer.incarnation), Heard(peer.name, peer.incarnation))
    until(lambda: (state := b.read()) and state.phase is JobPhase.OPENING)
    a.say(Opened("a", a.incarnation, (1, 1), "s:1", "m:1"))
    until(lambda: (state := b.read()) and state.round and state.round.store)
    b.say(Ready("b", b.incarnation, (1, 1)))
    until(lambda: (state := b.read()) and state.phase is JobPhase.RUNNING)
    b.say()
    a.say()


class Slowly:
    """Forwards to an address with so many bytes per second."""

    def __init__(self, address: str, per_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._to, self._per_s = (host, int(port)), per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = join_address("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                inner = self._listener.accept()[0]
            except OSError:
                return
            outer = socket.create_connection(self._to)
            for source, sink in ((inner, outer), (outer, inner)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(16384):
                time.sleep(len(data) / self._per_s)
                sink.sendall(data)
        except OSError:
            pass
        source.close()
        sink.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def until(condition: Callable[[], Any], limit_s: float = 55.0) -> Any:
    end_s = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return found


def hosts(peer: Peer) -> set[str]:
    state = peer.read()
    return set(state.hosts) if state is not None else set()
