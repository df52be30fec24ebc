"""Hostile neighbours of the memory tier: other users of the machine, strangers on the network, a false keeper."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.memory_jobs import Job, request
from tests.support.rank_threads import alone
from unickpt.base.errors import FormatError, StorageError
from unickpt.base.limited_http import LimitedServer
from unickpt.base.options.job import MemoryOptions
from unickpt.checkpoint.format.checksums import digest
from unickpt.checkpoint.memory.contact import FILE, jobs
from unickpt.checkpoint.memory.host_folder import HostFolder
from unickpt.checkpoint.memory.keeper import copy_generation, serve
from unickpt.checkpoint.memory.keeper_client import CopyOrder, KeeperClient, WantedFile
from unickpt.checkpoint.memory.tier import MemoryTier
from unickpt.checkpoint.save.requests import SaveOptions

TOKEN, SECRET, NAME = "0" * 32, "5ec7e7" * 5, "data/rank00000.safetensors"
CONTENT = b"weights that nobody else may read" * 100
NOBODY = 65534
SEEDS = range(250)
ODD = (b"9" * 30, b"\0", b"\r\n", b"-1", b"%2e%2e/", b"../", b"[" * 3000, b"\xff" * 40, b"null")


def folder_at(path: Path) -> HostFolder:
    path.mkdir()
    folder = HostFolder(path, TOKEN)
    folder.make()
    (folder.generation(7) / "data").mkdir(parents=True)
    folder.path(7, NAME).write_bytes(CONTENT)
    return folder


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[tuple[HostFolder, LimitedServer, int]]:
    folder, listener = folder_at(tmp_path / "a"), socket.create_server(("127.0.0.1", 0))
    server = serve(folder, listener, SECRET)
    yield folder, server, listener.getsockname()[1]
    server.shutdown()
    server.server_close()


def mutated(sound: bytes, chance: random.Random) -> bytes:
    """Return bytes that differ from sound ones: flipped, cut, doubled, or with a run of something else."""
    data = bytearray(sound)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at, end = sorted((chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)))
        end = min(end, at + 60)
        kind = chance.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[at:end]
        elif kind == 2:
            data[at:at] = data[at:end]
        elif kind == 3:
            data[at:end] = chance.choice(
                (b"9" * 30, b"\0", b"\r\n", b"-1", b"%2e%2e/", b"../", b"[" * 3000, b"\xff" * 40, b"null")
            )
        else:
            data[at:end] = chance.randbytes(end - at)
        if not data:
            return b""
    return bytes(data)


def exchange(port: int, sent: bytes) -> bytes:
    """Send bytes, and return the answer until the end of the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        got = b""
        try:
            line.sendall(sent)
            line.shutdown(socket.SHUT_WR)
            while part := line.recv(1 << 16):
                got += part
        except OSError:  # refused in the middle
            pass
        return got


def requests(secret: str) -> list[bytes]:
    order = json.dumps(CopyOrder(8, "http://127.0.0.1:1/x", (WantedFile(NAME, 10, ""),), (7, 8)).to_json()).encode()
    return [
        f"GET /{secret}/inventory HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        f"GET /{secret}/files/g7/{NAME} HTTP/1.1\r\nHost: x\r\nRange: bytes=0-99\r\n\r\n".encode(),
        f"GET /{secret}/copied HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        f"POST /{secret}/copy HTTP/1.1\r\nHost: x\r\nContent-Length: {len(order)}\r\n\r\n".encode() + order,
    ]


def test_strangers_get_nothing_change_nothing_and_are_counted(keeper: tuple[HostFolder, LimitedServer, int]) -> None:
    folder, server, port = keeper
    for seed in SEEDS:
        chance = random.Random(seed)
        guess = "".join(chance.choice("0123456789abcdef") for _ in SECRET)
        sent = chance.choice(requests(guess))
        got = exchange(port, sent if seed % 3 == 0 else mutated(sent, chance))
        assert CONTENT[:20] not in got, seed
        assert b"HTTP/1.1 2" not in got, seed
    assert folder.inventory().files == {7: {NAME: len(CONTENT)}}
    assert server.refused >= len(SEEDS) // 3
    client = KeeperClient(f"http://127.0.0.1:{port}/{SECRET}")
    assert client.inventory().files == {7: {NAME: len(CONTENT)}}
    assert client.copied().refused == server.refused
    client.close()


def test_damaged_requests_of_the_job_itself_leave_the_keeper_alive(
    keeper: tuple[HostFolder, LimitedServer, int], tmp_path: Path
) -> None:
    folder, _, port = keeper
    for seed in SEEDS:
        chance = random.Random(seed)
        exchange(port, mutated(chance.choice(requests(SECRET)), chance))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"], "nothing outside of the folder"
    assert [path.name for path in (tmp_path / "a").iterdir()] == [folder.root.name]
    client = KeeperClient(f"http://127.0.0.1:{port}/{SECRET}")
    client.inventory()
    client.close()


