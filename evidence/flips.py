"""Flips of one bit in the memory of one rank, between two steps, and what a witness says of each."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist

from unickpt.training.witness.vote import Kind, Verdict
from unickpt.training.witness.watching import Watching

Places = Mapping[tuple[str, str], torch.Tensor]  # this rank's memory, by place (such as master) and parameter
_INTS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class Trained(Protocol):
    """A training with a witness that checks every step."""

    @property
    def watching(self) -> Watching: ...
    def step(self) -> None: ...
    def places(self) -> Places: ...


def flip(tensor: torch.Tensor, where: float, bit: float) -> None:
    """Change a bit as a fault of the memory does: no counter of writes notices. ``where`` and ``bit`` are from 0 to 1."""
    bits = tensor.data.view(_INTS[tensor.element_size()]).view(-1)
    number = int(bit * 8 * tensor.element_size())
    mask = torch.tensor([1 << number if number < 8 * tensor.element_size() - 1 else -(1 << number)]).to(bits.dtype)
    bits[int(where * bits.numel())] ^= mask[0]


def flips(job: Trained, count: int, seed: int) -> Counter[str]:
    """Return how many flips were made, and how many of them the witness has named, by place.

    ``rest`` names the tensor and the rank alone. ``replicas`` counts the verdicts about copies that name the parameter and
    blame this rank, or this rank among all, if too few agree. ``wrong`` is every other verdict.
    """
    chance, found = random.Random(seed), Counter[str]()
    job.step()
    job.step()
    sound = {key: tensor.detach().clone() for key, tensor in job.places().items()}
    for _ in range(count):
        before = len(job.watching.verdicts)
        for key, tensor in job.places().items():
            tensor.data.copy_(sound[key])  # what is written to all ranks has no verdict
        job.step()
        found["verdicts about sound memory"] += len(job.watching.verdicts) - before
        rank, pick, where, bit = chance.randrange(dist.get_world_size()), chance.random(), chance.random(), chance.random()
        held = sorted(key for key, tensor in job.places().items() if tensor.numel())
        chosen: list[tuple[str, str]] = [held[int(pick * len(held))]]
        dist.broadcast_object_list(chosen, rank)
        place, name = chosen[0]
        before = len(job.watching.verdicts)
        job.watching.said.clear()
        if rank == dist.get_rank():
            flip(job.places()[place, name], where, bit)
        job.step()
        found[place] += 1
        for each in job.watching.verdicts[before:]:
            if isinstance(each, Verdict):
                found[f"{place}: {_meant(each, place, name, rank)}"] += 1
    return found


def _meant(verdict: Verdict, place: str, name: str, rank: int) -> str:
    """Return what a verdict says of a flip."""
    what = name if place == "weight" else f"{place} of {name}"
    if Kind.SDC_AT_REST in (verdict.kind, verdict.check):
        return "rest" if verdict.ranks == (rank,) and verdict.subject.what == what else "wrong"
    if verdict.check is Kind.SDC_REPLICA and verdict.subject.what.endswith(name):
        return "replicas" if verdict.ranks == (rank,) else "replicas, among all" if rank in verdict.ranks else "wrong"
    return "replicas, another tensor" if verdict.ranks == (rank,) or rank in verdict.ranks else "wrong"


def arguments(frameworks_words: str, *more: str) -> argparse.Namespace:
    """Return the arguments of a command."""
    parser = argparse.ArgumentParser(description=frameworks_words)
    parser.add_argument("what", choices=("flips", "sound", *more))
    parser.add_argument("--count", type=int, default=20, help="flips, or steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="layouts whose name has this")
    return parser.parse_args()


def row(name: str, found: object) -> None:
    """Print a row on rank 0."""
    if dist.get_rank() == 0:
        shown = ", ".join(f"{key} {value}" for key, value in sorted(found.items())) if isinstance(found, Counter) else found
        print(f"{name}: {shown}", flush=True)


def equal(with_witness: Places, without: Places) -> bool:
    """Return whether memory is equal bit for bit on all ranks."""
    same = with_witness.keys() == without.keys() and all(
        torch.equal(_bits(with_witness[key]), _bits(without[key])) for key in without
    )
    total = torch.tensor([same]).int()
    dist.all_reduce(total, dist.ReduceOp.MIN)
    return bool(total)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
