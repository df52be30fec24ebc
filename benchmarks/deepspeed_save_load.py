"""Saves and loads in DeepSpeed jobs: unickpt, DeepSpeed's own, torch.distributed.checkpoint, and the physical limits.

    python -m benchmarks.deepspeed_save_load [--ranks 2] [--millions 50] [--rounds 5] [--stage 1]
        [--peers dcp universal fastpersist] [--tensor 2 --pipeline 2] [--out FILE]

Every round measures, one after the other on the same engine:

- a warm copy in memory, and a raw write with fsync, of each rank's bytes;
- DeepSpeed's own save, and the time until its data is on the disk: it does not wait for that;
- unickpt's save: duration of the call (the stall), and time until the checkpoint is committed;
- a raw read, one with checksums, and all loads, from the page cache and, if it can be dropped, without it;
- training steps of DeepSpeed, alone and during asynchronous writes of unickpt and DCP;
- with ``dcp``: save, async_save and load of torch.distributed.checkpoint, with the same number of tensors and bytes per rank;
  also a load with the weights, which unickpt derives and DCP can only store;
- with ``universal``: DeepSpeed's ds_to_universal and its load_universal, and unickpt's loads under another layout: another ZeRO
  stage, or without tensor parallelism;
- with ``fastpersist``: DeepSpeed's save through its writer on libaio, where it can be built (``benchmarks.fastpersist``).

``--tensor`` and ``--pipeline`` make a ``PipelineModule`` with tensor-parallel layers. The bytes that all processes of the
machine send during a save show whether it gathers data (``/proc/net/dev``, on an otherwise idle machine).

Times are seconds of the slowest rank: medians with their spread, and ratios within a round, because a slow minute of the
machine affects all of a round. The first round is not counted, because it touches memory and disk for the first time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import fastpersist
from benchmarks.deepspeed_engine import EngineJob
from benchmarks.deepspeed_pipeline_engine import PipelineJob
from benchmarks.measure import Peak, cold, machine, most, publish, sent_bytes, settle, size_of, slowest, table, warm
from unickpt.testing.launch import command, environment

REPO = Path(__file__).resolve().parent.parent

AGAINST = {
    "raw write": ("raw write", ""),
    "DeepSpeed save": ("raw write", ""),
    "DeepSpeed save and sync": ("raw write", ""),
    "DCP save": ("raw write", "DeepSpeed save and sync"),
    "FastPersist save": ("raw write", "DeepSpeed save and sync"),
    "DCP async_save, stall": ("memory copy", "DeepSpeed save"),
    "DCP async_save, written": ("raw write", "DeepSpeed save and sync"),
    "unickpt stall": ("memory copy", "DeepSpeed save"),
    "unickpt committed": ("raw write", "DeepSpeed save and sync"),
    "DeepSpeed load": ("raw read", ""),
    "DCP load": ("raw read", "DeepSpeed load"),
    "DCP load with the weights": ("raw read", "DeepSpeed load"),
    "unickpt load": ("raw read", "DeepSpeed load"),
    "unickpt load, its reading": ("checked raw read", "DeepSpeed load"),
    "unickpt load as another layout": ("unickpt load", "ds_to_universal + load_universal"),
    "unickpt load as another layout, its reading": ("unickpt load, its reading", "ds_to_universal + load_universal"),
    "DeepSpeed load, uncached": ("raw read, uncached", ""),
    "DCP load, uncached": ("raw read, uncached", "DeepSpeed load, uncached"),
    "DCP load with the weights, uncached": ("raw read, uncached", "DeepSpeed load, uncached"),
    "unickpt load, uncached": ("raw read, uncached", "DeepSpeed load, uncached"),
    "unickpt load, uncached, its reading": ("checked raw read, uncached", "DeepSpeed load, uncached"),
    "ds_to_universal + load_universal": ("", "DeepSpeed load"),
    "step beside unickpt": ("step alone", "step beside DCP"),
    "step beside DCP": ("step alone", ""),
}
PEERS = ("dcp", "universal", "fastpersist")
CHECKED_BYTES = 256 << 10
MOST_BYTES = 256 << 20  # size of a block for the physical limits, larger than a CPU cache


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--millions", type=int, default=50, help="parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks; needs --pipeline")
    parser.add_argument("--pipeline", type=int, default=0, help="stages of a PipelineModule; 0 for a plain module")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--no-steps", action="store_true", help="save and load only, for models whose step takes a minute")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path, help="file for the seconds of every round")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


@contextlib.contextmanager
def natively(engine: Any, *, universal: bool = False, through: Any = None) -> Iterator[None]:
    """DeepSpeed's own saves and loads, on an engine that uses unickpt. ``through``: another checkpoint engine of DeepSpeed."""
    ours = engine.checkpoint_engine
    engine.checkpoint_engine = through or ours.native
    engine._config.load_universal_checkpoint = universal
    try:
        yield
    finally:
        engine.checkpoint_engine = ours
        engine._config.load_universal_checkpoint = False


