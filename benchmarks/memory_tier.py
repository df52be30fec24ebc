"""Checkpoints in memory: stall, time until the copies on other hosts are complete, and loads, beside the physical limits.

    python -m benchmarks.memory_tier [--hosts 2] [--millions 50] [--rounds 5] [--stage 1] [--out docs/evidence/memory.md]

Each rank of a DeepSpeed job is a host of its own, with a folder in shared memory and a keeper. Every round measures, one after
the other on the same engine:

- a warm copy in memory of each rank's bytes; a TCP transfer of them between processes, all ranks at once;
- DCP's async_save: duration of the call;
- unickpt's asynchronous save to disk: duration of the call;
- unickpt's save into memory: duration of the call, and time until all copies are confirmed;
- training steps alone, and during the copies;
- loads: from the own memory, from a copy on another host after the loss of one, from disk.

Times are seconds of the slowest rank: medians with their spread, and ratios within a round. The first two rounds are not
counted: they take fresh pages for the two generations.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.deepspeed_engine import EngineJob
from benchmarks.deepspeed_save_load import REPO, Dcp, Raw
from benchmarks.measure import machine, publish, settle, slowest, table, warm
from unickpt.testing.launch import command, environment

AGAINST = {
    "DCP async_save, stall": ("memory copy", ""),
    "disk, stall": ("memory copy", "DCP async_save, stall"),
    "memory, stall": ("memory copy", "DCP async_save, stall"),
    "memory, copies confirmed": ("TCP transfer", ""),
    "load from memory": ("memory copy", "load from disk"),
    "load after the loss of a host": ("TCP transfer", "load from disk"),
    "step beside the copies": ("step alone", ""),
}
WARM_UP = 2
CHUNK = 4 << 20


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--millions", type=int, default=50, help="parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


class Transfer:
    """A TCP transfer of the bytes of this rank to a process of its own, from a file in memory into warm memory."""

    RECEIVER = (
        "import socket, sys; line = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "into = memoryview(bytearray(int(sys.argv[2])))\n"
        "while True:\n"
        "    at = 0\n"
        "    while at < len(into):\n"
        "        count = line.recv_into(into[at:at + (4 << 20)])\n"
        "        if not count: sys.exit()\n"
        "        at += count\n"
        "    line.sendall(b'.')\n"
    )

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._size = size_bytes
        self._file = path.open("wb+")
        for _ in range(0, size_bytes, CHUNK):
            self._file.write(os.urandom(CHUNK))
        self._file.flush()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
            self._process = subprocess.Popen(["python3", "-c", self.RECEIVER, port, str(size_bytes)])
            self._line, _ = server.accept()

    def __call__(self) -> None:
        at = 0
        while at < self._size:
            at += os.sendfile(self._line.fileno(), self._file.fileno(), at, self._size - at)
        self._line.recv(1)

    def close(self) -> None:
        self._line.close()
        self._process.wait(10)
        self._file.close()


def worker(args: argparse.Namespace) -> None:
    """Measure on one rank. Rank 0 writes the seconds of every round as JSON."""
    from deepspeed import comm as dist

    folder = Path(args.worker)
    job = EngineJob.start(args.millions)
    rank, world, steps = job.rank, job.world, job.steps
    hosts = folder / "memory"

    def build(host: int, every: int) -> Any:
        place = hosts / f"host{host}"
        place.mkdir(parents=True, exist_ok=True)
        return job.engine(args.stage, memory={"to_disk_every": every, "folder": str(place)})

    engine, disk = build(rank, 1 << 30), build(rank, 0)
    mine = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()) * 12 // world
    raw, dcp = Raw(folder / f"raw{rank}", mine), Dcp(rank, job.layers, mine)
    transfer = Transfer(hosts / f"raw{rank}", mine)
    seconds: dict[str, list[float]] = {}

    def pending() -> list[Any]:
        return [save for known in engine.checkpoint_engine.memory._folders.values() for save in known.saver.pending]

    def confirmed() -> None:
        for save in pending():
            save.wait()
            assert save.committed, save.cause()
        dist.barrier()

    for number in range(args.rounds + WARM_UP):
        place = folder / str(number)
        found = {"memory copy": slowest(raw.copy), "TCP transfer": slowest(transfer)}
        futures: list[Any] = []
        found["DCP async_save, stall"] = slowest(lambda to=futures, at=place: to.append(dcp.save_behind(at / "dcp")))
        futures[0].result()
        settle()
        found["disk, stall"] = slowest(partial(disk.save_checkpoint, str(place), tag="t"))
        disk.checkpoint_engine.saver.finish()
        settle()
        began = time.perf_counter()
        found["memory, stall"] = slowest(partial(engine.save_checkpoint, str(folder / "run")))
        confirmed()
        found["memory, copies confirmed"] = time.perf_counter() - began
        found["step alone"] = steps(engine, lambda: True, 8)
        engine.save_checkpoint(str(folder / "run"))
        found["step beside the copies"] = steps(engine, lambda: not pending(), 4)
        confirmed()
        found["load from memory"] = slowest(partial(engine.load_checkpoint, str(folder / "run")))
        warm(place)
        found["load from disk"] = slowest(partial(disk.load_checkpoint, str(place), tag="t"))
        if number >= WARM_UP:
            for name, value in found.items():
                seconds.setdefault(name, []).append(value)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(place)
    engine.save_checkpoint(str(folder / "run"))
    confirmed()
    for _ in range(args.rounds):  # the last host is lost: its rank is on a new one
        if rank == world - 1:
            shutil.rmtree(hosts / f"host{rank}", ignore_errors=True)
        dist.barrier()
        lost = build(rank if rank < world - 1 else world + len(seconds), 1 << 30)
        seconds.setdefault("load after the loss of a host", []).append(
            slowest(partial(lost.load_checkpoint, str(folder / "run")))
        )
        del lost
    transfer.close()
    if rank == 0:
        (folder / "result.json").write_text(json.dumps({"seconds": seconds, "mine": mine}))
    dist.barrier()
    os._exit(0)  # gloo can abort while the interpreter shuts down


def main() -> None:
    args = parse()
    if args.worker:
        worker(args)
        return
    import deepspeed

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        os.symlink(memory, Path(folder) / "memory")
        options = [f"--{name}={getattr(args, name)}" for name in ("hosts", "millions", "rounds", "stage")]
        job = command(args.hosts, "-m", "benchmarks.memory_tier", *options, "--worker", folder)
        subprocess.run(job, check=True, env=environment(REPO), cwd=REPO, stdout=subprocess.DEVNULL)
        result = json.loads((Path(folder) / "result.json").read_text())
    heading = (
        f"{args.millions}M parameters, fp32 with Adam, ZeRO-{args.stage}, {args.hosts} ranks on as many simulated hosts, "
        f"{result['mine']:,} bytes each, {args.rounds} rounds; {machine()}, DeepSpeed {deepspeed.__version__}."
    )
    seconds = result["seconds"]
    order = dict.fromkeys(["memory copy", "TCP transfer", *AGAINST, "load from disk", "step alone"])
    measured = {name: seconds[name] for name in order if name in seconds}
    against = {name: [other if other in measured else "" for other in others] for name, others in AGAINST.items()}
    text = f"`python -m benchmarks.memory_tier {' '.join(options)}`\n\n{heading}\n\n"
    text += table(measured, against, ["relative to the physical limit", "relative to the peer"]) + "\n"
    publish(text, args.out)


if __name__ == "__main__":
    main()
