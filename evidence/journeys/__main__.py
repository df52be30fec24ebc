"""Trainings that go from framework to framework: every family, all shapes. Writes a table.

    python -m evidence.journeys [--families llama ...] [--out docs/evidence/conversion-paths.md]

Rows of other families are kept.

A model of transformers with random weights is converted. Each station begins with random weights of another seed, loads what
the one before has saved, saves that again at once, trains three steps and saves; in the end a model of transformers is made.
Compared are all weights, masters and moments at every border, bit for bit; the logits of the two frameworks' models for the
same tokens; and the losses with those of one DeepSpeed job that makes all steps.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib.metadata import version
from pathlib import Path


import torch

from benchmarks.measure import machine
from tests.jobs.journeys.families import FAMILIES
from tests.jobs.journeys.journeys import Station, apart, differences, exported, of_transformers, travelled, uninterrupted

ZERO1, ZERO3 = Station("deepspeed", "zero1", 2), Station("deepspeed", "zero3", 2)
DENSE = ("gpt-tp2-fp32", "gpt-pp2-fp32", "gpt-tp2pp2-fp32")
EXPERTS = ("moe-ep2dp2-fp32", "moe-tp2-fp32", "moe-pp2-fp32")
MARK = "<!-- made by evidence/journeys/__main__.py -->"


def journeys(family: str) -> list[tuple[str, list[Station]]]:
    """Precision and stations."""
    shapes = EXPERTS if FAMILIES[family].moe else DENSE
    made = []
    for at, shape in enumerate(shapes):
        middle = Station("megatron", shape, 4 if "tp2pp2" in shape else 2)
        made.append(("fp32", [(ZERO3, ZERO1)[at % 2], middle, (ZERO1, ZERO3)[at % 2]]))
    last = "moe-ep2dp2-dist" if FAMILIES[family].moe else "gpt-tp2pp2-dist"
    made.append(("bf16", [ZERO3, Station("megatron", last, 2 if FAMILIES[family].moe else 4), ZERO1]))
    return made


def row(family: str, precision: str, stations: list[Station]) -> str:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        folder = Path(place)
        begin, first = of_transformers(folder, family)
        found = travelled(folder, family, precision, stations, begin)
        compared = unequal = 0
        borders = [
            (begin, first),
            *((folder / str(at) / "trained", result["logits_after"]) for at, result in enumerate(found)),
        ]
        off_logits = 0.0
        for at, (saved, logits) in enumerate(borders[:-1]):
            count, wrong = differences(saved, folder / str(at) / "loaded", family)
            compared, unequal = compared + count, unequal + len(wrong)
            if precision == "fp32" or at:  # a job in bf16 begins with rounded weights
                off_logits = max(off_logits, apart(logits, found[at]["logits"]))
        low = torch.bfloat16 if precision == "bf16" else torch.float32
        last = exported(borders[-1][0], folder / "end", folder / "model", dtype=low)
        off_logits = max(off_logits, apart(borders[-1][1], last))
        losses = [loss for station in found for loss in station["losses"]]
        alone = uninterrupted(folder / "alone", family, precision, len(losses), begin)
    off = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
    names = [f"{station.kind} {station.layout.rpartition('-')[0] or station.layout}" for station in stations]
    way = " → ".join(["HF", *names, "HF"])
    return f"| {family} | {precision} | {way} | {compared - unequal} of {compared} | {off_logits:.1e} | {off:.1e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--out", type=Path, help="Markdown file whose part below the mark is replaced")
    args = parser.parse_args()
    packages = ", ".join(f"{name} {version(name)}" for name in ("deepspeed", "megatron-core", "transformers"))
    before, _, table = args.out.read_text().partition(MARK) if args.out and args.out.is_file() else ("", "", "")
    rows = {family: [line for line in table.splitlines() if line.startswith(f"| {family} |")] for family in FAMILIES}
    for family in args.families:
        rows[family] = []
        for precision, stations in journeys(family):
            rows[family].append(row(family, precision, stations))
            print(rows[family][-1], flush=True)
        if args.out:
            lines = [
                f"`python -m evidence.journeys --out {args.out}`: {machine()}, {packages}",
                "",
                "| family | precision | path | equal | logits | losses |",
                "|---|---|---|---|---|---|",
                *(line for each in rows.values() for line in each),
            ]
            args.out.write_text(f"{before.rstrip()}\n\n{MARK}\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
