"""Requests to the keeper of a host: files and inventory of its generations, and orders to copy those of another host.

    GET  <address>/files/<generation>/<name>    bytes of a file, with a Range header
    GET  <address>/inventory                    what the host holds
    POST <address>/copy                         copy files of a generation from another keeper
    GET  <address>/copied                       state of the newest copy

The address contains a secret that only processes of the job know (``unickpt.diagnosis.agent.server`` has the same rule).
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from unickpt.base.errors import FormatError, StorageError
from unickpt.checkpoint.memory.generations import Inventory, folder_of

TIMEOUT_S = 20.0  # of one read or connection
_MOST_BYTES = 256 << 20  # of an answer that is not a file
_PART_BYTES = 4 << 20
_LOST = (OSError, http.client.HTTPException)


@dataclass(frozen=True, slots=True)
class WantedFile:
    """A file to copy, with what it must be.

    Attributes:
        name: relative name in the generation.
        size_bytes: exact size.
        checksum: xxh3_128 of the file; '' for none.
    """

    name: str
    size_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """Order to a keeper.

    Attributes:
        number: generation.
        source: address of the keeper to copy from.
        files: files to copy.
        keep: generations that stay; copies of files in others are given up.
        bytes_per_s: bandwidth limit; 0 for none.
    """

    number: int
    source: str
    files: tuple[WantedFile, ...]
    keep: tuple[int, ...]
    bytes_per_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        files = [[file.name, file.size_bytes, file.checksum] for file in self.files]
        return {
            "number": self.number, "source": self.source, "files": files, "keep": list(self.keep),
            "bytes_per_s": self.bytes_per_s,
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CopyOrder:
        """Return the order that ``to_json`` encoded. Raises FormatError for another form."""
        try:
            files = tuple(WantedFile(str(name), int(size), str(checksum)) for name, size, checksum in value["files"])
            keep = tuple(map(int, value["keep"]))
            return cls(int(value["number"]), str(value["source"]), files, keep, float(value["bytes_per_s"]))
        except (KeyError, TypeError, ValueError, OverflowError) as err:
            raise FormatError(f"an order to copy a generation is malformed ({err})") from None


@dataclass(frozen=True, slots=True)
class CopyState:
    """State of the newest copy of a keeper.

    Attributes:
        number: generation; 0 before the first order.
        done: the copy has ended.
        problem: why it is incomplete, or ''.
        size_bytes, seconds: what was copied, and the time that it took.
        refused: connections that the keeper has refused since its start.
    """

    number: int = 0
    done: bool = False
    problem: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    refused: int = 0

    @classmethod
    def from_json(cls, value: Any) -> CopyState:
        """Return the state that ``dataclasses.asdict`` encoded. Raises FormatError for another form."""
        try:
            state = cls(**value)
        except TypeError:
            raise FormatError("the state of a copy is malformed") from None
        if [type(each) for each in (state.number, state.done, state.problem, state.size_bytes, state.refused)] != [
            int, bool, str, int, int
        ]:  # fmt: skip
            raise FormatError("the state of a copy is malformed")
        return state


class KeeperClient:
    """Connection to one keeper. One thread uses it at a time. A lost connection is opened once more.

    Args:
        address: ``http://HOST:PORT/SECRET``.
        timeout_s: seconds that one read or connection may take.
    """

    def __init__(self, address: str, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        parts = urlsplit(address)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise FormatError(f"{name_of(address)}: not the address of a keeper (http://HOST:PORT/...)")
        self.name = name_of(address)
        self._host, self._port, self._base = parts.hostname, parts.port, parts.path.rstrip("/")
        self._line: http.client.HTTPConnection | None = None

    def inventory(self) -> Inventory:
        """Return what the host holds.

        Raises:
            StorageError: the keeper does not answer.
            FormatError: the answer is malformed.
        """
        return Inventory.from_json(self._json("GET", "inventory"))

    def copy(self, order: CopyOrder) -> None:
        """Order a copy. It runs behind this call.

        Raises:
            StorageError: the keeper does not answer, or refuses.
        """
        self._json("POST", "copy", json.dumps(order.to_json()).encode())

    def copied(self) -> CopyState:
        """Return the state of the newest copy.

        Raises:
            StorageError: the keeper does not answer.
        """
        value = self._json("GET", "copied")
        try:
            return CopyState.from_json(value)
        except FormatError as err:
            raise StorageError(f"{self.name}: {err}") from None

    def read_into(self, number: int, name: str, parts: Sequence[memoryview], offset_bytes: int) -> None:
        """Fill parts in order with the bytes of a file from ``offset_bytes`` on.

        Raises:
            StorageError: the keeper does not answer, or has no such bytes.
        """
        size = sum(map(len, parts))
        if not size:
            return
        for attempt in (0, 1):
            try:
                reply = self._range(number, name, offset_bytes, offset_bytes + size)
                for part in parts:
                    _fill(reply, part)
                return
            except _LOST as err:
                self.close()
                if attempt:
                    raise StorageError(f"{self.name}: {folder_of(number)}/{name} cannot be read ({_text(err)})") from err

    def stream(self, number: int, name: str, into: memoryview) -> Iterator[memoryview]:
        """Fill a buffer with the first bytes of a file, with one request. After a lost connection the rest is requested again.

        Yields:
            Filled parts of the buffer, in order.

        Raises:
            StorageError: the keeper does not answer, or has no such bytes.
        """
        at, lost_at = 0, -1
        while at < len(into):
            try:
                reply = self._range(number, name, at, len(into))
                while at < len(into):
                    part = into[at : at + _PART_BYTES]
                    _fill(reply, part)
                    at += len(part)
                    yield part
            except _LOST as err:
                self.close()
                if at == lost_at:
                    raise StorageError(f"{self.name}: {folder_of(number)}/{name} cannot be read ({_text(err)})") from err
                lost_at = at

    def _range(self, number: int, name: str, begin: int, end: int) -> http.client.HTTPResponse:
        """Request the bytes ``[begin, end)`` of a file. Raises StorageError if the keeper has no such bytes."""
        reply = self._request("GET", f"files/{folder_of(number)}/{name}", None, {"Range": f"bytes={begin}-{end - 1}"})
        if reply.status != 206 or reply.length != end - begin:
            reply.read(1 << 16)
            raise StorageError(
                f"{self.name}: no bytes {begin:,} to {end:,} of {folder_of(number)}/{name} (HTTP status {reply.status})"
            )
        return reply

    def close(self) -> None:
        """Close the connection."""
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.close()
        self._line = None

    def _json(self, method: str, what: str, body: bytes | None = None) -> Any:
        for attempt in (0, 1):
            try:
                reply = self._request(method, what, body, {})
                data = reply.read(_MOST_BYTES)
                break
            except _LOST as err:
                self.close()
                if attempt or isinstance(err, TimeoutError):
                    raise StorageError(f"{self.name}: the keeper does not answer ({_text(err)})") from err
        if reply.status != 200:
            raise StorageError(f"{self.name}: the keeper answers {what} with HTTP status {reply.status}")
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise StorageError(f"{self.name}: the answer to {what} is not JSON") from None

    def _request(self, method: str, what: str, body: bytes | None, head: dict[str, str]) -> http.client.HTTPResponse:
        if self._line is None:
            self._line = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        self._line.request(method, f"{self._base}/{what}", body, head)
        return self._line.getresponse()


def _fill(reply: http.client.HTTPResponse, part: memoryview) -> None:
    at = 0
    while at < len(part):
        count = reply.readinto(part[at:])
        if not count:
            raise ConnectionError("the connection ended early")
        at += count


def _text(err: Exception) -> str:
    return str(err) or type(err).__name__


def name_of(address: str) -> str:
    """Return host and port of an address, without its secret, for messages."""
    return urlsplit(address).netloc or "keeper"
