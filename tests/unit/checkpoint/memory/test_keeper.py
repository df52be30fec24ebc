"""A keeper on its port: what it serves, what it refuses, and copies from one to another."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from unickpt.base.errors import FormatError, StorageError
from unickpt.checkpoint.format.checksums import digest
from unickpt.checkpoint.memory import generations
from unickpt.checkpoint.memory.generations import Inventory
from unickpt.checkpoint.memory.host_folder import HostFolder
from unickpt.checkpoint.memory.keeper import copy_generation, serve
from unickpt.checkpoint.memory.keeper_client import CopyOrder, KeeperClient, WantedFile

TOKEN, SECRET = "0" * 32, "5ec7e7" * 5
NAME = "data/rank00000.safetensors"


def folder_at(path: Path) -> HostFolder:
    path.mkdir()
    folder = HostFolder(path, TOKEN)
    folder.make()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> HostFolder:
    made = folder_at(tmp_path / "a")
    (made.generation(7) / "data").mkdir(parents=True)
    made.path(7, NAME).write_bytes(bytes(range(256)) * 4096)
    made.path(7, "manifest.json").write_bytes(b"{}")
    (made.generation(7) / "other").write_bytes(b"x")
    return made


@pytest.fixture
def address(folder: HostFolder) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = serve(folder, listener, SECRET)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/{SECRET}"
    server.shutdown()
    server.server_close()


def status(address: str, path: str, method: str = "GET", body: bytes | None = None, **head: str) -> int:
    parts = urlsplit(address)
    line = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    try:
        line.request(method, path, body, head)
        return line.getresponse().status
    finally:
        line.close()


def test_files_and_inventory_are_served_on_one_connection(address: str) -> None:
    client = KeeperClient(address)
    assert client.inventory().files == {7: {NAME: 1 << 20, "manifest.json": 2}}
    line = client._line
    for at in range(0, 300):
        parts = [memoryview(bytearray(3)), memoryview(bytearray(2))]
        client.read_into(7, NAME, parts, at)
        assert b"".join(parts) == bytes((at + n) % 256 for n in range(5))
    assert client._line is line
    with pytest.raises(StorageError, match="HTTP status 416"):
        client.read_into(7, NAME, [memoryview(bytearray(2))], (1 << 20) - 1)
    with pytest.raises(StorageError, match="HTTP status 404"):
        client.read_into(8, NAME, [memoryview(bytearray(2))], 0)
    client.close()


def test_a_stranger_gets_nothing(address: str, folder: HostFolder, tmp_path: Path) -> None:
    span = {"Range": "bytes=0-1"}
    (tmp_path / "secret").write_bytes(b"secret")
    link = folder.generation(7) / "data" / "rank00001.safetensors"
    link.symlink_to(tmp_path / "secret")
    assert status(address, f"/{SECRET}/files/g7/{NAME}", **span) == 206
    refused = (
        "/inventory", f"/{'x' * len(SECRET)}/inventory", f"/{SECRET[:-1]}/inventory", f"/{SECRET}", f"/{SECRET}/files/g7/other",
        f"/{SECRET}/files/g7/../../secret", f"/{SECRET}/files/../a", f"/{SECRET}/files/g7/data/rank00001.safetensors",
        f"/{SECRET}/files/g7/%2e%2e/x", f"/{SECRET}/nothing",
    )  # fmt: skip
    for path in refused:
        assert status(address, path, **span) == 404, path
    for text in ("", "bytes=5-1", "bytes=0-", "bytes=-1", "bytes=0-99999999999999999999", "bytes=0-1,2-3"):
        assert status(address, f"/{SECRET}/files/g7/{NAME}", Range=text) in (404, 416), text
    for body in (b"", b"{", b"[]", b"null", b'{"files": 3}', json.dumps({"number": 1}).encode(), b"[" * 10000):
        assert status(address, f"/{SECRET}/copy", "POST", body) == 400, body[:20]
    assert status(address, "/wrong/copy", "POST", b"{}") == 404


def test_a_copy_is_checked_and_uses_the_pages_of_an_older_one(address: str, folder: HostFolder, tmp_path: Path) -> None:
    other = folder_at(tmp_path / "b")
    data = folder.path(7, NAME).read_bytes()
    files = (WantedFile(NAME, len(data), digest(data)), WantedFile("manifest.json", 2, ""))
    (other.generation(3) / "data").mkdir(parents=True)
    old = other.path(3, NAME)
    old.write_bytes(b"old" * 1000)
    inode = old.stat().st_ino
    assert copy_generation(other, CopyOrder(7, address, files, (7,))) == len(data) + 2
    assert other.path(7, NAME).read_bytes() == data
    assert other.path(7, NAME).stat().st_ino == inode
    assert other.inventory() == Inventory({7: {NAME: len(data), "manifest.json": 2}})
    wrong = (WantedFile(NAME, len(data), digest(b"")), files[1])
    with pytest.raises(StorageError, match="found checksum"):
        copy_generation(other, CopyOrder(7, address, wrong, (7,)))
    with pytest.raises(FormatError, match="no file of a generation"):
        copy_generation(other, CopyOrder(7, address, (WantedFile("../../x", 1, ""),), (7,)))
    assert not list((other.root / "spare").iterdir())


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    made = HostFolder(tmp_path, TOKEN)
    made.make()
    assert os.stat(made.root).st_mode & 0o777 == 0o700
    os.chmod(made.root, 0o755)
    with pytest.raises(StorageError, match="open to other users"):
        made.make()


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"g1": []},
        {"x": {}},
        {"g1": {"../x": 1}},
        {"g1": {NAME: -1}},
        {"g1": {NAME: True}},
        {f"g{n}": {} for n in range(65)},
    ],
)
def test_a_malformed_inventory_is_refused(value: object) -> None:
    with pytest.raises(FormatError, match=r"malformed|invalid"):
        Inventory.from_json(value)


def test_an_inventory_of_more_files_than_a_host_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may hold the files of all ranks of the largest job, and a hostile one cannot fill the memory of another."""
    of_largest_job = 2 * 100_000 + 3  # data and rows of each rank, manifest, index, about.json
    assert of_largest_job < generations.MOST_FILES < 10 * of_largest_job
    monkeypatch.setattr(generations, "MOST_FILES", 2)
    names = {f"data/rank{rank:05d}.safetensors": 1 for rank in range(3)}
    assert Inventory.from_json({"g1": dict(list(names.items())[:2])}).files[1]
    with pytest.raises(FormatError):
        Inventory.from_json({"g1": names})
