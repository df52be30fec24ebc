"""Cost of the page cache for a new file: writes through it and past it, in seconds and processor seconds.

python -m benchmarks.direct_io [--folder DIR] [--mib 300] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.measure import machine, publish
from unickpt.checkpoint.save.staging import StagingBuffer
from unickpt.checkpoint.storage.posix import PosixStorage


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", default=None, help="on the file system to try (default: the temporary one)")
    parser.add_argument("--mib", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data = memoryview(StagingBuffer(args.mib << 20).tensor.numpy())[: args.mib << 20]
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        storage = PosixStorage(folder)
        for number in range(args.rounds):
            for direct in (False, True):
                os.sync()
                begin, processor = time.perf_counter(), time.process_time()
                with storage.create(f"{number}{direct}", direct=direct) as sink:
                    sink.write([data])
                found[direct].append((time.perf_counter() - begin, time.process_time() - processor))
    lines = [f"`python -m benchmarks.direct_io --mib={args.mib} --rounds={args.rounds}`", ""]
    lines += [f"{args.mib} MiB are written to a new file with fsync, {args.rounds} rounds; {machine()}.", ""]
    lines += ["| | median s | GB/s | processor s |", "|---|---|---|---|"]
    for direct, pairs in found.items():
        seconds, processor = (statistics.median(values) for values in zip(*pairs, strict=True))
        rate = len(data) / seconds / 1e9
        lines.append(
            f"| {'direct I/O' if direct else 'through the page cache'} | {seconds:.3f} | {rate:.2f} | {processor:.3f} |"
        )
    text = "\n".join(lines) + "\n"
    publish(text, args.out)


if __name__ == "__main__":
    main()
