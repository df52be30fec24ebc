"""Steps that a grown model saves against one from scratch, and second moments of zero.

``python -m tests.integration.journeys.growth_claims``. LEMON (arXiv 2310.07999, section 4) trains grown models with the usual
maximum learning rate and a decay that ends earlier. The data are the bytes of the pages in ``docs``. Their last part is held
out.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.grown_models import model_of_table, table_of_model, value_of
from tests.support.repository import REPO
from unickpt.edit.table import Table
from unickpt.grow.step import Grow

LENGTH, BATCH, RATE, WARMUP, EVERY = 64, 8, 3e-3, 25, 20
SMALL = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip
SIZES = {
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
}  # fmt: skip
STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Data:
    """Attributes: tokens for training and held-out rows, int64 ``[rows, length + 1]``."""

    tokens: torch.Tensor
    held_out: torch.Tensor

    @classmethod
    def of_docs(cls) -> Data:
        text = b"".join(path.read_bytes() for path in sorted((REPO / "docs").rglob("*.md")))
        every = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
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
    model: Any, optimizer: Any, data: Data, steps: int, decay: int, seed: int, *, warmup: int = WARMUP, target: float = 0.0
) -> tuple[list[float], list[tuple[int, float]]]:
    """Train with a cosine decay to a tenth. Return the training losses, and (step, held-out loss), up to the target."""
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
            if held[-1][1] <= target:
                break
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500, help="steps from scratch, and of the source")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data, steps = Data.of_docs(), args.steps
    print("| seed | target | from scratch | grown | grown, decay in half the steps |\n|---|---|---|---|---|", flush=True)
    jumps = []
    for seed in range(args.seeds):
        small = random_model(SMALL, seed)
        state = optimizer_of(small)
        train(small, state, data, steps, steps, seed)
        larger, _ = grown(small, state)
        scratch = random_model(larger.config.to_dict(), seed + 100)
        _, held = train(scratch, optimizer_of(scratch), data, steps, steps, seed + 10)
        target, cells = held[-1][1], [f"{held[-1][0]}"]
        for decay in (steps, steps // 2):
            made, of_made = grown(small, state)
            _, found = train(made, of_made, data, steps, decay, seed + 10, target=target)
            at, loss = found[-1]
            saved = f"{at} ({1 - at / steps:.0%} saved)" if loss <= target else f"not reached: {loss:.3f}"
            cells.append(saved)
        print(f"| {seed} | {target:.3f} | {' | '.join(cells)} |", flush=True)
        for zeros in (False, True):
            made, of_made = grown(small, state, zeros=zeros)
            losses, _ = train(made, of_made, data, 6, 10**9, seed + 20, warmup=0)
            jumps.append(f"| {seed} | {'zeros' if zeros else 'means'} | {', '.join(f'{loss:.3f}' for loss in losses)} |")
    print("\n| seed | new second moments | losses of the first steps |\n|---|---|---|")
    print("\n".join(jumps))


if __name__ == "__main__":
    main()
