"""Training time that a save costs: with copies behind training, with copies at the call, and for other writers.

    python -m benchmarks.lost_time [--ranks 1] [--millions 25] [--every 5] [--cycles 12] [--rows 48] [--together 1]
        [--only late eager ...] [--out FILE]

One job trains on. In turn, for each variant, it makes cycles of ``--every`` steps with a save before the first one, and as many
cycles without a save. With ``--together N``, N cycles with saves follow each other, then their end, then N
cycles without. The time lost per save is the sum over the positions of a cycle of the median seconds of the call and of
the step, minus the same without a save. So it has the call, and what training lost afterwards to the copy, checksums, writes,
locks and the collector. It is given as a ratio to a memory copy of the bytes of the rank; its range is that of four parts of
the run, each with every fourth cycle. Rows with more ranks than cores measure the machine.

Variants: ``late`` (unickpt), ``eager`` (unickpt with ``copy_behind_training`` off), ``memory`` (unickpt into the memory of
the host; with ``--every 1`` a save at each step), ``dcp`` and ``dcp-process`` (``async_save`` in a thread, and in a process),
``deepspeed`` (its own save). ``raw`` and ``raw-copy`` are the limit: a thread copies as many bytes, computes their checksums
and writes them past the page cache, or only copies them. None of its calls holds the interpreter lock.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.deepspeed_engine import WIDTH, EngineJob
from benchmarks.deepspeed_save_load import Dcp, Raw, natively
from benchmarks.measure import machine, publish, slowest
from unickpt.checkpoint.save.staging import StagingBuffer
from unickpt.checkpoint.storage.posix import PosixStorage
from unickpt.testing.launch import command, environment

REPO = Path(__file__).resolve().parent.parent
_PART_BYTES = 4 << 20
VARIANTS = ("late", "eager", "memory", "dcp", "dcp-process", "deepspeed", "raw", "raw-copy")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--millions", type=int, default=25)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--every", type=int, default=5, help="steps from one save to the next")
    parser.add_argument("--cycles", type=int, default=12, help="of each variant")
    parser.add_argument("--together", type=int, default=1, help="cycles with saves that follow each other")
    parser.add_argument("--rows", type=int, default=48, help="samples of a step and rank")
    parser.add_argument("--only", nargs="+", default=list(VARIANTS[:6]), choices=VARIANTS)
    parser.add_argument("--folder", type=Path, help="for checkpoints; default: that of temporary files")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


class Cycles:
    """Cycles of steps of one engine, with and without saves."""

    def __init__(self, job: EngineJob, engine: Any, every: int, rows: int) -> None:
        import torch

        self.job, self.engine, self.every = job, engine, every
        self._batch = torch.rand(rows, WIDTH)

    def step(self) -> None:
        self.engine.backward((self.engine(self._batch) ** 2).mean())
        self.engine.step()

    def run(self, save: Callable[[], Any] | None) -> list[float]:
        """Return the seconds of the call of the save, or 0, and of each step, on the slowest rank."""
        import torch
        import torch.distributed as dist

        taken = []
        for action in (save, *[self.step] * self.every):
            begin = time.perf_counter()
            if action is not None:
                action()
            taken.append(time.perf_counter() - begin)
        found = torch.tensor(taken, dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [float(seconds) for seconds in found]


def worker(args: argparse.Namespace) -> None:
    """Measure on one rank. Rank 0 writes the result as JSON."""
    folder = Path(args.worker)
    job = EngineJob.start(args.millions)
    engines = {"late": job.engine(args.stage)}
    if "eager" in args.only:
        engines["eager"] = job.engine(args.stage, copy_behind_training=False)
    if "memory" in args.only:
        engines["memory"] = job.engine(args.stage, memory={"to_disk_every": 1 << 30, "on_busy": "skip"})
    engine = engines["late"]
    mine = job.share_bytes(engine)
    raw = Raw(folder / f"raw{job.rank}", mine)
    found: dict[str, list[list[float]]] = {}
    alone: dict[str, list[list[float]]] = {}
    copies = []
    resident: dict[str, list[int]] = {}
    for name in args.only:
        own = engines.get(name, engine)
        cycles = Cycles(job, own, args.every, args.rows)
        save, finish = _saves(name, own, folder / name, job, mine)
        for number in range(args.cycles + 2):
            with_save = [cycles.run(save) for _ in range(args.together)]
            if args.together > 1:
                finish()
            without = [cycles.run(None) for _ in range(args.together)]
            finish()
            copies.append(slowest(raw.copy))
            resident.setdefault(name, []).append(resident_bytes())
            if number > 1:  # the first ones touch memory and disk for the first time
                found.setdefault(name, []).extend(with_save)
                alone.setdefault(name, []).extend(without)
        if job.rank == 0:
            shutil.rmtree(folder / name, ignore_errors=True)
    if job.rank == 0:
        result = {"copy": statistics.median(copies), "bytes": mine, "saves": found, "alone": alone, "resident": resident}
        (folder / "result.json").write_text(json.dumps(result))


def _saves(name: str, engine: Any, place: Path, job: EngineJob, mine: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the call of a save, and what waits for its end."""
    number = [0]

    def tag() -> str:
        number[0] += 1
        return f"t{number[0]}"

    def cleared(last: int) -> None:
        if job.rank == 0:
            shutil.rmtree(place / f"t{last}", ignore_errors=True)

    if name.startswith("raw"):
        behind = RawBehind(place, mine, written=name == "raw")
        return behind.begin, behind.finish
    if name == "memory":
        return lambda: engine.save_checkpoint(str(place), tag=tag()), lambda: None
    if name in ("late", "eager"):

        def finish() -> None:
            engine.checkpoint_engine.saver.finish()
            cleared(number[0])

        return lambda: engine.save_checkpoint(str(place), tag=tag()), finish
    if name == "deepspeed":

        def native() -> None:
            with natively(engine):
                engine.save_checkpoint(str(place), tag=tag())

        return native, lambda: cleared(number[0])
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    dcp, pending = Dcp(job.rank, job.layers, mine), list[Any]()
    kind = AsyncCheckpointerType.PROCESS if name == "dcp-process" else AsyncCheckpointerType.THREAD

    def in_background() -> None:
        pending.append(dcp.save_behind(place / tag(), async_checkpointer_type=kind))

    def ended() -> None:
        while pending:
            pending.pop().result()
        cleared(number[0])

    return in_background, ended


