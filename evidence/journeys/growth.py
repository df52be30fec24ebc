"""Training continues from a grown checkpoint, in ZeRO-3 and Megatron TP2 PP2: ``python -m evidence.journeys.growth``.

A Llama is trained, grown in width, heads, key and value heads, layers and blocks, and trained on. The losses stand beside those
of the source that trains on, and of a checkpoint whose new second moments are zero.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.jobs.journeys.families import FAMILIES, GROWN_SIZES, huggingface_model
from tests.jobs.journeys.journeys import apart
from unickpt.cli.main import main as unickpt
from tests.support.forked_jobs import fork_ranks

BEFORE, AFTER = 40, 6  # steps
PLACE = "0,2,3,5"
SOURCE, GROWN = "llama", "llama-grown"
JOBS = (
    ("the source, trained on", "deepspeed", "zero3", SOURCE, 2, "source"),
    ("grown", "deepspeed", "zero3", GROWN, 2, "grown"),
    ("grown", "megatron", "gpt-tp2pp2-fp32", GROWN, 4, "grown"),
    ("grown, new second moments zero", "deepspeed", "zero3", GROWN, 2, "zeros"),
)


def station(
    folder: Path, kind: str, layout: str, family: str, ranks: int, source: str, steps: int, first: int
) -> dict[str, Any]:
    """Run a job and return its result."""
    folder.mkdir(parents=True)
    arguments = (kind, layout, family, "fp32", source, str(folder), str(steps), str(first))
    fork_ranks(ranks, "tests.jobs.journeys.station", *arguments)
    found: dict[str, Any] = json.loads((folder / "station.json").read_text())
    return found


def grown(folder: Path, source: Path, name: str, *more: str) -> Path:
    """Grow the checkpoint of a job."""
    huggingface_model(SOURCE, 0).config.save_pretrained(folder / "config")
    sizes = [f"{key}={value}" for key, value in GROWN_SIZES.items()]
    command = ["grow", str(source), str(folder / name), "--config", str(folder / "config"), "--place", PLACE, "--set", *sizes]
    assert unickpt([*command, *more]) == 0
    return folder / name


def rows(folder: Path) -> list[str]:
    """Run all jobs and return the rows of the table."""
    station(folder / "before", "deepspeed", "zero1", SOURCE, 2, "-", BEFORE, 0)
    source = folder / "before" / "trained"
    begin = {
        "source": source,
        "grown": grown(folder, source, "grown"),
        "zeros": grown(folder, source, "zeros", "--zero-second-moments"),
    }
    found = [
        (name, kind, layout, station(folder / str(at), kind, layout, family, ranks, str(begin[which]), AFTER, BEFORE))
        for at, (name, kind, layout, family, ranks, which) in enumerate(JOBS)
    ]
    reference = found[0][3]
    return [
        f"| {name} | {kind} {layout.removesuffix('-fp32')} | {job['counters']['steps']} | "
        f"{apart(reference['logits'], job['logits']):.1e} | {', '.join(f'{loss:.4f}' for loss in job['losses'])} |"
        for name, kind, layout, job in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args()
    assert SOURCE in FAMILIES
    with tempfile.TemporaryDirectory() as folder:
        print("| model | job | steps before | logits, relative to the source | losses |\n|---|---|---|---|---|")
        for row in rows(Path(folder)):
            print(row)


if __name__ == "__main__":
    main()