class FalseKeeper:
    """A server that answers each request with bytes that ``answer`` returns, and closes the connection."""

    def __init__(self, answer: Callable[[], bytes]) -> None:
        self._listener, self._answer = socket.create_server(("127.0.0.1", 0)), answer
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}/{SECRET}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            with line:
                try:
                    line.settimeout(5)
                    line.recv(1 << 16)
                    line.sendall(self._answer())
                except OSError:
                    continue

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def answered(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def test_answers_of_a_false_keeper_are_errors_of_unickpt() -> None:
    inventory = answered(json.dumps({"g7": {NAME: len(CONTENT)}}).encode())
    state = answered(b'{"number": 7, "done": true, "problem": "", "size_bytes": 1, "seconds": 0.1, "refused": 0}')
    part = answered(CONTENT[:100], "206 Partial Content")
    told = [b""]
    false = FalseKeeper(lambda: told[0])
    errors: list[str] = []
    for seed in SEEDS:
        chance = random.Random(seed)
        sound, ask = chance.choice((
            (inventory, lambda client: client.inventory()), (state, lambda client: client.copied()),
            (part, lambda client: client.read_into(7, NAME, [memoryview(bytearray(100))], 0)),
        ))  # fmt: skip
        told[0] = mutated(sound, chance)
        client = KeeperClient(false.address, 2.0)
        try:
            ask(client)
        except (StorageError, FormatError) as err:
            errors.append(str(err))
        finally:
            client.close()
    false.close()
    assert len(errors) > len(SEEDS) // 3
    assert not any(SECRET in text for text in errors), "secrets are not logged"


def test_a_copy_from_a_false_keeper_is_refused(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "b")
    false = FalseKeeper(lambda: answered(b"x" * len(CONTENT), "206 Partial Content"))
    order = CopyOrder(9, false.address, (WantedFile(NAME, len(CONTENT), digest(CONTENT)),), (7, 9))
    with pytest.raises(StorageError, match="found checksum"):
        copy_generation(folder, order)
    false.close()
    assert 9 not in folder.inventory().files or not folder.inventory().files[9]
    assert not list((folder.root / "spare").iterdir())


# ---------------------------------------------------------------- other users of the machine


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that all users can write to, as /dev/shm."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    folder = Path(tempfile.mkdtemp(prefix="unickpt-shared-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def as_nobody(action: Callable[[], bool]) -> bool:
    """Run an action as another user; return what it returns, or False if it was not permitted."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            status = 0 if action() else 1
        except PermissionError:
            status = 1
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1)
    return status == 0


def test_another_user_cannot_read_a_generation_or_add_to_it(shared: Path) -> None:
    (shared / "host0").mkdir(mode=0o777)
    (shared / "host0").chmod(0o1777)
    running = Job(shared, (0,))
    running.save(1)
    (root,) = (shared / "host0").iterdir()
    (number,) = running.inventory(0).files
    data = root / f"g{number}" / NAME
    assert as_nobody(lambda: bool(os.listdir(shared / "host0"))), "the directory itself is open"
    assert not as_nobody(lambda: bool(os.listdir(root)))
    assert not as_nobody(lambda: bool(data.read_bytes()))
    assert not as_nobody(lambda: bool((root / FILE).read_bytes()))
    assert not as_nobody(lambda: (root / "g99").mkdir() is None)
    assert not as_nobody(lambda: root.rename(shared / "host0" / "mine") is None)
    assert stat.S_IMODE((root / FILE).stat().st_mode) == 0o600
    running.end()


def test_a_folder_that_another_user_has_planted_is_refused_and_saves_go_to_disk(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (shared / "saves").mkdir()
    (shared / "saves" / ".unickpt-memory").write_text(TOKEN)
    (shared / "memory").mkdir()
    (shared / "memory").chmod(0o1777)
    planted = HostFolder(shared / "memory", TOKEN).root

    def plant() -> bool:
        (planted / "g1" / "data").mkdir(parents=True)
        (planted / "g1" / "manifest.json").write_text("{}")
        planted.chmod(0o777)
        return True

    assert as_nobody(plant)
    tier = MemoryTier(MemoryOptions(to_disk_every=9, folder=str(shared / "memory")), SaveOptions())
    exchange = alone()
    load = tier.look(str(shared / "saves"), exchange)
    assert load.found == []
    assert any("belongs to user 65534" in problem for problem in load.problems), load.problems
    assert tier.save(request(str(shared / "saves"), 1, 0, 1), exchange) is None
    assert any("saves go to disk, not into memory" in line and "65534" in line for line in caplog.messages)
    assert jobs(shared / "memory") == []
