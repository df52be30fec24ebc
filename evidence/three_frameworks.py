"""One training that travels through DeepSpeed, PyTorch and Megatron, and the same training uninterrupted.

    python -m evidence.three_frameworks [--steps 6]        # the third part of scripts/demo.sh

A small Llama in fp32 begins under ZeRO-3, and goes on under FSDP2, Megatron's TP2 x PP2, HSDP 2 x 2, and ZeRO-1. Exit status 0
means: at every hand-over all weights, masters and moments were equal bit for bit, and the loss was as close to the
uninterrupted run as that of an uninterrupted run on another number of ranks. The picture is ``demo-torch.png`` in
``examples/demo/out``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console

from tests.jobs.journeys.journeys import Station, differences, of_transformers, steps_of, uninterrupted
from tests.support.forked_jobs import fork_ranks

REPO = Path(__file__).resolve().parent.parent
OUT = REPO / "examples" / "demo" / "out"
FAMILY, PRECISION = "llama", "fp32"
CHAIN = (
    (Station("deepspeed", "zero3", 2), "ZeRO-3 x 2"),
    (Station("torch", "1x2", 2), "FSDP2 x 2"),
    (Station("megatron", "gpt-tp2pp2-fp32", 4), "TP2 x PP2"),
    (Station("torch", "2x2", 4), "HSDP 2 x 2"),
    (Station("deepspeed", "zero1", 2), "ZeRO-1 x 2"),
)
ALLOWED = 10.0  # multiple of the difference of an uninterrupted run on another number of ranks


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="per leg (default: %(default)s)")
    steps = parser.parse_args().steps
    sys.path.insert(0, str(REPO / "examples" / "demo"))
    from plot import Curve, draw  # as the other two parts

    console, begin = Console(highlight=False, soft_wrap=True, markup=False), time.monotonic()
    folder = OUT / "three-frameworks"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start, _ = of_transformers(folder, FAMILY)
    console.print(
        f"One training in {len(CHAIN)} legs of {steps} steps, each in another framework or layout and from another seed:"
    )
    source, exact, legs, losses = start, True, [], {}
    for at, (station, label) in enumerate(CHAIN):
        out = folder / str(at)
        out.mkdir()
        began = time.monotonic()
        arguments = (station.kind, station.layout, FAMILY, PRECISION, str(source), str(out), str(steps), str(at * steps))
        fork_ranks(station.ranks, "tests.jobs.journeys.station", *arguments)
        found = json.loads((out / "station.json").read_text())
        own = {at * steps + number: loss for number, loss in enumerate(found["losses"])}
        legs.append(Curve(label, own))
        losses |= own
        first, last = found["losses"][0], found["losses"][-1]
        console.print(f"  {label:<12} loss {first:.4f} -> {last:.4f}   {time.monotonic() - began:.0f} s")
        if at:
            name = f"{CHAIN[at - 1][1]} -> {label}"
            compared, wrong = differences(source, out / "loaded", FAMILY)
            exact &= not wrong and steps_of(out / "loaded") == {at * steps}
            console.print(
                f"  hand-over {name}: {compared - len(wrong)} of {compared} tensors identical bit for bit",
                style="red" if wrong else "green",
            )
        source = out / "trained"
    total = steps * len(CHAIN)
    console.print(f"The same {total} steps uninterrupted in DeepSpeed, on two ranks and on one:")
    whole = uninterrupted(folder / "whole", FAMILY, PRECISION, total, start)
    alone = uninterrupted(folder / "alone", FAMILY, PRECISION, total, start, ranks=1)
    draw(
        OUT / "demo-torch.png",
        legs,
        Curve("uninterrupted", dict(enumerate(whole))),
        Curve("on one rank", dict(enumerate(alone))),
    )
    largest = max(abs(losses[step] - loss) for step, loss in enumerate(whole))
    noise = max(abs(a - b) for a, b in zip(alone, whole, strict=True))
    console.print(f"largest distance in loss from the uninterrupted run: {largest:.1e} the chain, {noise:.1e} on one rank")
    console.print(f"{time.monotonic() - begin:.0f} s in all. Picture: {OUT / 'demo-torch.png'}")
    return 0 if exact and largest <= ALLOWED * noise else 1


if __name__ == "__main__":
    sys.exit(main())
