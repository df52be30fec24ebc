"""One training that changes its layout through universal checkpoints, and the same training uninterrupted.

    python examples/demo/run.py [--chain 2x4,3x2,1x3,0x1] [--steps 20]

Each leg of the chain is a new process group, with another ZeRO stage, another number of ranks and a model of another seed. Exit
status 0 means: after every change, all states were equal bit for bit to those at the end of the previous leg, and the loss was
as close to the uninterrupted run as that of another uninterrupted run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launch import Job, JobFailedError, Layout, Outcome, base_config, run_job
from plot import Curve, difference, draw
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

OUT = Path(__file__).resolve().parent / "out"
CHECKPOINTS = OUT / "checkpoints"
CHAIN = "2x4,3x2,1x3,0x1"
FIRST_SEED = 1
ORDER_OF_MAGNITUDE = 10.0
ROUNDING = 1e-6
ROWS = 9
MOST_NAMES_SHOWN = 10

console = Console(highlight=False, soft_wrap=True, markup=False)


def main() -> int:
    args = _arguments()
    begin = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    try:
        as_promised = demonstrate(args.chain, args.steps)
    except JobFailedError as err:
        console.print(str(err), style="red")
        return 2
    console.print(f"{time.monotonic() - begin:.0f} s in all. Picture, checkpoints and logs: {OUT}")
    return 0 if as_promised else 1


def demonstrate(chain: Sequence[Layout], steps: int) -> bool:
    """Run all legs, print the results, and draw the picture.

    Args:
        chain: layouts of the legs.
        steps: steps of each leg.

    Returns:
        Whether all states were equal and the loss was close.

    Raises:
        JobFailedError: a process group failed.
    """
    total = steps * len(chain)
    console.print(f"One training in {len(chain)} legs of {steps} steps, each under another layout and from another seed:")
    legs, exact = run_chain(chain, steps)
    console.print(f"\nThe same {total} steps uninterrupted, under two layouts:")
    reference = run_uninterrupted(chain[0], total)
    other = run_uninterrupted(Layout(stage=0, ranks=1 if chain[0].ranks > 1 else 2), total)
    draw(OUT / "demo.png", legs, reference, other)
    return tell_losses(legs, reference, other) and exact


def run_chain(chain: Sequence[Layout], steps: int) -> tuple[list[Curve], bool]:
    """Run the legs. Returns their losses, and whether every change was exact."""
    curves: list[Curve] = []
    before: Outcome | None = None
    exact = True
    for at, layout in enumerate(chain):
        job = Job(
            name=f"leg{at}",
            layout=layout,
            seed=FIRST_SEED + at,
            until=(at + 1) * steps,
            resume_from=CHECKPOINTS if at else None,
            save_to=CHECKPOINTS,
        )
        after = run(job, steps)
        require_universal(job)
        if before is not None:
            exact &= tell_hand_over(f"{chain[at - 1]} -> {layout}", before, after)
        tell_training(layout, after)
        curves.append(Curve(str(layout), after.losses))
        before = after
    return curves, exact


def run_uninterrupted(layout: Layout, steps: int) -> Curve:
    """Run all steps in one process group, from the seed of the first leg."""
    job = Job(name=f"uninterrupted-{layout.stage}x{layout.ranks}", layout=layout, seed=FIRST_SEED, until=steps)
    outcome = run(job, steps)
    tell_training(layout, outcome)
    return Curve(f"uninterrupted {layout}", outcome.losses)


def run(job: Job, steps: int) -> Outcome:
    """Run a job, with a progress bar in a terminal."""
    bar = Progress(
        TextColumn(f"  {job.layout}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=steps)
        return run_job(job, OUT, lambda done: bar.update(task, completed=done))


def require_universal(job: Job) -> None:
    """Raise JobFailedError if DeepSpeed wrote its own checkpoint, because the JSON key had no effect."""
    tag = (CHECKPOINTS / "latest").read_text().strip()
    if not (CHECKPOINTS / tag / "manifest.json").is_file():
        raise JobFailedError(f"{job.name} wrote no universal checkpoint: is unickpt installed in {sys.prefix}?")


def tell_hand_over(name: str, before: Outcome, after: Outcome) -> bool:
    """Return whether a leg loaded exactly the state at the end of the previous leg."""
    left, right = before.at_end, after.after_load
    names = sorted(left.keys() | right.keys())
    wrong = [name for name in names if left.get(name) != right.get(name)]
    accidental = sum(left.get(name) == digest for name, digest in after.before_load.items())
    console.print(
        f"hand-over {name}: {len(names) - len(wrong)} of {len(names)} states identical bit for bit"
        f" (before loading, {accidental} of {len(after.before_load)} weights and buffers were)",
        style="red" if wrong else "green",
    )
    for state in wrong[:MOST_NAMES_SHOWN]:
        console.print(f"  differs: {state}: {left.get(state)} became {right.get(state)}", style="red")
    return not wrong


def tell_training(layout: Layout, outcome: Outcome) -> None:
    """Print a line about a leg."""
    first, last = min(outcome.losses), max(outcome.losses)
    losses = f"loss {outcome.losses[first]:.4f} -> {outcome.losses[last]:.4f}"
    console.print(f"  {layout!s:<10}  steps {first:>3} to {last:>3}   {losses}   {outcome.seconds:.0f} s")


def tell_losses(legs: Sequence[Curve], reference: Curve, other: Curve) -> bool:
    """Print the losses. Returns whether the chain is about as close to ``reference`` as ``other`` is."""
    chain = {step: loss for leg in legs for step, loss in leg.losses.items()}
    layouts = {step: leg.label for leg in legs for step in leg.losses}
    apart = difference(chain, reference.losses)
    noise = difference(other.losses, reference.losses)
    console.print(f"\n  step  {'the chain':<24}  {reference.label:<24}  {other.label}")
    last = max(chain)
    for step in sorted({round(row * last / (ROWS - 1)) for row in range(ROWS)}):
        ours = f"{chain[step]:.6f}  {layouts[step]}"
        console.print(f"  {step:>4}  {ours:<24}  {reference.losses[step]:<24.6f}  {other.losses[step]:.6f}")
    largest, allowed = max(apart.values()), max(noise.values())
    console.print(f"\nlargest distance in loss from {reference.label}:")
    console.print(f"  {largest:.1e}  the chain, handed over {len(legs) - 1} times")
    console.print(f"  {allowed:.1e}  {other.label}, which sums in another order")
    close = largest <= max(ORDER_OF_MAGNITUDE * allowed, ROUNDING)
    if not close:
        console.print("the chain is further away than a change of layout explains", style="red")
    return close


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--chain", type=_chain, default=CHAIN, help="legs STAGExRANKS, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--steps", type=_positive, default=20, help="per leg (default: %(default)s)")
    return parser.parse_args()


def _chain(text: str) -> list[Layout]:
    chain = [Layout.parse(leg) for leg in text.split(",")]
    size = base_config()["train_batch_size"]
    for layout in chain:
        if layout.stage not in range(4) or layout.ranks < 1 or size % layout.ranks:
            raise argparse.ArgumentTypeError(f"{layout}: stages are 0 to 3, and the ranks must divide the batch of {size}")
    return chain


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
