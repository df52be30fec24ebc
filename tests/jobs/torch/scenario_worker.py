"""Under torchrun: run every scenario on this world size.

scenario_worker DIR [NAME ...] [--worlds 2,4]    writes DIR/w<world>.json: {scenario: {rank: failure}}
"""

from __future__ import annotations

import datetime
from functools import partial

import torch
import torch.distributed as dist

import torch_unickpt.dcp.switched
import torch_unickpt.loading.load_training
import torch_unickpt.saving.save_training
import torch_unickpt.witnessing.watch  # noqa: F401  # once, before the forks
from tests.jobs.torch import (  # noqa: F401
    scenarios_dcp,
    scenarios_late_copies,
    scenarios_libraries,
    scenarios_training,
    scenarios_witness,
    scenarios_writers,
)
from tests.jobs.torch.registry import REGISTRY
from tests.support.scenarios import arguments, run
from tests.support.turns import in_turn
from unickpt.testing.launch import leave


def _in_a_group(work: partial[None]) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    work()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    given = arguments()
    work = partial(run, REGISTRY, given.folder, set(given.names))
    in_turn((world, partial(_in_a_group, work)) for world in given.worlds)
    leave()


if __name__ == "__main__":
    main()