class Raw:
    """Copies, writes and reads the number of bytes that a rank saves, with two blocks of memory in turn."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        import torch

        self.path = path
        self._turns = -(-size_bytes // (2 * MOST_BYTES))
        size = size_bytes // (2 * self._turns) // 4
        self._source, self.target = torch.rand(size), torch.zeros(size)
        self._views = [memoryview(t.numpy()).cast("B") for t in (self._source, self.target)] * self._turns

    def copy(self) -> None:
        for _ in range(2 * self._turns):
            self.target.copy_(self._source)

    def remove(self) -> None:
        """Before ``write``, as a checkpoint's files are new: a file system takes long to free the blocks of an old file."""
        self.path.unlink(missing_ok=True)

    def write(self) -> None:
        with self.path.open("wb", buffering=0) as file:
            for view in self._views:
                file.write(view)
            os.fsync(file.fileno())

    def read(self) -> None:
        with self.path.open("rb", buffering=0) as file:
            for view in self._views:
                file.readinto(view)

    def read_checked(self) -> None:
        """Read, and compute the xxh3_64 of each block while it is in the cache of the core."""
        import xxhash

        with self.path.open("rb", buffering=0) as file:
            for view in self._views:
                for at in range(0, len(view), CHECKED_BYTES):
                    block = view[at : at + CHECKED_BYTES]
                    file.readinto(block)
                    xxhash.xxh3_64_intdigest(block)


def reading_alone(directory: Path, rank: int, ranks: int, memory: Any) -> Callable[[], Any]:
    """Return a function that reads and checks the data file of a rank, as a load does, into memory that was used before.

    ``memory``: a tensor to fill again and again, as a raw read does. All threads are done before a place is filled again.
    """
    import torch

    from unickpt.checkpoint.format.dtypes import torch_dtype
    from unickpt.checkpoint.load.checkpoint import Checkpoint
    from unickpt.checkpoint.load.fragments import Request
    from unickpt.checkpoint.load.reader import execute

    checkpoint = Checkpoint.open(directory)
    index, sizes = checkpoint.index, checkpoint.index.size_bytes()
    rows = [row for row in range(len(sizes)) if index.file[row] == rank]
    memory = memory.view(torch.uint8)
    begin = min(int(index.offset_bytes[row]) for row in rows)
    shift, turns = 0, [list[Request]()]
    for row in sorted(rows, key=lambda row: int(index.offset_bytes[row])):
        info, size, offset = index.tensors[int(index.tensor[row])], int(sizes[row]), int(index.offset_bytes[row]) - begin
        if offset - shift + size > len(memory):
            shift = offset // 4096 * 4096  # to the beginning of the memory, with the alignment of the file
            turns.append([])
        out = memory[offset - shift : offset - shift + size].view(torch_dtype(info.dtype))
        turns[-1].append(Request(int(index.tensor[row]), index.box(row), out))
    plans = [checkpoint.plan(requests).plan for requests in turns]

    def read() -> None:
        for plan, requests in zip(plans, turns, strict=True):
            execute(checkpoint.storage, index, plan, requests, ranks=ranks)

    return read


