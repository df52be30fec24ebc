"""Flips of a bit in what an optimizer has just computed on one rank, and what the check ``update`` says of each."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from evidence.flips import Trained
from unickpt.training.witness.vote import Kind, Verdict


class Wrong:
    """Flips one bit of all values that optimizers have computed, before the witness sees them."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.active: tuple[str, float] | None = None
        for each in optimizers:
            each.register_step_post_hook(self._stepped)
            hooks: Any = each._optimizer_step_post_hooks
            hooks.move_to_end(next(reversed(hooks)), last=False)

    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self.active is None:
            return
        place, bit = self.active
        for parameter in [each for group in optimizer.param_groups for each in group["params"]]:
            held = parameter if place == "weight" else optimizer.state.get(parameter, {}).get(place)
            held = held.to_local() if hasattr(held, "to_local") else held
            if held is not None and held.numel():
                bits = held.data.view({4: torch.int32, 2: torch.int16}[held.element_size()])
                bits.bitwise_xor_(1 << int(bit * 8 * held.element_size()))


def steps(job: Trained, optimizers: Sequence[torch.optim.Optimizer], count: int, seed: int) -> Counter[str]:
    """Return how many steps were wrong, and how many of them ``update`` has named.

    The bit flips in all values, because a check compares those of one tensor.
    """
    chance, found, wrong = random.Random(seed), Counter[str](), Wrong(optimizers)
    job.step()
    job.step()
    kept = {key: tensor.detach().clone() for key, tensor in job.places().items()}
    for _ in range(count):
        place, on = chance.choice(("weight", "exp_avg", "exp_avg_sq")), chance.randrange(dist.get_world_size())
        bit, before = 0.9 * chance.random(), len(job.watching.verdicts)
        job.step()
        found["verdicts about sound steps"] += len(job.watching.verdicts) - before
        before = len(job.watching.verdicts)
        wrong.active = (place, bit) if on == dist.get_rank() else None
        job.step()
        wrong.active = None
        verdicts = job.watching.verdicts[before:]
        right = [isinstance(each, Verdict) and (each.kind, each.ranks) == (Kind.SDC_UPDATE, (on,)) for each in verdicts]
        found[place] += 1
        found[f"{place} named"] += right == [True]
        found[f"{place} wrong"] += right not in ([True], [])
        for key, tensor in job.places().items():
            tensor.data.copy_(kept[key])
    return found
