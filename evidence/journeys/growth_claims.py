"""Steps that a grown model saves against one from scratch, and the first steps with second moments of zero.

    python -m evidence.journeys.growth_claims --keep results/growth.jsonl --picture docs/images/growth.png

LEMON (arXiv 2310.07999, section 4) trains grown models with the usual maximum learning rate and a decay that ends earlier. The
data are the bytes of the demonstration, Python's language reference. Their last part is held out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.demo.data import corpus
from tests.support.grown_models import model_of_table, table_of_model, value_of
from unickpt.transform.edit.table import Table
from unickpt.transform.grow.schedule import RateSchedule
from unickpt.transform.grow.step import Grow

LENGTH, BATCH, RATE, WARMUP, EVERY = 64, 8, 3e-3, 25, 20
SMALL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
}
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
STATES = ("exp_avg", "exp_avg_sq")
CONSTANT, AFTER = 10**9, 6  # a decay that does not begin; steps that are compared
SCRATCH, USUAL, SCHEDULED = "from scratch", "grown, schedule of the training from scratch", "grown, `--schedule`"
GOES_ON, MEANS, ZEROS = "the source, trained on", "grown", "grown, new second moments zero"


@dataclass(frozen=True)
class Data:
    """Attributes: tokens for training and held-out rows, int64 ``[rows, length + 1]``."""

    tokens: torch.Tensor
    held_out: torch.Tensor

    @classmethod
    def of_demonstration(cls) -> Data:
        every = corpus().long()
        held = every[-64 * (LENGTH + 1) :].view(64, LENGTH + 1)
        return cls(every[: -len(held.flatten())], held)

    def batch(self, chance: torch.Generator) -> torch.Tensor:
        starts = torch.randint(0, len(self.tokens) - LENGTH - 1, (BATCH,), generator=chance)
        return self.tokens[starts[:, None] + torch.arange(LENGTH + 1)]


def random_model(config: dict[str, Any], seed: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager")


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    scores = model(batch[:, :-1]).logits
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())


def optimizer_of(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999), weight_decay=0.01, foreach=True)


def train(
    model: Any, optimizer: Any, data: Data, steps: int, decay: int, seed: int, *, warmup: int = WARMUP
) -> tuple[list[float], list[tuple[int, float]]]:
    """Train with a cosine decay to a tenth. Return the training losses, and (step, held-out loss)."""
    chance = torch.Generator().manual_seed(seed)
    losses, held = [], []
    for step in range(steps):
        rise = min((step + 1) / warmup, 1.0) if warmup else 1.0
        fall = 0.55 + 0.45 * math.cos(math.pi * min(step / decay, 1.0))
        for group in optimizer.param_groups:
            group["lr"] = RATE * rise * fall
        loss = loss_of(model, data.batch(chance))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                held.append((step + 1, float(loss_of(model, data.held_out))))
    return losses, held


def grown(model: Any, optimizer: Any, *, zeros: bool = False) -> tuple[Any, torch.optim.AdamW]:
    """Return the grown model and its optimizer with the states of the source."""
    named = dict(model.named_parameters())
    states = {key: {name: optimizer.state[each][key] for name, each in named.items()} for key in STATES}
    table, config = Grow(SIZES, config=model.config.to_dict(), zero_second_moments=zeros).result(
        table_of_model(model, **states)
    )
    made = model_of_table(table, config, torch.float32).train()
    return made, _with_states(made, table, next(iter(optimizer.state.values()))["step"])


def _with_states(model: Any, table: Table, step: torch.Tensor) -> torch.optim.AdamW:
    found = optimizer_of(model)
    for name, each in model.named_parameters():
        found.state[each] = {"step": step.clone(), **{key: value_of(table, name, key) for key in STATES}}
    return found


def against_scratch(data: Data, steps: int, seed: int) -> Iterator[dict[str, Any]]:
    """Train a small model, a large one from scratch, and the grown small one under both schedules."""
    begin = time.monotonic()
    small = random_model(SMALL, seed)
    state = optimizer_of(small)
    _, held = train(small, state, data, steps, steps, seed)
    yield {"part": "source", "seed": seed, "held": held, "seconds": time.monotonic() - begin}
    larger, _ = grown(small, state)
    scratch = random_model(larger.config.to_dict(), seed + 100)
    begin = time.monotonic()
    _, held = train(scratch, optimizer_of(scratch), data, steps, steps, seed + 10)
    yield {"part": SCRATCH, "seed": seed, "held": held, "seconds": time.monotonic() - begin}
    own = RateSchedule(steps, 0)
    for part, decay, warmup in ((USUAL, steps, WARMUP), (SCHEDULED, own.decay_steps, own.warmup_steps)):
        made, of_made = grown(small, state)
        begin = time.monotonic()
        _, held = train(made, of_made, data, decay, decay, seed + 10, warmup=warmup)
        yield {"part": part, "seed": seed, "held": held, "seconds": time.monotonic() - begin}


def first_steps(data: Data, steps: int, seed: int) -> Iterator[dict[str, Any]]:
    """Train at a constant rate, and go on with the source, the grown model, and the one whose second moments are zero."""
    small = random_model(SMALL, seed)
    state = optimizer_of(small)
    train(small, state, data, steps, CONSTANT, seed)
    before = {name: each.detach().clone() for name, each in small.named_parameters()}
    for part, zeros in ((MEANS, False), (ZEROS, True)):
        made, of_made = grown(small, state, zeros=zeros)
        losses, _ = train(made, of_made, data, AFTER, CONSTANT, seed + 20, warmup=0)
        yield {"part": part, "seed": seed, "steps": steps, "losses": losses}
    assert all(torch.equal(each, before[name]) for name, each in small.named_parameters())
    losses, _ = train(small, state, data, AFTER, CONSTANT, seed + 20, warmup=0)
    yield {"part": GOES_ON, "seed": seed, "steps": steps, "losses": losses}


def tables(results: list[dict[str, Any]]) -> str:
    """Return the tables of the page."""
    found = {(each["part"], each["seed"]): each for each in results}
    seeds = sorted({seed for _, seed in found})
    lines = [f"| seed | source | {SCRATCH} | {USUAL} | {SCHEDULED} |", "|---|---|---|---|---|"]
    for seed in seeds:
        steps, target = found[SCRATCH, seed]["held"][-1]
        cells = [f"{found['source', seed]['held'][-1][1]:.3f}", f"{target:.3f} at {steps}"]
        for part in (USUAL, SCHEDULED):
            held = found[part, seed]["held"]
            at = next((at for at, loss in held if loss <= target), None)
            reached = f"not reached: {held[-1][1]:.3f} at {held[-1][0]}"
            cells.append(
                reached
                if at is None
                else f"reached at {at}, {1 - at / steps:.0%} saved; then {held[-1][1]:.3f} at {held[-1][0]}"
            )
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    lines += ["", f"| model | {' | '.join(f'step {at + 1}' for at in range(AFTER))} |", f"|---{'|---' * AFTER}|"]
    for part in (GOES_ON, MEANS, ZEROS):
        columns = zip(*(found[part, seed]["losses"] for seed in seeds), strict=True)
        lines.append(f"| {part} | {' | '.join(f'{statistics.mean(column):.3f}' for column in columns)} |")
    return "\n".join(lines)


def draw(results: list[dict[str, Any]], picture: Path) -> None:
    """Draw the held-out losses of all seeds."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.8))
    for part, color in ((SCRATCH, "black"), (USUAL, "tab:orange"), (SCHEDULED, "tab:blue")):
        for number, each in enumerate(each for each in results if each["part"] == part):
            axes.plot(*zip(*each["held"], strict=True), color=color, linewidth=1, label=None if number else part)
    ends = [each["held"][-1][1] for each in results if each["part"] == "source"]
    axes.axhline(statistics.mean(ends), color="gray", linestyle=":", label="the source at its end")
    axes.set_ylim(top=statistics.mean(ends) + 0.5)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss, nats per byte")
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000, help="steps from scratch, and of the source")
    parser.add_argument("--long", type=int, default=1500, help="steps before the first steps are compared")
    parser.add_argument("--keep", type=Path, required=True, help="JSON lines of all runs; an existing file is only rendered")
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.keep.exists():
        data = Data.of_demonstration()
        with args.keep.open("w") as file:
            for seed in range(args.seeds):
                for part in (first_steps(data, args.long, seed), against_scratch(data, args.steps, seed)):
                    for each in part:
                        file.write(json.dumps(each) + "\n")
                        file.flush()
    results = [json.loads(line) for line in args.keep.read_text().splitlines()]
    print(tables(results))
    if args.picture is not None:
        draw(results, args.picture)


if __name__ == "__main__":
    main()
