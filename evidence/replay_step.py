"""What ``unickpt replay-step`` says of sound and of faulty jobs, in many layouts.

python -m evidence.replay_step [KIND ...]

For each layout a job of two ranks trains six steps and saves after each second one. Then steps 5 and 6 are repeated from the
checkpoint of step 4: soundly, with a flipped bit in a gradient of rank 1 in the second repetition, and with noise that has no
seed. Prints the rows of a table of ``docs/evidence/witness.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from unickpt.cli.main import main as unickpt

WORKER = "tests.jobs.replay_step.worker"
KINDS = {
    "torch": "DDP",
    "torch:fsdp": "FSDP2",
    "deepspeed:0": "ZeRO-0",
    "deepspeed:1": "ZeRO-1",
    "deepspeed:2": "ZeRO-2",
    "deepspeed:3": "ZeRO-3",
    "megatron": "Megatron, DP2",
    "megatron:tp": "Megatron, TP2",
    "megatron:pp": "Megatron, PP2",
}
FAULTS = ("none", "flip", "noise")


def command(kind: str, folder: Path, fault: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.forked_ranks", "2", WORKER, kind, str(folder), fault]


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def said(kind: str, folder: Path, fault: str) -> dict[str, Any]:
    """Return what ``replay-step`` says."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        unickpt(["replay-step", str(folder), "--step", "4", "--until", "6", "--json", "--", *command(kind, folder, fault)])
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def row(kind: str, folder: Path) -> str:
    subprocess.run(command(kind, folder, "none"), check=True, capture_output=True)
    before, cells = digests(folder), []
    for fault in FAULTS:
        found = said(kind, folder, fault)
        first = next((each["first"] for each in found["ranks"] if each["rank"] in found["origin"]), None)
        where = "" if first is None else f": rank {', '.join(map(str, found['origin']))}, {first['phase']} of {first['what']}"
        same = f"; runs {', '.join(map(str, found['against']['equal'])) or 'none'} as the checkpoint of step 6"
        cells.append(f"{found['meaning']}{where}{same}")
    return f"| {KINDS[kind]} | {' | '.join(cells)} | {'yes' if digests(folder) == before else 'NO'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], default=[])
    for kind in parser.parse_args().kinds or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            print(row(kind, Path(folder, "out")), flush=True)


if __name__ == "__main__":
    main()
