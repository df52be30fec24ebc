"""Under torchrun: steps in which all ranks meet, without torch, so that 64 of them start within seconds on two cores.

Usage: ``light_worker.py FOLDER``. Rank 0 collects the step of every rank over TCP, and answers all of them. As in a collective,
a rank that does not come stops all, and one that ends breaks the connection of all. Each start adds a line to `FOLDER/starts`:
round, rank, world, step, pid, host. Rank 0 adds each step to ``FOLDER/steps``: round, step, time, and writes ``FOLDER/saved``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
import zlib
from pathlib import Path

STEP_S = 0.2
_WAIT_S = 60.0  # for rank 0 to listen
_STEP = struct.Struct("<q")


def _received(peer: socket.socket) -> int:
    data = b""
    while len(data) < _STEP.size:
        more = peer.recv(_STEP.size - len(data))
        if not more:
            raise ConnectionError("a rank has ended")
        data += more
    return int(_STEP.unpack(data)[0])


def _append(path: Path, line: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, line.encode())
    os.close(file)


def _collects(port: int, world: int) -> list[socket.socket]:
    listening = socket.create_server(("", port), backlog=world)
    peers = [listening.accept()[0] for _ in range(world - 1)]
    listening.close()
    return peers


def _connected(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _WAIT_S
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection((address, port), timeout=None)
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 does not listen at {address}:{port}")
        time.sleep(0.1)


def main() -> None:
    folder, epoch = Path(sys.argv[1]), os.environ["UNICKPT_ROUND"]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    saved, host = folder / "saved", os.environ.get("STEERED_HOST", "")
    port = 20_000 + zlib.crc32(epoch.encode()) % 10_000
    peers = _collects(port, world) if rank == 0 else [_connected(os.environ["MASTER_ADDR"], port)]
    step = int(saved.read_text()) if rank == 0 and saved.exists() else 0
    _append(folder / "starts", f"{epoch} {rank} {world} {step} {os.getpid()} {host}\n")
    while True:
        if rank:
            peers[0].sendall(_STEP.pack(step))
            step = _received(peers[0])
            continue
        steps = {_received(each) for each in peers}
        assert len(steps) <= 1, f"ranks are in different steps: {steps}"
        step += 1
        _append(folder / "steps", f"{epoch} {step} {time.time():.3f}\n")
        part = folder / "saved.part"
        part.write_text(str(step))
        part.rename(saved)
        time.sleep(STEP_S)
        for each in peers:
            each.sendall(_STEP.pack(step))


if __name__ == "__main__":
    main()
