"""Connections that other agents open: frames are checked, refused ones are counted, and requests are answered."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from unickpt.base.logs import logger, printable
from unickpt.steering.links.link_speed import LIMIT_S, TransferServer
from unickpt.steering.state.membership import Event, Joined
from unickpt.steering.wire.addresses import listening_socket
from unickpt.steering.wire.codec import SteeringError, accept, event_from_json

MOST_CONNECTIONS = 4096
_IDLE_S = 30.0


class Listener:
    """Listening sockets of an agent, and a thread for each connection.

    Args:
        key: key of the job.
        answer: returns the answer to a request with these events. Raises ``SteeringError`` to refuse it.
        ended: called with the identity of an agent whose connection has ended.

    Attributes:
        refused: number of messages that were not authentic, or malformed.
    """

    def __init__(
        self, key: bytes, answer: Callable[[dict[str, Any], list[Event]], dict[str, Any]], ended: Callable[[Joined], None]
    ) -> None:
        self._key, self._answer, self._ended = key, answer, ended
        self._stopped = threading.Event()
        self._sockets: list[socket.socket] = []
        self._connections = 0
        self._transfers = TransferServer()
        self.refused = 0

    def open(self, host: str, port: int) -> socket.socket | None:
        """Listen at an address; return None if that is impossible."""
        try:
            listener = listening_socket(host, port)
        except OSError:
            return None
        self._sockets.append(listener)
        threading.Thread(target=self._accept, args=(listener,), name="unickpt-steering-listener", daemon=True).start()
        return listener

    def close(self) -> None:
        """Stop listening."""
        self._stopped.set()
        for listener in self._sockets:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

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
        """Answer the requests of one connection."""
        reporter: Joined | None = None
        self._connections += 1
        try:
            frames = accept(connection, self._key, secrets.token_hex(16), timeout_s=_IDLE_S)
            while not self._stopped.is_set():
                request = frames.receive()
                if request.get("kind") == "transfer":
                    self._transfers.serve(frames, request, LIMIT_S)
                    frames.settimeout(_IDLE_S)
                    continue
                events = [event_from_json(value) for value in _list(request.get("events", []))]
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
        if reporter is not None and not self._stopped.is_set():
            self._ended(reporter)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise SteeringError("the events of a request are not a list")
    return value
