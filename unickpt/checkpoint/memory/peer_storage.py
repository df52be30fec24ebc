"""Storage of one generation: the files that this host holds, and those of other hosts through their keepers.

It is a ``Storage`` like any other, so saves commit in it and loads read from it, under any layout.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from unickpt.base.errors import FormatError, StorageError
from unickpt.checkpoint.format.file_names import MANIFEST_FILE
from unickpt.checkpoint.memory.generations import folder_of
from unickpt.checkpoint.memory.host_folder import HostFolder
from unickpt.checkpoint.memory.keeper_client import TIMEOUT_S, KeeperClient, name_of
from unickpt.checkpoint.memory.mapped_staging import MappedSlots
from unickpt.checkpoint.storage.base import DescriptorReader, Reader, Sink, Storage, has_descriptor, may_be_cached
from unickpt.checkpoint.storage.posix import PosixStorage

_BLOCK_BYTES = 4 << 20
_SILENT_S = 30.0


class ReadCounts:
    """Bytes read by source. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}

    def add(self, source: str, size_bytes: int) -> None:
        """Count bytes from a source."""
        with self._lock:
            self._bytes[source] = self._bytes.get(source, 0) + size_bytes

    def by_source(self) -> dict[str, int]:
        """Return the bytes by source, ``this host`` first."""
        with self._lock:
            return dict(sorted(self._bytes.items(), key=lambda entry: (entry[0] != HERE, entry[0])))


HERE = "this host"


class PeerStorage(PosixStorage):
    """The files of one generation.

    Args:
        folder: folder of the job on this host.
        number: the generation.
        peers: addresses of the keepers of the other hosts.
        slots: memory of this rank's data file during a save; None for a load.
        data_name: relative name of that file.
        timeout_s: seconds that one read from another host may take.

    Attributes:
        counts: bytes read by source.
    """

    def __init__(
        self,
        folder: HostFolder,
        number: int,
        peers: Sequence[str],
        *,
        slots: MappedSlots | None = None,
        data_name: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        super().__init__(folder.generation(number))
        self._url = f"{folder.url}/{folder_of(number)}"
        self.counts = ReadCounts()
        self._number = number
        self._slots, self._data_name = slots, data_name
        self._peers = [_Peer(address, number, timeout_s) for address in peers]

    def where(self, name: str = "") -> str:
        """Return the path of a file on this host; the URL of the generation, which all hosts share, if ``name`` is empty."""
        return super().where(name) if name else self._url

    def try_lock(self, name: str) -> Callable[[], None] | None:  # noqa: ARG002
        """Grant the lock: no other job has the token."""
        return lambda: None

    def size_bytes(self, name: str) -> int | None:
        own = super().size_bytes(name)
        if own is not None or (self._slots is not None and name == MANIFEST_FILE):  # a new generation has none elsewhere
            return own
        return next((size for peer in self._peers if (size := peer.files().get(name)) is not None), None)

    def read(self, name: str, offset_bytes: int, size_bytes: int) -> bytes:
        return Storage.read(self, name, offset_bytes, size_bytes)  # through the own reader

    @contextlib.contextmanager
    def reader(self, name: str) -> Iterator[Reader]:
        """Open a file for positioned reads: the own one, or that of the first host that has it."""
        own = super().size_bytes(name) is not None
        remote = [] if own else [peer for peer in self._peers if name in peer.files()]
        if remote:
            yield _RemoteReader(remote, name, f"{self.where(name)} on {remote[0].name}", self.counts)
        elif own:
            with super().reader(name) as reader:
                assert has_descriptor(reader)
                yield _CountedReader(reader, self.counts)
        else:
            raise StorageError(f"{self.where(name)}: no host of the job holds this file")

    @contextlib.contextmanager
    def create(self, name: str, *, direct: bool = False, about_bytes: int = 0) -> Iterator[Sink]:  # noqa: ARG002
        """Create a file. The data file of this rank is where the state was copied to (``mapped_staging``)."""
        if self._slots is None or name != self._data_name:
            with super().create(name, direct=False, about_bytes=about_bytes) as sink:
                yield sink
            return
        try:
            self.root.mkdir(mode=0o700, exist_ok=True)
            with self._slots.sink(self.path(name)) as sink:
                yield sink
        except OSError as err:
            raise StorageError(f"{self.where(name)}: cannot be made ({err.strerror or err})") from err


class _Peer:
    """Another host: what it holds of a generation, and connections to it. Thread-safe."""

    def __init__(self, address: str, number: int, timeout_s: float) -> None:
        self.name, self._address, self._number, self._timeout_s = name_of(address), address, number, timeout_s
        self._silent_until = 0.0  # on the monotonic clock
        self._lock = threading.Lock()
        self._idle: list[KeeperClient] = []
        self._files: Mapping[str, int] | None = None

    def files(self) -> Mapping[str, int]:
        """Return the files of the generation with their sizes; none if the host does not answer.

        The answer is kept, unless the host has nothing of the generation yet. A host that has not answered is not asked for a
        while: a load asks for each file.
        """
        with self._lock:
            if not self._files and time.monotonic() >= self._silent_until:
                client = KeeperClient(self._address, self._timeout_s)
                try:
                    self._files = client.inventory().files.get(self._number, {})
                except (StorageError, FormatError):
                    self._files, self._silent_until = {}, time.monotonic() + _SILENT_S
                finally:
                    client.close()
            return self._files or {}

    def read_into(self, name: str, parts: Sequence[memoryview], offset_bytes: int) -> None:
        """Fill parts with the bytes of a file. Every thread has its own connection meanwhile."""
        with self._lock:
            client = self._idle.pop() if self._idle else KeeperClient(self._address, self._timeout_s)
        try:
            client.read_into(self._number, name, parts, offset_bytes)
        except BaseException:
            client.close()
            raise
        with self._lock:
            self._idle.append(client)


class _CountedReader:
    """Reader of a file on this host that counts bytes."""

    def __init__(self, reader: DescriptorReader, counts: ReadCounts) -> None:
        self._reader, self._counts = reader, counts
        self.path, self.block_bytes, self.descriptor = reader.path, reader.block_bytes, reader.descriptor

    def read_into(self, parts: Sequence[memoryview], offset_bytes: int) -> None:
        self._reader.read_into(parts, offset_bytes)
        self.note(sum(map(len, parts)))

    def note(self, size_bytes: int) -> None:
        self._counts.add(HERE, size_bytes)

    def is_cached(self, offset_bytes: int, size_bytes: int, unknown: bool = True, every: int = 0, /) -> bool:
        return may_be_cached(self._reader) and self._reader.is_cached(offset_bytes, size_bytes, unknown, every)


class _RemoteReader:
    """Reader of a file that other hosts hold: the next one serves if one does not answer."""

    def __init__(self, peers: Sequence[_Peer], name: str, path: str, counts: ReadCounts) -> None:
        self._peers, self._name, self.path, self._counts = peers, name, path, counts
        self.block_bytes = _BLOCK_BYTES

    def read_into(self, parts: Sequence[memoryview], offset_bytes: int) -> None:
        problems = []
        for peer in self._peers:
            try:
                peer.read_into(self._name, parts, offset_bytes)
            except StorageError as err:
                problems.append(str(err))
            else:
                self._counts.add(peer.name, sum(map(len, parts)))
                return
        raise StorageError("; ".join(problems))
