"""Self-test of the Megatron adapter: ``python -m megatron_unickpt.self_test FOLDER``.

For each optimizer wrapper, a small GPT trains, is saved by ``dist_checkpointing.save`` with unickpt's strategy, and a model of
another seed loads it. The whole state, read through Megatron's own ``torch_dist`` format, and the next losses must be equal bit
for bit. Exits with an error otherwise. ``unickpt.base.self_test`` runs it for a Megatron whose hooked functions have changed.
It covers megatron-core. The training scripts' own functions are not called: they need a GPU and a data set.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_unickpt.testing.jobs import Job  # before anything of megatron

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import megatron_unickpt
from megatron_unickpt.framework import marks
from megatron_unickpt.testing import truth
from megatron_unickpt.testing.layouts import Layout

LAYOUTS = ("gpt-one-dist", "gpt-one-plain", "gpt-one-fp32")


def main(folder: str) -> None:
    """Run all layouts.

    Raises:
        SystemExit: something was not saved or loaded as it was.
    """
    store = TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    for name in LAYOUTS:
        _round_trip(Layout.parse(name), Path(folder))
    truth.close()


def _round_trip(layout: Layout, folder: Path) -> None:
    saved, compared = folder / layout.name, folder / "compared"
    job = Job(layout, seed=1)
    job.train(2)
    megatron_unickpt.save(saved, job.chunks, job.optimizer, iteration=2)
    _require(marks.recognises(saved), f"{layout.name}: the checkpoint was not saved as unickpt")
    expected = truth.consolidated(job, compared)
    losses = job.train(1)
    after = truth.consolidated(job, compared)
    job = Job(layout, seed=2)
    megatron_unickpt.load(saved, job.chunks, job.optimizer)
    job.step = 2
    _compare(expected, truth.consolidated(job, compared), f"{layout.name}, after the load")
    found = job.train(1)
    _require(found == losses, f"{layout.name}: the next loss is {found} after the load, and {losses} without")
    _compare(after, truth.consolidated(job, compared), f"{layout.name}, a step after the load")


def _compare(expected: truth.Truth | None, found: truth.Truth | None, where: str) -> None:
    if expected is None or found is None or expected.keys() != found.keys():
        sys.exit(f"{where}: other tensors")
    for name, tensor in expected.items():
        _require(torch.equal(tensor, found[name]), f"{where}: {name} differs")


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        sys.exit(otherwise)


if __name__ == "__main__":
    main(sys.argv[1])
