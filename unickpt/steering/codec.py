"""States and events as JSON, and authenticated frames for connections between the agents of a job.

A connection begins with a random challenge of the side that listens. Each frame is a line: HMAC-SHA256 of the challenge, the
direction, the number of the frame and the text, then a space and the text. A frame can therefore not be made without the job's
secret, and a recorded one is of no use. The content is not encrypted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import socket
from collections.abc import Mapping
from typing import IO, Any

from unickpt.errors import UnickptError
from unickpt.steering import membership
from unickpt.steering.membership import NEVER_S, Event, Host, Limits, Membership, Parking, Phase, Round

LONGEST_FRAME = 8 << 20  # bytes: a state of 10,000 hosts has 2 MB
_CHALLENGE = 32  # hexadecimal digits
_NAME = 256  # characters

_EVENTS: Mapping[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        membership.Joined, membership.Heard, membership.Arrived, membership.Opened, membership.Ready, membership.Left,
        membership.Park, membership.Admit, membership.Restart, membership.Close,
    )
}  # fmt: skip


class SteeringError(UnickptError):
    """A message between agents is malformed or not authentic, or an agent cannot be reached."""


# ---------------------------------------------------------------- values


def event_as_json(event: Event) -> dict[str, Any]:
    """Return an event as JSON types."""
    fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    return {"event": type(event).__name__, **{key: None if value == NEVER_S else value for key, value in fields.items()}}


def event_from_json(value: Any) -> Event:
    """Return the event that another agent has sent.

    Raises:
        SteeringError: it is not an event that agents send, or a field is missing or of a wrong type.
    """
    try:
        kind = _EVENTS[value["event"]]
        return kind(**{field.name: _checked(str(field.type), value[field.name]) for field in dataclasses.fields(kind)})  # type: ignore[no-any-return]
    except (KeyError, TypeError, ValueError) as err:
        raise SteeringError(f"not an event: {type(err).__name__}: {err}") from None


def _checked(kind: str, value: Any) -> Any:
    if kind == "str" and isinstance(value, str) and len(value) <= 16 * _NAME:
        return value
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "float" and (value is None or (isinstance(value, (int, float)) and value > 0)):
        return NEVER_S if value is None else float(value)
    if kind == "tuple[int, int]":
        term, number = value
        if type(term) is type(number) is int:
            return term, number
    raise ValueError(f"{value!r} is no {kind}")


def state_as_json(state: Membership, now_s: float) -> dict[str, Any]:
    """Return a state as JSON types. Times are relative to ``now_s``, because each agent has its own clock."""

    def ago(time_s: float | None) -> float | None:
        return None if time_s is None else now_s - time_s

    limits = dataclasses.asdict(state.limits)
    round_ = state.round
    return {
        "limits": {**limits, "sizes": sorted(state.limits.sizes)},
        "leader": state.leader, "term": state.term, "version": state.version, "phase": state.phase.value,
        "hosts": [[host.name, host.incarnation, host.address, ago(host.arrived_s)] for host in state.hosts.values()],
        "parked": [
            [name, parking.reason, ago(parking.since_s), None if parking.until_s == NEVER_S else parking.until_s - now_s]
            for name, parking in state.parked.items()
        ],
        "seats": dict(state.seats), "losses": dict(state.losses),
        "round": round_ and {
            "epoch": round_.epoch, "members": round_.members, "ago": ago(round_.since_s), "store": round_.store,
            "master": round_.master, "ready": sorted(round_.ready),
        },
        "electorate": state.electorate, "gathering": ago(state.gathering_s), "enough": ago(state.enough_s),
        "reason": state.reason, "closed": state.closed, "finished": state.finished,
    }  # fmt: skip


def state_from_json(value: Any, now_s: float) -> Membership:
    """Return the state that another agent has sent, with times on this agent's clock.

    Raises:
        SteeringError: the value is not a state.
    """
    try:
        return _state(value, now_s)
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise SteeringError(f"not a state: {type(err).__name__}: {err}") from None


def _state(value: Any, now_s: float) -> Membership:
    def at(ago_s: float | None) -> float | None:
        return None if ago_s is None else now_s - float(ago_s)

    def pairs(items: Any) -> tuple[tuple[str, str], ...]:
        return tuple((str(name), str(incarnation)) for name, incarnation in items)

    round_, sizes = value["round"], frozenset(int(size) for size in value["limits"]["sizes"])
    hosts = [Host(str(name), str(incarnation), str(address), at(ago)) for name, incarnation, address, ago in value["hosts"]]
    return Membership(
        limits=Limits(**{**value["limits"], "sizes": sizes}), leader=str(value["leader"]), term=int(value["term"]),
        version=int(value["version"]), phase=Phase(value["phase"]), hosts={host.name: host for host in hosts},
        heard={host.name: now_s for host in hosts},
        parked={
            str(name): Parking(str(reason), now_s - float(ago), NEVER_S if left is None else now_s + float(left))
            for name, reason, ago, left in value["parked"]
        },
        seats={str(name): int(seat) for name, seat in value["seats"].items()},
        losses={str(name): int(count) for name, count in value["losses"].items()},
        round=None if round_ is None else Round(
            epoch=(int(round_["epoch"][0]), int(round_["epoch"][1])), members=pairs(round_["members"]),
            since_s=now_s - float(round_["ago"]), store=str(round_["store"]), master=str(round_["master"]),
            ready=frozenset(str(name) for name in round_["ready"]),
        ),
        electorate=pairs(value["electorate"]), gathering_s=now_s - float(value["gathering"]), enough_s=at(value["enough"]),
        reason=str(value["reason"]), closed=str(value["closed"]), finished=bool(value["finished"]),
    )  # fmt: skip


# ---------------------------------------------------------------- frames


def key_of(secret: str) -> bytes:
    """Return the key for a job's secret."""
    return hashlib.sha256(b"unickpt steering\0" + secret.encode()).digest()


