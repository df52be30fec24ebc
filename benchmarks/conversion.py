"""Measure the conversion of a DeepSpeed checkpoint with unickpt, with DeepSpeed's ds_to_universal, and a plain copy.

    python -m benchmarks.conversion [--ranks 2] [--millions 350] [--stages 1 3] [--rounds 3]
        [--tools copy unickpt ds_to_universal] [--checkpoints FOLDER] [--out docs/evidence/conversion-speed.md]

``HEAD`` describes the method and the columns. ``--out`` replaces the sections of the stages that ran, and keeps the others.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import psutil

from benchmarks.measure import machine, ratio, size_of, small_buckets
from unickpt.testing.launch import environment, torchrun

REPO = Path(__file__).resolve().parent.parent

HEAD = """\
# Speed of converting DeepSpeed checkpoints

How long does the conversion of a DeepSpeed checkpoint take, in relation to a copy and to `ds_to_universal`?

1.5 to 1.9 times a copy, and a seventh of `ds_to_universal` with a fourteenth of its memory.

A DeepSpeed job (bf16 with fp32 masters, Adam) saves a checkpoint. In every round, each tool converts the same files, one after
the other.

| column | meaning |
|---|---|
| seconds | the whole command including imports of compiled modules, until everything is on the disk. \
`sync` is included for tools that do not wait for the disk. |
| memory | largest sum of the proportional set sizes of all processes of the command, sampled every 20 ms \
in a round of its own |
| relative to ... | ratio within a round |

The goal is 1.2 times a copy. On a fast disk 350M take 1.7 times a copy: 1.6 s of that are the imports, for a model of any
size. A thread writes 16 MiB of one of two buffers that stay in the cache of the processor, while the other one is filled
(`unickpt/transform/convert/read_ahead.py`).
"""

COPY = "copy and sync"
OURS, OURS_ONE = "unickpt convert", "unickpt convert, 1 worker"
THEIRS, THEIRS_ONE = "ds_to_universal (its defaults)", "ds_to_universal, 1 worker"


@dataclass(frozen=True)
class Measured:
    """Measurements of one run: seconds, peak memory (0 if not sampled) and written bytes, and number of written files."""

    seconds: float
    peak_bytes: int
    size_bytes: int
    files: int


def make(folder: Path, stage: int, millions: int) -> None:
    """Under torchrun: train an engine for one step, and save it with DeepSpeed."""
    import deepspeed
    import torch

    from unickpt.testing.launch import leave

    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(1)
    width = 1024
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": small_buckets(stage),
    }
    count = max(1, millions * 1_000_000 // width**2)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(count)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.rand(1, width, dtype=torch.bfloat16)).mean())
    engine.step()
    engine.save_checkpoint(str(folder), tag="t")
    deepspeed.comm.barrier()
    leave()


class Memory(threading.Thread):
    """Peak proportional memory of a process and its children."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak_bytes, self._process, self._over = 0, psutil.Process(pid), threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.02):
            total = 0
            try:
                for process in [self._process, *self._process.children(recursive=True)]:
                    total += _pss(process.pid)
            except psutil.Error:
                continue
            self.peak_bytes = max(self.peak_bytes, total)

    def close(self) -> int:
        self._over.set()
        self.join()
        return self.peak_bytes


def _pss(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in text.splitlines() if line.endswith("kB")}
    return found.get("Pss", 0)


