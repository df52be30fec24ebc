"""Checkpoints in memory: stall, time until the copies on the other host are complete, and loads, beside the physical limits.

    python -m benchmarks.memory_tier [--framework deepspeed|megatron] [--ranks 2] [--millions 50] [--rounds 5] [--stage 1]
        [--peers dcp nvrx] [--saves-only] [--out FILE]

``python -m benchmarks.run`` runs all cases of ``docs/evidence/memory.md``.

The ranks of a job are divided among two hosts, which are two network namespaces of this machine (as root; otherwise all share
the loopback interface). Each host has a folder in shared memory and a keeper. Every round measures, one after the other:

- a warm copy in memory of each rank's bytes; a TCP transfer of them to the other host, all ranks at once;
- DCP's async_save: duration of the call;
- NVRx's local checkpoints (``benchmarks.local_checkpoints``): duration of the asynchronous call, and until all is written;
- unickpt's asynchronous save to disk: duration of the call;
- unickpt's save into memory: duration of the call, and time until all copies are confirmed;
- training steps alone, and during the copies;
- loads: from the own memory, from the copy on the other host after the loss of one, from disk.

``--saves-only`` is for models whose copies do not fit into the memory of one machine: no copies, no peers that keep a copy, no
loads. Times are seconds of the slowest rank: medians with their spread, and ratios within a round. The first two rounds are not
counted: they take fresh pages for the two generations.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import local_checkpoints
from benchmarks.deepspeed_engine import EngineJob
from benchmarks.deepspeed_save_load import Dcp, Raw
from benchmarks.measure import machine, publish, settle, slowest, table, warm
from benchmarks.memory_jobs import DeepSpeedMemory, MegatronMemory, MemoryJob
from benchmarks.two_hosts import TwoHosts

AGAINST = {
    "DCP async_save, stall": ("memory copy", ""),
    "NVRx, stall": ("memory copy", ""),
    "NVRx, replicated and written": ("TCP transfer", ""),
    "disk, stall": ("memory copy", "DCP async_save, stall", "NVRx, stall"),
    "memory, stall": ("memory copy", "DCP async_save, stall", "NVRx, stall"),
    "memory, copies confirmed": ("TCP transfer", "", "NVRx, replicated and written"),
    "load from memory": ("memory copy", "", ""),
    "load after the loss of a host": ("TCP transfer", "", ""),
    "step beside the copies": ("step alone", "", ""),
}
COLUMNS = ("relative to the physical limit", "relative to DCP", "relative to NVRx")
PEERS = ("dcp", "nvrx")
WARM_UP = 2
CHUNK = 4 << 20
LIMIT_S = 1200.0
SEPARATE = "BENCHMARK_SEPARATE_HOSTS"  # the hosts are network namespaces


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--framework", choices=("deepspeed", "megatron"), default="deepspeed")
    parser.add_argument("--ranks", type=int, default=2, help="an even number; half of them on each host")
    parser.add_argument("--millions", type=int, default=50, help="parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage", type=int, default=1, help="ZeRO stage of DeepSpeed")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--saves-only", action="store_true", help="no copies on the other host, no peers and no loads")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path, help="file for the seconds of every round")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="longest duration of the job, in seconds")
    parser.add_argument("--hosts", type=int, default=2, help=argparse.SUPPRESS)
    return parser.parse_args()


class Transfer:
    """A TCP transfer of this rank's bytes to the other host, from a file in memory into warm memory. All ranks make one."""

    RECEIVER = (
        "import socket, sys\n"
        "server = socket.create_server((sys.argv[1], 0)); print(server.getsockname()[1], flush=True)\n"
        "line, _ = server.accept()\n"
        "into = memoryview(bytearray(int(sys.argv[2])))\n"
        "while True:\n"
        "    at = 0\n"
        "    while at < len(into):\n"
        "        count = line.recv_into(into[at:at + (4 << 20)])\n"
        "        if not count: sys.exit()\n"
        "        at += count\n"
        "    line.sendall(b'.')\n"
    )

    def __init__(self, path: Path, size_bytes: int, address: str) -> None:
        import torch.distributed as dist

        self._size = size_bytes
        self._file = path.open("wb+")
        for at in range(0, size_bytes, CHUNK):
            self._file.write(os.urandom(min(CHUNK, size_bytes - at)))
        self._file.flush()
        rank, world = dist.get_rank(), dist.get_world_size()
        peer = (rank + world // 2) % world
        sizes: list[Any] = [None] * world
        dist.all_gather_object(sizes, size_bytes)
        command = [sys.executable, "-c", self.RECEIVER, address, str(sizes[peer])]  # of the rank that sends to this one
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        places: list[Any] = [None] * world
        dist.all_gather_object(places, (address, int(self._process.stdout.readline())))
        self._line = socket.create_connection(places[peer])

    def __call__(self) -> None:
        at = 0
        while at < self._size:
            at += os.sendfile(self._line.fileno(), self._file.fileno(), at, self._size - at)
        self._line.recv(1)

    def close(self) -> None:
        self._line.close()
        self._process.kill()
        self._process.wait(10)
        self._file.close()


def job_of(args: argparse.Namespace, folder: Path, host: Path) -> MemoryJob:
    """Start the job on this rank."""
    replicas = 0 if args.saves_only else 1
    if args.framework == "megatron":
        return MegatronMemory(args.millions, folder / "run", host, replicas)
    job = EngineJob.start(args.millions)
    return DeepSpeedMemory(job, args.stage, folder / "run", host, replicas, disk=not args.saves_only)


def worker(args: argparse.Namespace) -> None:
    """Measure on one rank. Rank 0 writes the seconds of every round as JSON."""
    import logging

    folder = Path(args.worker)
    rank, per_host = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // args.hosts
    hosts, here = folder / "memory", int(os.environ["RANK"]) // per_host
    job = job_of(args, folder, hosts / f"host{here}")
    import torch
    import torch.distributed as dist

    logging.getLogger("unickpt").setLevel(logging.WARNING)
    mine, world = job.share_bytes, job.world
    raw = Raw(folder / f"raw{rank}", mine)
    dcp = Dcp(rank, job.tensors, mine) if "dcp" in args.peers else None
    nvrx = None
    if "nvrx" in args.peers:
        held = {f"{at}": torch.rand(mine // 4 // job.tensors) for at in range(job.tensors)}
        nvrx = local_checkpoints.LocalCheckpoints(hosts / f"nvrx{here}", held, per_host, replicate=True)
    address = TwoHosts.ADDRESSES[here] if args.separate else "127.0.0.1"
    transfer = None if args.saves_only else Transfer(hosts / f"raw{rank}", mine, address)
    seconds: dict[str, list[float]] = {}

    def since(began: float) -> float:
        dist.barrier()
        return time.perf_counter() - began

    for number in range(args.rounds + WARM_UP):
        place = folder / str(number)
        found = {"memory copy": slowest(raw.copy)}
        if transfer is not None:
            found["TCP transfer"] = slowest(transfer)
        if dcp is not None:
            futures: list[Any] = []
            found["DCP async_save, stall"] = slowest(lambda to=futures, by=dcp, at=place: to.append(by.save_behind(at / "dcp")))
            futures[0].result()
        if nvrx is not None:
            settle()
            began = time.perf_counter()
            found["NVRx, stall"] = slowest(nvrx.save)
            nvrx.finish()
            found["NVRx, replicated and written"] = since(began)
        if not args.saves_only:
            settle()
            found["disk, stall"] = slowest(partial(job.save_to_disk, place))
            job.finish_disk()
        settle()
        began = time.perf_counter()
        found["memory, stall"] = slowest(job.save_to_memory)
        job.confirmed()
        found["memory, copies confirmed"] = since(began)
        if not args.saves_only:
            found["step alone"] = job.steps(lambda: True, 8)
            job.save_to_memory()
            found["step beside the copies"] = job.steps(lambda: not job.pending(), 4)
            job.confirmed()
            found["load from memory"] = slowest(job.load_from_memory)
            warm(place)
            found["load from disk"] = slowest(partial(job.load_from_disk, place))
        if number >= WARM_UP:
            for name, value in found.items():
                seconds.setdefault(name, []).append(value)
        dist.barrier()
        if rank == 0:
            print(
                f"round {number}: {', '.join(f'{name} {value:.3f}' for name, value in found.items())}",
                file=sys.stderr,
                flush=True,
            )
            shutil.rmtree(place, ignore_errors=True)
    if not args.saves_only:
        job.save_to_memory()
        job.confirmed()
    for number in range(0 if args.saves_only else args.rounds):  # the last host is lost: its ranks are on a new one
        if rank == world - 1:
            for lost in hosts.glob(f"host{here}*"):
                shutil.rmtree(lost, ignore_errors=True)
        dist.barrier()
        restarted = job.moved(hosts / (f"host{here}" if here < args.hosts - 1 else f"host{here}.{number}"))
        seconds.setdefault("load after the loss of a host", []).append(slowest(restarted.load_from_memory))
        del restarted
    if transfer is not None:
        transfer.close()
    if rank == 0:
        (folder / "result.json").write_text(json.dumps({"seconds": seconds, "mine": mine}))
    dist.barrier()
    job.end()


def main() -> None:
    args = parse()
    args.separate = os.environ.get(SEPARATE) == "1"
    if args.worker:
        worker(args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the namespaces are removed
    unavailable = ""
    if args.saves_only:
        args.peers = []
    if args.ranks < 2 or args.ranks % 2:
        raise SystemExit("--ranks must be even: half of them are on each host")
    if "nvrx" in args.peers and local_checkpoints.problem():
        unavailable = f" NVRx was not measured: {local_checkpoints.problem()}."
        args.peers.remove("nvrx")
    options = [f"--{name}={getattr(args, name)}" for name in ("framework", "ranks", "millions", "rounds", "stage")]
    options += ["--peers", *args.peers] + (["--saves-only"] if args.saves_only else [])
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory, TwoHosts() as hosts:
        os.symlink(memory, Path(folder) / "memory")
        env = {SEPARATE: "1" if hosts.names else "0"}
        if args.ranks * args.millions > 1000:  # as in benchmarks.deepspeed_save_load
            env["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
        hosts.run(args.ranks, ["-m", "benchmarks.memory_tier", *options, "--worker", folder], env, args.limit_s)
        result = json.loads((Path(folder) / "result.json").read_text())
        where = hosts.described
    from importlib.metadata import version

    if args.framework == "megatron":
        what, using = "bf16, distributed optimizer", f"megatron-core {version('megatron-core')}"
    else:
        what, using = f"fp32 with Adam, ZeRO-{args.stage}", f"DeepSpeed {version('deepspeed')}"
    heading = (
        f"{args.millions}M parameters, {what}, {args.ranks} ranks on {where}, {result['mine']:,} bytes each, "
        f"{args.rounds} rounds; {machine()}, {using}.{unavailable}"
    )
    seconds = result["seconds"]
    order = dict.fromkeys(["memory copy", "TCP transfer", *AGAINST, "load from disk", "step alone"])
    measured = {name: seconds[name] for name in order if name in seconds}
    against = {name: [other if other in measured else "" for other in others] for name, others in AGAINST.items()}
    text = f"`python -m benchmarks.memory_tier {' '.join(options)}`\n\n{heading}\n\n"
    text += table(measured, against, COLUMNS) + "\n"
    publish(text, args.out)
    if args.json:
        kind = "Megatron" if args.framework == "megatron" else f"DeepSpeed ZeRO-{args.stage}"
        title = f"{kind}, {args.millions}M, {args.ranks} ranks"
        why = {"nvrx": unavailable.strip()} if unavailable else {}
        found = {"title": title, "heading": heading, "ranks": args.ranks, **result, "unavailable": why}
        args.json.write_text(json.dumps([found]))


if __name__ == "__main__":
    main()
