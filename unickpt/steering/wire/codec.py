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
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unickpt.base.errors import ConfigError, UnickptError
from unickpt.steering.state import membership
from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import NEVER_S, Ending, Event, GivenOrder, Host, JobPhase, Membership, Parking, Round
from unickpt.steering.state.scores import score_from

LONGEST_FRAME = 8 << 20  # bytes: a state of 10,000 hosts has 2 MB
_CHUNK = 1 << 20  # bytes of a measurement that are sent at once
_CHALLENGE = 32  # hexadecimal digits
_NAME = 256  # characters
_MOST = 1 << 20  # workers of a host
_BUILDS = "All hosts of a job need the same version of unickpt"

_EVENTS: Mapping[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        membership.Joined, membership.Heard, membership.Arrived, membership.Opened, membership.Ready, membership.Committed,
        membership.WorkersEnded, membership.WorkerFailed, membership.Measured, membership.Leaving, membership.Left,
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
        known = [field for field in dataclasses.fields(kind) if field.name in value or not _has_default(field)]
        return kind(**{field.name: _checked(str(field.type), value[field.name]) for field in known})  # type: ignore[no-any-return]
    except (KeyError, TypeError, ValueError) as err:
        raise SteeringError(f"not an event: {type(err).__name__}: {err}. {_BUILDS}") from None


def _has_default(field: dataclasses.Field[Any]) -> bool:
    """Return whether another build may leave a field out."""
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _checked(kind: str, value: Any) -> Any:
    if kind == "str" and isinstance(value, str) and len(value) <= 16 * _NAME:
        return value
    if kind == "int" and type(value) is int and 0 <= value < _MOST:
        return value
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "float" and (value is None or (isinstance(value, (int, float)) and value > 0)):
        return NEVER_S if value is None else float(value)
    if kind == "Score":
        return score_from(value)
    if kind == "tuple[int, ...]" and isinstance(value, (list, tuple)) and len(value) <= _MOST:
        return tuple(_checked("int", each) for each in value)
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
        "limits": {**limits, "sizes": sorted(state.limits.sizes), "order": list(state.limits.order)},
        "leader": state.leader, "instance": state.instance, "term": state.term, "version": state.version,
        "phase": state.phase.value,
        "hosts": [
            [host.name, host.incarnation, host.address, ago(host.arrived_s), host.workers] for host in state.hosts.values()
        ],
        "parked": [
            [name, parking.reason, ago(parking.since_s), None if parking.until_s == NEVER_S else parking.until_s - now_s]
            for name, parking in state.parked.items()
        ],
        "seats": dict(state.seats), "losses": dict(state.losses), "evictions": dict(state.evictions),
        "orders": [
            [each.number, each.identifier, each.epoch, each.ranks, each.text, each.action, each.cause] for each in state.orders
        ],
        "furthest": state.furthest, "reached": state.reached, "fruitless": state.fruitless,
        "stillborn": dict(state.stillborn), "pause": state.pause_s,
        "commits": [state.commits, ago(state.committed_s)], "suspects": dict(state.suspects), "checks": state.checks,
        "scores": dict(state.scores),
        "round": round_ and {
            "epoch": round_.epoch, "members": round_.members, "ago": ago(round_.since_s), "store": round_.store,
            "master": round_.master, "ready": sorted(round_.ready), "hub": round_.hub,
        },
        "ended": sorted(state.ended),
        "electorate": state.electorate, "gathering": ago(state.gathering_s), "enough": ago(state.enough_s),
        "reason": state.reason, "ending": state.ending.value, "closed": state.closed, "finished": state.finished,
    }  # fmt: skip


def state_from_json(value: Any, now_s: float) -> Membership:
    """Return the state that another agent has sent, with times on this agent's clock.

    Raises:
        SteeringError: the value is not a state.
    """
    try:
        return _state(value, now_s)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as err:
        raise SteeringError(f"not a state: {type(err).__name__}: {err}. {_BUILDS}") from None