def run(command: list[str], target: Path, bytecode: Path, *, samples: bool) -> Measured:
    """Run a command that writes a folder, and measure it.

    Args:
        command, target: the command and the folder.
        bytecode: folder of compiled modules, as an installation has.
        samples: sample its memory, which makes it slower.
    """
    env = {k: v for k, v in environment().items() if k != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPYCACHEPREFIX": str(bytecode)}
    os.sync()
    begin = time.perf_counter()
    process = subprocess.Popen(command, cwd=REPO, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    memory = Memory(process.pid)
    if samples:
        memory.start()
    error = process.communicate()[1]
    os.sync()
    seconds = time.perf_counter() - begin
    peak = memory.close() if samples else 0
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{error.decode()[-2000:]}")
    files = sum(path.is_file() for path in target.rglob("*"))
    return Measured(seconds, peak, size_of(target), files)


def commands(source: Path, target: Path, tools: Sequence[str]) -> dict[str, list[str]]:
    """Return the commands of the chosen tools. The copy is always among them."""
    universal = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(source),
                 "--output_folder", str(target), "--inject_missing_state"]  # fmt: skip
    ours = [sys.executable, "-m", "unickpt.cli.main", "convert", str(source), str(target)]
    found = {COPY: ["cp", "-r", str(source), str(target)]}
    if "unickpt" in tools:
        found |= {OURS: ours, OURS_ONE: [*ours, "--workers", "1"]}
    if "ds_to_universal" in tools:
        found |= {THEIRS: universal, THEIRS_ONE: [*universal, "--num_extract_workers", "1", "--num_merge_workers", "1"]}
    return found


def table(found: dict[str, list[Measured]]) -> str:
    """Return a table of medians, with ratios to the copy and to ds_to_universal within a round."""
    lines = [
        "| | seconds | relative to copy and sync | relative to ds_to_universal | memory | memory relative to ds_to_universal | "
        "files | written |",
        "|---" * 8 + "|",
    ]
    for name, runs in found.items():

        def against(other: str, what: Callable[[Measured], float], runs: list[Measured] = runs) -> str:
            if other not in found:
                return "-"
            return ratio([what(each) for each in runs], [what(each) for each in found[other]])

        low, high = min(each.seconds for each in runs), max(each.seconds for each in runs)
        cells = [
            f"{median(each.seconds for each in runs):.1f} ({low:.1f} to {high:.1f})",
            against(COPY, lambda each: each.seconds),
            against(THEIRS, lambda each: each.seconds),
            f"{median(each.peak_bytes for each in runs) / 1e6:,.0f} MB",
            against(THEIRS, lambda each: each.peak_bytes) if name != COPY else "-",
            f"{runs[0].files:,}",
            f"{runs[0].size_bytes / 1e9:.2f} GB",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--millions", type=int, default=350, help="parameters")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--tools",
        nargs="+",
        default=["copy", "unickpt", "ds_to_universal"],
        metavar="TOOL",
        choices=["copy", "unickpt", "ds_to_universal"],
    )
    parser.add_argument("--checkpoints", type=Path, help="folder that keeps the checkpoints to convert for another run")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--make", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make(Path(args.make[0]), int(args.make[1]), int(args.make[2]))
        return
    sections = _sections(args.out.read_text()) if args.out and args.out.is_file() else {}
    for stage in args.stages:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            native = args.checkpoints or folder
            native = native / f"zero{stage}-{args.millions}M-{args.ranks}"
            if not (native / "latest").exists():  # written last
                torchrun(args.ranks, "benchmarks.conversion", "--make", str(native), str(stage), str(args.millions))
            source = native / "t"
            found: dict[str, list[Measured]] = {}
            peaks: dict[str, int] = {}
            for turn in range(args.rounds + 1):  # the first round samples the memory, and its time is not counted
                for what, command in commands(source, folder / "out", args.tools).items():
                    shutil.rmtree(folder / "out", ignore_errors=True)
                    measured = run(command, folder / "out", folder / "bytecode", samples=not turn)
                    print(stage, turn, what, measured, flush=True)
                    peaks.setdefault(what, measured.peak_bytes)
                    if turn or not args.rounds:
                        found.setdefault(what, []).append(replace(measured, peak_bytes=peaks[what]))
            title = f"ZeRO-{stage}, {args.ranks} ranks, {args.millions}M parameters, {size_of(source) / 1e9:.2f} GB"
            options = f"--ranks {args.ranks} --millions {args.millions} --stages {stage} --rounds {args.rounds}"
            sections = {key: body for key, body in sections.items() if not key.startswith(title.rpartition(",")[0])}
            sections[title] = f"`python -m benchmarks.conversion {options}`; {machine()}.\n\n{table(found)}\n"
    text = HEAD + "".join(f"\n## {title}\n\n{body}" for title, body in sorted(sections.items()))
    print(text)
    if args.out:
        args.out.write_text(text)


def _sections(text: str) -> dict[str, str]:
    """Return the sections of the page: title -> body."""
    pieces = re.split(r"^## (.*)\n\n", text, flags=re.MULTILINE)[1:]
    return {title: body.rstrip() + "\n" for title, body in zip(pieces[::2], pieces[1::2], strict=True)}


if __name__ == "__main__":
    main()