class Frames:
    """Authenticated JSON messages over a connected socket, in turns: a request, then its answer.

    Args:
        connection: connected socket with a time limit.
        key: key of the job.
        challenge: random text of the side that listens.
        listens: whether this side listens.
    """

    def __init__(self, connection: socket.socket, key: bytes, challenge: str, listens: bool) -> None:
        self._connection, self._key, self._challenge = connection, key, challenge
        self._sends, self._receives = ("answer", "request") if listens else ("request", "answer")
        self._sent = self._received = 0
        self._file: IO[bytes] = connection.makefile("rb")

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message.

        Raises:
            OSError: the connection is broken.
        """
        text = json.dumps(message, separators=(",", ":")).encode()
        self._connection.sendall(self._mac(self._sends, self._sent, text) + b" " + text + b"\n")
        self._sent += 1

    def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            EOFError: the other side has closed the connection.
            SteeringError: the message is too long, not authentic or not a JSON object.
            OSError: the connection is broken, or nothing came in time.
        """
        line = self._file.readline(LONGEST_FRAME)
        if not line:
            raise EOFError("the connection is closed")
        mac, _, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or not hmac.compare_digest(mac, self._mac(self._receives, self._received, text)):
            raise SteeringError("a message is not authentic: the hosts must have the same --rdzv-id and secret")
        self._received += 1
        try:
            message = json.loads(text)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise SteeringError("a message is not a JSON object")
        return message

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._connection.close()

    def _mac(self, direction: str, number: int, text: bytes) -> bytes:
        head = f"{self._challenge} {direction} {number} ".encode()
        return hmac.new(self._key, head + text, hashlib.sha256).hexdigest().encode()


def dial(address: str, key: bytes, timeout_s: float) -> Frames:
    """Connect to an agent.

    Raises:
        ConnectionRefusedError: no process listens there.
        SteeringError: something else than an agent listens there.
        OSError: the host cannot be reached in time.
    """
    connection = socket.create_connection(split_address(address), timeout=timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = b""
        while len(challenge) <= _CHALLENGE and not challenge.endswith(b"\n"):
            received = connection.recv(_CHALLENGE + 1 - len(challenge))
            if not received:
                raise SteeringError(f"{address} is not an agent of unickpt")
            challenge += received
        return Frames(connection, key, challenge.decode("ascii", "replace").strip(), listens=False)
    except BaseException:
        connection.close()
        raise


def accept(connection: socket.socket, key: bytes, challenge: str, timeout_s: float) -> Frames:
    """Greet an agent that has connected. ``challenge`` must be 32 random hexadecimal digits.

    Raises:
        OSError: the connection is broken.
    """
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(challenge.encode() + b"\n")
    return Frames(connection, key, challenge, listens=True)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[IPv6]:port``.

    Raises:
        SteeringError: the port is missing or not a number.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise SteeringError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return ``host:port``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