class RawBehind:
    """The limit of a save behind training.

    Args:
        place: folder for the file.
        size_bytes: to copy.
        written: compute checksums of the copy, and write it.
    """

    def __init__(self, place: Path, size_bytes: int, *, written: bool) -> None:
        import torch

        place.mkdir(parents=True, exist_ok=True)
        self._storage, self._path, self._written = PosixStorage(str(place)), place / "raw", written
        self._source = torch.zeros(size_bytes, dtype=torch.uint8)
        self._target = StagingBuffer(size_bytes).tensor[:size_bytes]
        self._thread = threading.Thread()

    def begin(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def finish(self) -> None:
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        for at in range(0, len(self._target), _PART_BYTES):
            self._target[at : at + _PART_BYTES].copy_(self._source[at : at + _PART_BYTES])
        if not self._written:
            return
        data = memoryview(self._target.numpy())
        with self._storage.create(self._path.name, direct=True) as sink:
            for at in range(0, len(data), _PART_BYTES):
                xxhash.xxh3_64_intdigest(data[at : at + _PART_BYTES])
                sink.write([data[at : at + _PART_BYTES]])


def lost(saves: list[list[float]], alone: list[list[float]]) -> tuple[float, float, float]:
    """Return the seconds lost per save, those of the call alone, and the seconds of a step without saves."""
    with_save = [statistics.median(values) for values in zip(*saves, strict=True)]
    step = statistics.median(seconds for cycle in alone for seconds in cycle[1:])
    without = [statistics.median(values) for values in zip(*alone, strict=True)]
    return sum(with_save) - sum(without), with_save[0], step


PARTS = 4


def spread(saves: list[list[float]], alone: list[list[float]]) -> tuple[float, float]:
    """Return the least and the most seconds lost per save, of parts of the run that have every fourth cycle."""
    parts = [lost(saves[at::PARTS], alone[at::PARTS])[0] for at in range(min(PARTS, len(saves)))]
    return min(parts), max(parts)


def resident_bytes() -> int:
    """Return the resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    args = parse()
    if args.worker:
        worker(args)
        return
    with tempfile.TemporaryDirectory(prefix="unickpt-lost-time", dir=args.folder) as folder:
        words = sys.argv[1:]
        given = [
            word
            for before, word in zip(["", *words], words, strict=False)
            if not word.startswith("--out") and before != "--out"
        ]
        arguments = ["-m", "benchmarks.lost_time", *given, "--worker", folder]
        done = subprocess.run(command(args.ranks, *arguments), cwd=REPO, env=environment(REPO), check=False)
        result = Path(folder) / "result.json"
        if done.returncode or not result.is_file():
            raise SystemExit(f"the job ended with {done.returncode}")
        data = json.loads(result.read_text())
    lines = [
        f"{args.millions}M parameters, fp32 with Adam, ZeRO-{args.stage} on {args.ranks} ranks, {data['bytes']:,} bytes each, "
        f"every {args.every} steps, {args.cycles * args.together} saves; one OpenMP thread; "
        f"memory copy {1e3 * data['copy']:.0f} ms; {machine()}.",
        "",
        "| variant | call | lost per save | in copies | step without | a step is longer by | memory grown in the second half |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in args.only:
        seconds, call, step = lost(data["saves"][name], data["alone"][name])
        least, most = spread(data["saves"][name], data["alone"][name])
        grown = (data["resident"][name][-1] - data["resident"][name][len(data["resident"][name]) // 2]) / 1e6
        lines.append(
            f"| {name} | {1e3 * call:.1f} ms | {1e3 * seconds:.0f} ms | "
            f"{seconds / data['copy']:.2f} ({least / data['copy']:.2f} to {most / data['copy']:.2f}) | {1e3 * step:.0f} ms | "
            f"{100 * seconds / args.every / step:.1f}% | {grown:.1f} MB |"
        )
    publish("\n".join(lines) + "\n", args.out)


if __name__ == "__main__":
    main()
