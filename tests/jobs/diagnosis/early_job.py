"""Under torchrun: a job whose layers sleep, with an agent, and with times of layers.

early_job deepspeed|megatron LAYOUT RINGS STEPS LAYER_S SLOW_RANK FACTOR SINCE

The layers of ``SLOW_RANK`` (-1 for no rank) sleep ``FACTOR`` times as long, from step ``SINCE`` on. Rank 0 prints the time at
which each step ends.
"""

from __future__ import annotations

import json
import sys
import time
import warnings

from tests.jobs.replay.timed_job import deepspeed_job, megatron_job
from tests.support.framework_imports import import_framework
from tests.support.result_lines import print_result

EVERY = 10


def before_forks(arguments: list[str]) -> None:
    import_framework(arguments[0])


def main() -> None:
    warnings.filterwarnings("ignore")
    kind, layout, rings, steps, seconds, slow, factor, since = sys.argv[1:]
    if kind == "megatron":
        import megatron_unickpt.testing.jobs  # noqa: F401 - before anything of megatron, and of torch.distributed
    import torch.distributed as dist

    from unickpt.diagnosis import session
    from unickpt.testing.launch import leave

    if kind == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
    else:
        dist.init_process_group("gloo")
    make = deepspeed_job if kind == "deepspeed" else megatron_job
    step, layers = make(layout, rings, float(seconds), watch=True, layers_every=EVERY)
    ends = []
    for at in range(1, int(steps) + 1):
        layers.factor = float(factor) if dist.get_rank() == int(slow) and at >= int(since) else 1.0
        step()
        ends.append(time.time_ns())
    if dist.get_rank() == 0:
        print_result("ENDS", json.dumps(ends))
    dist.barrier()
    session.stop()
    leave()


if __name__ == "__main__":
    main()
