"""Process beside training that serves this host's generations to other hosts, and copies theirs. ``main`` runs it.

It holds no state: the generations are files in shared memory. If it dies, training starts another one.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import json
import mmap
import os
import re
import select
import socket
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

from unickpt.base.errors import FormatError, StorageError, UnickptError
from unickpt.base.limited_http import ConnectionLimits, LimitedHandler, LimitedServer
from unickpt.base.private_files import no_room, open_regular
from unickpt.checkpoint.format.checksums import RunningDigest
from unickpt.checkpoint.format.file_names import MANIFEST_FILE
from unickpt.checkpoint.memory.generations import number_of
from unickpt.checkpoint.memory.host_folder import HostFolder
from unickpt.checkpoint.memory.keeper_client import CopyOrder, CopyState, KeeperClient, WantedFile

_LIMITS = ConnectionLimits(connections=512, whole_s=3600.0)
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")
_ORDER_BYTES = 64 << 20
_UNSENT_MS = 60_000  # after which the kernel gives a silent receiver up
_LOOK_S = 1.0


class CopyWorker:
    """Copies from other hosts into the folder of the job, one at a time. Thread-safe."""

    def __init__(self, folder: HostFolder) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._state = CopyState()

    @property
    def state(self) -> CopyState:
        """State of the newest copy."""
        with self._lock:
            return self._state

    def begin(self, order: CopyOrder) -> bool:
        """Begin a copy in a thread. Returns False while another one runs."""
        with self._lock:
            if self._state.number and not self._state.done:
                return False
            self._state = CopyState(order.number)
        threading.Thread(target=self._run, args=(order,), name="unickpt-copy", daemon=True).start()
        return True

    def _run(self, order: CopyOrder) -> None:
        begin, size, problem = time.monotonic(), 0, ""
        try:
            size = copy_generation(self._folder, order)
        except (UnickptError, OSError) as err:
            problem = str(err)
        except Exception as err:  # a keeper must answer
            problem = f"{type(err).__name__}: {err}"
        with self._lock:
            self._state = CopyState(order.number, True, problem, size, time.monotonic() - begin)


def copy_generation(folder: HostFolder, order: CopyOrder) -> int:
    """Copy the files of a generation from another host; the commit record comes last. Return the number of bytes.

    Raises:
        StorageError: the other host does not answer, the memory is full, or a checksum differs.
    """
    spares = _given_up(folder, order)
    begin, size = time.monotonic(), 0
    client = KeeperClient(order.source)
    try:
        for file in sorted(order.files, key=lambda file: file.name == MANIFEST_FILE):
            target = folder.path(order.number, file.name)
            for inside in (target.parent.parent, target.parent):
                if inside != folder.root and inside.is_relative_to(folder.root):
                    inside.mkdir(mode=0o700, exist_ok=True)
            spare = spares.pop(file.name, folder.spare(f"copy-{target.name}"))
            size += _copy(client, order, file, spare, limit=(begin, size))
            os.replace(spare, target)
    finally:
        client.close()
        for spare in spares.values():
            spare.unlink(missing_ok=True)
    return size


def _given_up(folder: HostFolder, order: CopyOrder) -> dict[str, Path]:
    """Give up the copies in older generations. Return the spare files whose pages can be used again, by relative name."""
    spares: dict[str, Path] = {}
    wanted = {file.name for file in order.files}
    for number, files in folder.inventory().files.items():
        if number == order.number or number in order.keep:
            continue
        for name in wanted & set(files):
            spare = folder.set_aside(number, name, as_name=f"copy-{Path(name).name}")
            if spare is not None:
                spares[name] = spare
        folder.give_up(number)
    return spares


def _copy(client: KeeperClient, order: CopyOrder, file: WantedFile, spare: Path, *, limit: tuple[float, int]) -> int:
    """Copy one file into a spare file, in place where it has pages."""
    begin, before = limit
    whole = RunningDigest()
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(spare, flags, 0o600), "r+b", buffering=0) as out:
            os.ftruncate(out.fileno(), file.size_bytes)
            if file.size_bytes:
                os.posix_fallocate(out.fileno(), 0, file.size_bytes)
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                into, at = memoryview(mmap.mmap(out.fileno(), file.size_bytes, flags=flags)), 0
                for part in client.stream(order.number, file.name, into):
                    whole.update(part)
                    at += len(part)
                    if order.bytes_per_s > 0:
                        due = begin + (before + at) / order.bytes_per_s
                        time.sleep(max(due - time.monotonic(), 0.0))
    except OSError as err:
        spare.unlink(missing_ok=True)
        raise StorageError(no_room(spare, file.size_bytes, err)) from err
    if file.checksum and whole.value() != file.checksum:
        spare.unlink(missing_ok=True)
        raise StorageError(
            f"{file.name} of generation {order.number} from {client.name}: found checksum {whole.value()}, "
            f"expected {file.checksum}"
        )
    return file.size_bytes


def serve(folder: HostFolder, listener: socket.socket, secret: str) -> LimitedServer:
    """Serve in background threads until ``shutdown``. ``secret``: first part of all paths."""
    copies = CopyWorker(folder)

    class KeeperHandler(LimitedHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60.0
        disable_nagle_algorithm = True  # the head of an answer must not wait for an acknowledgement: 40 ms each

        def do_GET(self) -> None:  # noqa: N802  (name required by http.server)
            what = self._asked()
            if what == "inventory":
                self.reply(200, json.dumps(folder.inventory().to_json()).encode())
            elif what == "copied":
                state = replace(copies.state, refused=self.server.refused)
                self.reply(200, json.dumps(asdict(state)).encode())
            elif what.startswith("files/"):
                self._send_file(what.removeprefix("files/"))
            elif what:
                self.reply(404, b"")

        def do_POST(self) -> None:  # noqa: N802
            what = self._asked()
            length = self.headers.get("Content-Length", "")
            if what != "copy" or not length.isdecimal() or len(length) > 12 or int(length) > _ORDER_BYTES:
                self.close_connection = True
                return self.reply(404, b"") if what else None
            try:
                order = CopyOrder.from_json(json.loads(self.rfile.read(int(length))))
            except (ValueError, FormatError, RecursionError, AttributeError):
                return self.reply(400, b"")
            return self.reply(200, b"{}") if copies.begin(order) else self.reply(409, b"")

        def _asked(self) -> str:
            """Return what is asked for; '' after the refusal of a request without the secret."""
            prefix = f"/{secret}/"
            if not hmac.compare_digest(self.path[: len(prefix)].encode(), prefix.encode()):
                self.server.stranger(self.client_address)
                self.close_connection = True
                self.reply(404, b"")
                return ""
            self.server.knows(self.request)
            return self.path[len(prefix) :]

        def _send_file(self, what: str) -> None:
            inside, _, name = what.partition("/")
            number, span = number_of(inside), _RANGE.fullmatch(self.headers.get("Range", ""))
            if number is None or span is None:
                return self.reply(404, b"")
            first, last = map(int, span.groups())
            try:
                with open_regular(folder.path(number, name)) as file:
                    if not first <= last < os.fstat(file.fileno()).st_size:
                        return self.reply(416, b"")
                    self.send_response(206)
                    self.send_header("Content-Length", str(last - first + 1))
                    self.end_headers()
                    self.wfile.flush()
                    self._transmit(file.fileno(), first, last + 1)
            except (OSError, FormatError):
                if not self.close_connection:
                    self.reply(404, b"")

        def _transmit(self, descriptor: int, at: int, end: int) -> None:
            self.connection.settimeout(None)
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNSENT_MS)
            while at < end:
                sent = os.sendfile(self.connection.fileno(), descriptor, at, end - at)
                if not sent:  # the file was cut: the answer cannot be completed
                    self.close_connection = True
                    raise OSError("the file became shorter")
                at += sent
            self.connection.settimeout(self.timeout)

    server = LimitedServer(listener, KeeperHandler, lambda line: print(f"unickpt: {line}", file=sys.stderr), _LIMITS)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> None:
    """Run a keeper until the process that has started it ends. Its standard input holds the secret, and then nothing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parent")
    parser.add_argument("token")
    parser.add_argument("--listen", type=int, required=True)
    args = parser.parse_args()
    secret = sys.stdin.readline().strip()
    folder = HostFolder(args.parent, args.token)
    server = serve(folder, socket.socket(fileno=args.listen), secret)
    owner = os.getppid()
    while os.getppid() == owner:
        with contextlib.suppress(OSError):
            readable, _, _ = select.select([sys.stdin], [], [], _LOOK_S)
            if readable and not sys.stdin.read(1):
                break
    server.shutdown()


if __name__ == "__main__":
    main()