class Dcp:
    """torch.distributed.checkpoint, with the number of tensors and bytes that a rank holds.

    Args:
        rank: this rank.
        count: number of tensors.
        size_bytes: of masters and moments of this rank.
        weight_bytes: of the weights of this rank, which ranks with whole weights have in common.
        whole: each rank has all weights.
    """

    def __init__(self, rank: int, count: int, size_bytes: int, weight_bytes: int = 0, *, whole: bool = True) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        self._dcp = dcp
        self._group = torch.distributed.new_group(
            backend="gloo"
        )  # its thread communicates, and can hang in the group of training
        self._tensors = {f"rank{rank}.{at}": torch.rand(size_bytes // 4 // count) for at in range(count)}
        owner = "weight" if whole else f"weight{rank}"
        self._weights = {f"{owner}.{at}": torch.ones(weight_bytes // 4 // count) for at in range(count)}

    def save(self, place: Path) -> None:
        self._dcp.save(dict(self._tensors), checkpoint_id=str(place))

    def save_behind(self, place: Path, **more: Any) -> Any:
        return self._dcp.async_save(dict(self._tensors), checkpoint_id=str(place), process_group=self._group, **more)

    def save_with_weights(self, place: Path) -> None:
        self._dcp.save(self._tensors | self._weights, checkpoint_id=str(place))

    def load(self, place: Path) -> None:
        self._dcp.load(dict(self._tensors), checkpoint_id=str(place))

    def load_with_weights(self, place: Path) -> None:
        self._dcp.load(self._tensors | self._weights, checkpoint_id=str(place))


def convert(place: Path) -> None:
    """DeepSpeed's own offline conversion, on rank 0, as in its documentation."""
    import deepspeed

    if deepspeed.comm.get_rank() == 0:
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(place / "stock" / "t")]
        command += ["--output_folder", str(place / "universal" / "t"), "--inject_missing_state"]
        command += ["--num_extract_workers", "2", "--num_merge_workers", "2"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    deepspeed.comm.barrier()


def worker(args: argparse.Namespace) -> None:
    """Measure on one rank. Rank 0 writes the seconds of every round as JSON."""
    import torch
    from deepspeed import comm as dist

    folder = Path(args.worker)
    job = PipelineJob.begin(args.millions, args.tensor, args.pipeline) if args.pipeline else EngineJob.start(args.millions)
    rank = job.rank
    engine = job.engine(args.stage)
    steps = partial(job.steps, engine)
    other = job.other(args.stage) if "universal" in args.peers else None
    mine = job.share_bytes(engine)
    raw = Raw(folder / f"raw{rank}", mine)
    whole = args.stage < 3
    of_weights = mine // 3 * (job.world if whole else 1)
    dcp = Dcp(rank, job.layers, mine, of_weights, whole=whole) if "dcp" in args.peers else None

    fast = fastpersist.checkpoint_engine(engine) if "fastpersist" in args.peers else None

    def native(action: str, place: Path, *, universal: bool = False, through: Any = None, **more: Any) -> None:
        with natively(engine, universal=universal, through=through):
            getattr(engine, f"{action}_checkpoint")(str(place), **more)

    def reading(loaded: Any, what: str) -> float:
        """Return the seconds of the slowest rank, and the bytes that all ranks read from storage and that they need."""
        report = loaded.checkpoint_engine.last_report
        seconds = torch.tensor([report.read_seconds])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        amounts = torch.tensor([report.bytes_read, report.bytes_needed])
        dist.all_reduce(amounts)
        read[what] = (int(amounts[0]), int(amounts[1]))
        return float(seconds.item())

    def synced() -> float:
        began = time.perf_counter()
        settle()
        return time.perf_counter() - began

    def committed() -> None:
        engine.checkpoint_engine.saver.finish()
        dist.barrier()

    seconds: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    peaks: dict[str, int] = {}
    read: dict[str, tuple[int, int]] = {}
    sent: dict[str, int] = {}
    for number in range(args.rounds + 1):
        place = folder / str(number)
        theirs, own, plain = (place / name for name in ("stock", "unickpt", "dcp"))
        raw.remove()
        found = {"memory copy": slowest(raw.copy), "raw write": slowest(raw.write)}
        before = sent_bytes()
        with Peak() as peak:
            found["DeepSpeed save"] = slowest(partial(native, "save", theirs, tag="t"))
        sent["DeepSpeed save"] = sent_bytes() - before
        peaks["DeepSpeed save"] = most(peak.bytes)
        found["DeepSpeed save and sync"] = found["DeepSpeed save"] + synced()  # it does not wait for the disk
        if fast is not None:
            found["FastPersist save"] = slowest(partial(native, "save", place / "fastpersist", tag="t", through=fast))
            sizes["FastPersist"] = size_of(place / "fastpersist" / "t")
            if number == 0:  # DeepSpeed can load what it wrote
                native("load", place / "fastpersist", tag="t")
        if dcp is not None:
            found["DCP save"] = slowest(partial(dcp.save, plain))
            settle()
            pending: list[Any] = []
            began = time.perf_counter()
            found["DCP async_save, stall"] = slowest(
                lambda d=dcp, at=place, to=pending: to.append(d.save_behind(at / "behind"))
            )
            found["step beside DCP"] = steps(pending[0].done)
            pending[0].result()
            found["DCP async_save, written"] = time.perf_counter() - began
        if not args.no_steps:
            found["step alone"] = steps(lambda: True, 8)
        before = sent_bytes()
        with Peak() as peak:
            engine.save_checkpoint(str(own), tag="alone")
            committed()
        sent["unickpt save"] = sent_bytes() - before
        peaks["unickpt, first save" if number == 0 else "unickpt save"] = most(peak.bytes)
        settle()
        began = time.perf_counter()
        found["unickpt stall"] = slowest(partial(engine.save_checkpoint, str(own), tag="quiet"))
        committed()
        found["unickpt committed"] = time.perf_counter() - began
        settle()
        if not args.no_steps:
            engine.save_checkpoint(str(own), tag="busy")
            found["step beside unickpt"] = steps(lambda: not engine.checkpoint_engine.saver.pending)
            committed()
        loads: dict[str, tuple[Path, Callable[[], Any]]] = {
            "raw read": (raw.path, raw.read),
            "checked raw read": (raw.path, raw.read_checked),
            "DeepSpeed load": (theirs, partial(native, "load", theirs, tag="t")),
            "unickpt load": (own, partial(engine.load_checkpoint, str(own), tag="quiet")),
        }
        if dcp is not None:
            dcp.save_with_weights(place / "whole")
            settle()
            loads["DCP load"] = (plain, partial(dcp.load, plain))
            loads["DCP load with the weights"] = (place / "whole", partial(dcp.load_with_weights, place / "whole"))
        for name, (files, load) in loads.items():
            warm(files)
            with Peak() as peak:
                found[name] = slowest(load)
            peaks[name] = most(peak.bytes)
            if name == "unickpt load":
                reading(engine, "unickpt load")
        alone = reading_alone(own / "quiet", rank, job.world, raw.target)
        found["unickpt load, its reading"] = slowest(alone)
        if other is not None:
            warm(own)
            found["unickpt load as another layout"] = slowest(partial(other.load_checkpoint, str(own), tag="quiet"))
            found["unickpt load as another layout, its reading"] = reading(other, "as another layout")
        for name, (_, load) in loads.items():  # late, because dropping the cache also drops the code of the programs
            if cold():
                found[f"{name}, uncached"] = slowest(load)
        if cold():
            found["unickpt load, uncached, its reading"] = slowest(alone)
        del alone
        if other is not None:
            began = time.perf_counter()
            convert(place)
            slowest(partial(native, "load", place / "universal", universal=True, tag=None))
            found["ds_to_universal + load_universal"] = time.perf_counter() - began
        if number:
            for name, value in found.items():
                seconds.setdefault(name, []).append(value)
        sizes |= {"DeepSpeed": size_of(theirs / "t"), "unickpt": size_of(own / "quiet")}
        sizes |= {"DCP": size_of(plain)} if dcp is not None else {}
        dist.barrier()
        if rank == 0:
            shutil.rmtree(place)
        dist.barrier()
    if rank == 0:
        (folder / "result.json").write_text(
            json.dumps({"seconds": seconds, "bytes": sizes, "mine": mine, "peaks": peaks, "read": read, "sent": sent})
        )
    dist.barrier()
    os._exit(0)  # gloo can abort while the interpreter shuts down


def main() -> None:
    args = parse()
    if args.worker:
        worker(args)
        return
    import deepspeed

    env = environment(REPO)
    unavailable = {}
    if "fastpersist" in args.peers:
        env |= fastpersist.ENVIRONMENT
        unavailable["fastpersist"] = fastpersist.problem(env)
        if unavailable["fastpersist"]:
            args.peers.remove("fastpersist")
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--{k}={getattr(args, k)}" for k in ("ranks", "millions", "rounds", "stage")]
        options += [f"--tensor={args.tensor}", f"--pipeline={args.pipeline}"] if args.pipeline else []
        options += ["--peers", *args.peers]
        options += ["--no-steps"] if args.no_steps else []
        if args.ranks * args.millions > 1000:  # blocks of 4 MB would leave 2 GB of holes in each rank's heap
            env["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
        job = command(args.ranks, "-m", "benchmarks.deepspeed_save_load", *options, "--worker", folder)
        subprocess.run(job, check=True, env=env, cwd=REPO, stdout=subprocess.DEVNULL)
        result = json.loads((Path(folder) / "result.json").read_text())
    data = args.ranks // (args.tensor * max(args.pipeline, 1))
    parallel = f"TP{args.tensor}/PP{args.pipeline}/DP{data}, " if args.pipeline else ""
    heading = (
        f"{args.millions}M parameters, fp32 with Adam, {parallel}ZeRO-{args.stage} on {args.ranks} ranks, "
        f"{result['mine']:,} bytes each, {args.rounds} rounds; {machine()}, DeepSpeed {deepspeed.__version__}."
    )
    limits = ("memory copy", "raw write", "raw read", "raw read, uncached", "checked raw read", "checked raw read, uncached")
    order = dict.fromkeys([*limits, *AGAINST, "step alone"])
    seconds = {name: result["seconds"][name] for name in order if name in result["seconds"]}
    against = {name: [other if other in seconds else "" for other in others] for name, others in AGAINST.items()}
    sizes = ", ".join(f"{name} {size:,}" for name, size in result["bytes"].items())
    peaks = ", ".join(f"{name} {size / 1e6:,.0f}" for name, size in result["peaks"].items() if "raw read" not in name)
    text = f"`python -m benchmarks.deepspeed_save_load {' '.join(options)}`\n\n{heading}\n\n"
    text += table(seconds, against, ["relative to the physical limit", "relative to the peer"])
    read = ", ".join(f"{name} {a:,} of {b:,} ({a / b:.3f})" for name, (a, b) in result["read"].items())
    text += f"\n\nBytes on disk: {sizes}. Bytes that all ranks read from storage, of bytes that they need: {read}."
    sent = ", ".join(f"{name} {size:,}" for name, size in result["sent"].items())
    text += f" Bytes that all processes send during a save: {sent}."
    text += f" Peak memory of a rank in addition to what it had before, in MB: {peaks}."
    text += "".join(f" {why}" for why in unavailable.values() if why) + "\n"
    publish(text, args.out)
    if args.json:
        ranks = "1 rank" if args.ranks == 1 else f"{args.ranks} ranks"
        title = f"DeepSpeed {parallel}ZeRO-{args.stage}, {args.millions}M, {ranks}"
        why = {name: text for name, text in unavailable.items() if text}
        found = {"title": title, "heading": heading, "ranks": args.ranks, **result, "unavailable": why}
        args.json.write_text(json.dumps([found]))


if __name__ == "__main__":
    main()