def _state(value: Any, now_s: float) -> Membership:
    def at(ago_s: float | None) -> float | None:
        return None if ago_s is None else now_s - float(ago_s)

    def pairs(items: Any) -> tuple[tuple[str, str], ...]:
        return tuple((str(name), str(incarnation)) for name, incarnation in items)

    round_, sizes = value["round"], frozenset(int(size) for size in value["limits"]["sizes"])
    order = tuple(str(name) for name in value["limits"].get("order", ()))
    hosts = [
        Host(str(name), str(incarnation), str(address), at(ago), int(workers[0]) if workers else 0)
        for name, incarnation, address, ago, *workers in value["hosts"]
    ]
    return Membership(
        limits=Limits(**{**value["limits"], "sizes": sizes, "order": order}), leader=str(value["leader"]),
        instance=str(value["instance"])[:_NAME], term=int(value["term"]), version=int(value["version"]),
        phase=JobPhase(value["phase"]),
        hosts={host.name: host for host in hosts}, heard={host.name: now_s for host in hosts},
        parked={
            str(name): Parking(str(reason), now_s - float(ago), NEVER_S if left is None else now_s + float(left))
            for name, reason, ago, left in value["parked"]
        },
        seats={str(name): int(seat) for name, seat in value["seats"].items()},
        losses={str(name): int(count) for name, count in value["losses"].items()},
        evictions={str(name): int(count) for name, count in value["evictions"].items()},
        orders=tuple(
            GivenOrder(
                int(number), str(name), (int(epoch[0]), int(epoch[1])), tuple(int(rank) for rank in ranks), str(text),
                str(action), str(cause),
            )
            for number, name, epoch, ranks, text, action, cause in value["orders"]
        ),
        furthest=int(value["furthest"]), reached=int(value["reached"]), fruitless=int(value["fruitless"]),
        stillborn={str(fault): (int(count), int(last)) for fault, (count, last) in value.get("stillborn", {}).items()},
        pause_s=float(value["pause"]), commits=int(value["commits"][0]), committed_s=at(value["commits"][1]),
        suspects={str(name): int(check) for name, check in value["suspects"].items()}, checks=int(value["checks"]),
        scores={str(name): score_from(score) for name, score in value.get("scores", {}).items()},
        round=None if round_ is None else Round(
            epoch=(int(round_["epoch"][0]), int(round_["epoch"][1])), members=pairs(round_["members"]),
            since_s=now_s - float(round_["ago"]), store=str(round_["store"]), master=str(round_["master"]),
            ready=frozenset(str(name) for name in round_["ready"]), hub=str(round_.get("hub", "")),
        ),
        ended=frozenset(int(rank) for rank in value.get("ended", ())),
        electorate=pairs(value["electorate"]), gathering_s=now_s - float(value["gathering"]), enough_s=at(value["enough"]),
        reason=str(value["reason"]), ending=Ending(value["ending"]), closed=str(value["closed"]),
        finished=bool(value["finished"]),
    )  # fmt: skip


# ---------------------------------------------------------------- frames


def key_of(secret: str) -> bytes:
    """Return the key for a job's secret."""
    return hashlib.sha256(b"unickpt steering\0" + secret.encode()).digest()


def secret_key(run_id: str, secret_file: str | Path | None) -> bytes:
    """Return the key of a job from ``--rdzv-id`` and the file with the secret, if it has one.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not secret_file:
        return key_of(run_id)
    try:
        return key_of(f"{run_id}\0{Path(secret_file).read_text().strip()}")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"the secret in secret_file {secret_file} cannot be read: {err}") from err


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
        self._file = connection.makefile("rb")

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

    def settimeout(self, timeout_s: float) -> None:
        """Set the time limit of each operation."""
        self._connection.settimeout(timeout_s)

    def pour(self, count: int, end_s: float) -> None:
        """Send so many zero bytes that are not authenticated, for a measurement. ``end_s``: on the monotonic clock.

        Raises:
            TimeoutError: the time is over.
            OSError: the connection is broken.
        """
        chunk = memoryview(bytes(min(count, _CHUNK)))
        while count:
            self._limit(end_s)
            count -= self._connection.send(chunk[: min(count, _CHUNK)])

    def drain(self, count: int, end_s: float) -> None:
        """Receive and drop so many bytes.

        Raises:
            EOFError: the other side has closed the connection.
            TimeoutError: the time is over.
            OSError: the connection is broken.
        """
        while count:
            self._limit(end_s)
            received = len(self._file.read1(min(count, _CHUNK)))
            if not received:
                raise EOFError("the connection is closed")
            count -= received

    def _limit(self, end_s: float) -> None:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time of a measurement is over")
        self._connection.settimeout(left_s)

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


def split_endpoint(endpoint: str) -> tuple[str, int | None]:
    """Return host and port of ``--rdzv-endpoint``; None if it has no port. An IPv6 address with a port needs brackets."""
    text = endpoint.strip()
    host, colon, port = text.rpartition(":")
    bare = ":" in host and not host.endswith("]")
    if not colon or bare or text.endswith("]") or not port.isdigit():
        return (text if bare or not colon or text.endswith("]") else host).strip("[]"), None
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return ``host:port``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
