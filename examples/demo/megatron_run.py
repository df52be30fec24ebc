"""One Megatron training that changes its parallel shape through universal checkpoints, and the same training uninterrupted.

    python examples/demo/megatron_run.py [--steps 15]

The shapes are TP2 x PP2, PP4, DP4 with the distributed optimizer, and a single rank. Exit status 0 means: after every change,
all weights, main parameters and moments were equal bit for bit to those at the end of the previous leg (compared through
Megatron's own resharding format), and the loss was as close to the uninterrupted run as that of an uninterrupted run under
another shape.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPO))

from plot import Curve, difference, draw  # noqa: E402
from rich.console import Console  # noqa: E402

from megatron_unickpt.testing.layouts import Layout  # noqa: E402
from unickpt.testing.launch import torchrun  # noqa: E402

OUT = Path(__file__).resolve().parent / "out" / "megatron"
CHAIN = (("gpt-tp2pp2-dist", "TP2 x PP2"), ("gpt-pp4-dist", "PP4"), ("gpt-dp4-dist", "DP4"), ("gpt-one-dist", "one rank"))
ALLOWED = 10.0  # multiple of the difference of an uninterrupted run under another shape

console = Console(highlight=False, soft_wrap=True, markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=15, help="per leg (default: %(default)s)")
    steps = parser.parse_args().steps
    begin = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    total = steps * len(CHAIN)
    console.print(
        f"One Megatron training in {len(CHAIN)} legs of {steps} steps, each under another shape and from another seed:"
    )
    exact, before, legs = True, None, []
    for at, (layout, label) in enumerate(CHAIN):
        options = ["--save-to", OUT / f"checkpoint{at}"]
        options += ["--untrained", OUT / "start"] if not at else ["--resume-from", OUT / f"checkpoint{at - 1}"]
        seen = run(f"leg{at}", layout, seed=at + 1, until=(at + 1) * steps, options=options)
        if before is not None:
            exact &= tell_hand_over(f"{CHAIN[at - 1][1]} -> {label}", before, seen)
        legs.append(print_leg(label, seen))
        before = seen
    console.print(f"\nThe same {total} steps uninterrupted, under two shapes:")
    reference = print_leg(f"uninterrupted {CHAIN[0][1]}", run("whole", CHAIN[0][0], seed=1, until=total))
    options = ["--resume-from", OUT / "start"]
    other = print_leg("uninterrupted one rank", run("other", CHAIN[-1][0], seed=9, until=total, options=options))
    draw(OUT.parent / "demo-megatron.png", legs, reference, other)
    chain = {step: loss for leg in legs for step, loss in leg.losses.items()}
    largest, noise = (max(difference(found, reference.losses).values()) for found in (chain, other.losses))
    console.print(f"\nlargest distance in loss from {reference.label}:")
    console.print(f"  {largest:.1e}  the chain, handed over {len(CHAIN) - 1} times")
    console.print(f"  {noise:.1e}  {other.label}, which sums in another order")
    console.print(f"{time.monotonic() - begin:.0f} s in all. Picture and checkpoints: {OUT.parent}")
    return 0 if exact and largest <= ALLOWED * noise else 1


def run(name: str, layout: str, *, seed: int, until: int, options: list[Any] | None = None) -> dict[str, Any]:
    """Run one process group, and return its results."""
    out = OUT / name
    out.mkdir(parents=True)
    arguments = ["--layout", layout, "--seed", str(seed), "--until", str(until), "--out", str(out), *map(str, options or [])]
    begin = time.monotonic()
    path = str(Path(__file__).resolve().parent)
    torchrun(Layout.parse(layout).world, "megatron_train", *arguments, env={"PYTHONPATH": f"{path}:{REPO}"}, timeout_s=600)
    seen: dict[str, Any] = json.loads((out / "seen.json").read_text())
    return {**seen, "losses": {int(step): loss for step, loss in seen["losses"].items()}, "seconds": time.monotonic() - begin}


def tell_hand_over(name: str, before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether a leg loaded exactly the state at the end of the previous leg."""
    left, right, accident = before["at_end"], after["after_load"], after["before_load"]
    names = sorted(left.keys() | right.keys())
    wrong = [name for name in names if left.get(name) != right.get(name)]
    same = sum(left.get(name) == digest for name, digest in accident.items() if name.startswith("weight/"))
    console.print(
        f"hand-over {name}: {len(names) - len(wrong)} of {len(names)} tensors identical bit for bit (before loading, {same} of "
        f"{sum(name.startswith('weight/') for name in accident)} weights were)",
        style="red" if wrong else "green",
    )
    for state in wrong[:10]:
        console.print(f"  differs: {state}", style="red")
    return not wrong


def print_leg(label: str, seen: dict[str, Any]) -> Curve:
    """Print a line about a leg."""
    losses = seen["losses"]
    first, last = min(losses), max(losses)
    span = f"loss {losses[first]:.4f} -> {losses[last]:.4f}"
    console.print(f"  {label:<24} steps {first:>3} to {last:>3}   {span}   {seen['seconds']:.0f} s")
    return Curve(label, losses)


if __name__ == "__main__":
    sys.exit(main())
