"""Measure the steps of a save and a load, each in a process of its own. See ``benchmarks.metadata_scale``."""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import benchmarks.metadata_scale
from benchmarks.measure import machine
from benchmarks.metadata_scale.layouts import Layout
from benchmarks.metadata_scale.models import Model, llama_405b, moe_1t
from benchmarks.metadata_scale.written_rows import rows_of_ranks, targets_of
from unickpt.checkpoint.format import index_codec
from unickpt.checkpoint.format import rank_rows as rows
from unickpt.checkpoint.format.checksums import digest
from unickpt.checkpoint.format.index import Index, check_complete, check_coverage
from unickpt.checkpoint.format.layout import RankFiles
from unickpt.checkpoint.format.manifest import FileRecord
from unickpt.checkpoint.load.read_plan import plan_reads
from unickpt.checkpoint.load.validation import check_places
from unickpt.checkpoint.save.commit import read_rows
from unickpt.checkpoint.storage.posix import PosixStorage

CASES = {"dense-1": (llama_405b, 1, 1), "dense-3": (llama_405b, 3, 1), "moe-1": (moe_1t, 1, 16), "moe-3": (moe_1t, 3, 16)}

Result = dict[str, Any]


def layouts_of(case: str, world: int) -> tuple[Model, Layout, Layout]:
    """Return the model, the layout that saves, and the layout that loads, with other degrees and the other ZeRO stage."""
    make, zero, ep = CASES[case]
    return make(), Layout(world, tp=8, pp=16, zero=zero, ep=ep), Layout(world, tp=4, pp=8, zero=4 - zero, ep=max(ep // 2, 1))


def generate(folder: Path, case: str, world: int) -> Result:
    """Write the rows of all ranks, one after the other, and the sizes of their data files."""
    model, layout, _ = layouts_of(case, world)
    lengths, sizes, headers = [], [], []
    tensors, table = None, b""
    with (folder / "rows").open("wb") as out:
        for found in rows_of_ranks(model, layout):
            if found.tensors is not tensors:  # another stage
                tensors, table = found.tensors, rows.packed_table(found.tensors)
            lengths.append(out.write(rows.pack(found.rows, table, found.own)))
            sizes.append(found.size_bytes)
            headers.append(found.header_bytes)
    np.savez(folder / "files.npz", length=lengths, size=sizes, header=headers)
    return {"rows_bytes": sum(lengths)}


def names_of(count: int) -> list[str]:
    return [RankFiles(rank, 0).data for rank in range(count)]


def timed(steps: Mapping[str, Callable[[Any], Any]], first: Any, rounds: int) -> Result:
    """Run steps, each on the result of the one before. Returns seconds and processor seconds of the fastest round."""
    best: Result = {}
    for _ in range(rounds):
        value, found = first, {}
        begin, processor = time.perf_counter(), time.process_time()
        for name, step in steps.items():
            at = time.perf_counter()
            value = step(value)
            found[name] = time.perf_counter() - at
        found |= {"seconds": time.perf_counter() - begin, "processor": time.process_time() - processor}
        if not best or found["seconds"] < best["seconds"]:
            best = found
    return {**best, "result": value}


def merge(folder: Path, rounds: int) -> Result:
    """Measure the coordinator's work from the rows that it has read to the bytes of the index."""
    lengths = np.load(folder / "files.npz")["length"].tolist()
    with (folder / "rows").open("rb") as source:  # one by one: a second copy of the rows would hide memory that is used later
        parts = [(name, source.read(length)) for name, length in zip(names_of(len(lengths)), lengths, strict=True)]
    before = peak_bytes()

    def checked(index: Index) -> Index:
        check_coverage(index)
        return index

    def signed(table: bytes) -> bytes:
        digest(table)
        return table

    steps = {"merge": rows.merge, "coverage": checked, "to_bytes": index_codec.to_bytes, "digest": signed}
    found = timed(steps, parts, rounds)
    table = found.pop("result")
    (folder / "index").write_bytes(table)
    return {**found, "index_bytes": len(table), "memory_bytes": peak_bytes() - before}


def plan(folder: Path, case: str, world: int, rounds: int) -> Result:
    """Measure the work of one rank of another layout from the bytes of the index to its plan, with all checks of a load."""
    model, _, layout = layouts_of(case, world)
    table = (folder / "index").read_bytes()
    files = np.load(folder / "files.npz")
    sizes, headers = files["size"].tolist(), files["header"].tolist()
    records = {n: FileRecord(n, s, "", h, "") for n, s, h in zip(names_of(world), sizes, headers, strict=True)}
    before = peak_bytes()

    def opened(data: bytes) -> Index:
        digest(data)
        return index_codec.from_bytes(data, where="index")

    def checked(index: Index) -> Index:
        check_complete(index)
        check_places(index, records, "index")
        return index

    def planned(index: Index) -> tuple[Index, int, int]:
        targets = targets_of(model, layout, world // 2 + 1, index)
        return index, len(targets), len(plan_reads(index, targets).fragment)

    found = timed({"from_bytes": opened, "checks": checked, "plan": planned}, table, rounds)
    index, targets, reads = found.pop("result")
    counts = {"fragments": len(index), "tensors": len(index.tensors), "targets": targets, "reads": reads}
    return {**found, **counts, "memory_bytes": peak_bytes() - before}


def files(folder: Path) -> Result:
    """Measure reading the ranks' rows from disk, as the coordinator does: sizes of the data files, then the rows."""
    storage = PosixStorage(folder / "checkpoint")
    sizes = np.load(folder / "files.npz")
    for kind in ("data", "rows"):
        (storage.root / kind).mkdir(parents=True)
    with (folder / "rows").open("rb") as source:
        for rank, length in enumerate(sizes["length"].tolist()):
            storage.path(RankFiles(rank, 0).rows).write_bytes(source.read(length))
            storage.path(RankFiles(rank, 0).data).touch()
    records = [FileRecord(name, 0, "", 0, "") for name in names_of(len(sizes["length"]))]
    begin, processor = time.perf_counter(), time.process_time()
    count = sum(len(data) for _, data in read_rows(storage, records, 0))
    seconds = {"read_seconds": time.perf_counter() - begin, "processor": time.process_time() - processor}
    return {**seconds, "read_bytes": count}


def peak_bytes() -> int:
    """Return the peak memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(case: str, world: int, rounds: int, *, with_files: bool) -> Result:
    """Measure all steps of a case, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        found: Result = {}
        for step in ("generate", "merge", "plan", *(["files"] if with_files else [])):
            command = [
                sys.executable,
                "-m",
                "benchmarks.metadata_scale",
                "--step",
                step,
                "--folder",
                folder,
                "--cases",
                case,
                "--ranks",
                str(world),
            ]
            done = subprocess.run([*command, "--rounds", str(rounds)], check=True, capture_output=True, text=True)
            found[step] = json.loads(done.stdout)
        return found


def row_of(case: str, world: int, found: Result) -> str:
    model, layout, other = layouts_of(case, world)
    generated, merged, planned = found["generate"], found["merge"], found["plan"]
    cells = [
        f"{model.title}, {layout}; loaded as {other}",
        f"{world:,}",
        f"{planned['fragments']:,}",
        f"{merged['index_bytes'] / 1e6:.1f}",
        f"{generated['rows_bytes'] / 1e6:.0f}",
        f"{merged['seconds']:.2f} ({merged['processor']:.2f})",
        f"{merged['to_bytes']:.2f}",
        f"{merged['memory_bytes'] / 1e6:.0f}",
        f"{planned['seconds']:.2f} ({planned['processor']:.2f})",
        f"{planned['from_bytes']:.2f}",
        f"{planned['memory_bytes'] / 1e6:.0f}",
    ]
    if "files" in found:
        cells.append(f"{found['files']['read_seconds']:.1f} ({found['files']['processor']:.1f})")
    return f"| {' | '.join(cells)} |"


COLUMNS = [
    "job", "ranks", "fragments", "index MB", "rows MB", "merge s (processor)", "of it serialise", "merge MB",
    "plan s (processor)", "of it parse", "plan MB", "read rows s (processor)",
]  # fmt: skip

BEGIN, END = "<!-- metadata at scale: by the script -->", "<!-- end of metadata at scale -->"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.metadata_scale", description=(benchmarks.metadata_scale.__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["dense-1", "dense-3", "moe-1"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8960, 100096], help="multiples of 256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", action="store_true", help="also read the rows from one file per rank")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE:RANKS", help="run only these combinations")
    parser.add_argument("--write", type=Path, help="document to write the table into, between its markers")
    parser.add_argument("--step", choices=("generate", "merge", "plan", "files"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        case, world = args.cases[0], args.ranks[0]
        steps = {
            "generate": lambda: generate(args.folder, case, world),
            "merge": lambda: merge(args.folder, args.rounds),
            "plan": lambda: plan(args.folder, case, world, args.rounds),
            "files": lambda: files(args.folder),
        }
        print(json.dumps(steps[args.step]()))
        return
    pairs = [(case, int(world)) for case, world in (pair.split(":") for pair in args.only)]
    columns = COLUMNS if args.files else COLUMNS[:-1]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for case, world in pairs or itertools.product(args.cases, args.ranks):
        found = measured(case, world, args.rounds, with_files=args.files)
        print(case, world, json.dumps(found), file=sys.stderr, flush=True)
        lines.append(row_of(case, world, found))
    shown = [argument for argument in sys.argv[1:] if not argument.startswith("--write")]
    if args.write:
        shown.remove(str(args.write))
    command = " ".join(["python -m benchmarks.metadata_scale", *shown])
    text = f"`{command}`\n\nBest of {args.rounds} rounds; {machine()}, numpy {np.__version__}.\n\n" + "\n".join(lines)
    print(text)
    if args.write:
        old = args.write.read_text()
        first, last = old.index(BEGIN) + len(BEGIN), old.index(END)
        args.write.write_text(f"{old[:first]}\n\n{text}\n\n{old[last:]}")


if __name__ == "__main__":
    main()
