"""``--override-opt_param-scheduler``: the schedule of the job counts, also its bounds in the optimizer's groups.

Megatron's scheduler reads peak and minimum from the groups. A load of the optimizer sets them to those of the checkpoint, so
that the flag overrides only the form of the schedule (megatron-core up to 0.19).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unickpt.base.logs import logger

BOUNDS = ("max_lr", "min_lr", "start_wd", "end_wd")  # what ``OptimizerParamScheduler`` reads from a group


@contextmanager
def own_bounds(optimizer: Any, scheduler: Any) -> Iterator[None]:
    """Keep the job's bounds of the schedule while optimizer and scheduler are loaded in this block, if the job overrides them.

    Args:
        optimizer: optimizer of megatron-core, or None.
        scheduler: its ``OptimizerParamScheduler``, or None.
    """
    if not getattr(scheduler, "override_opt_param_scheduler", False) or _has_no_groups(optimizer):
        yield
        return
    own = [{key: group[key] for key in BOUNDS if key in group} for group in optimizer.param_groups]
    yield
    changed = []
    for mine, group in zip(own, optimizer.param_groups, strict=True):  # a load may make new groups, in the same order
        loaded = {key: group.pop(key) for key in BOUNDS if key in group}
        group.update(mine)
        changed += [f"{key}: {loaded[key]} became {mine[key]}" for key in mine if loaded.get(key, mine[key]) != mine[key]]
    scheduler.step(0)  # the rate of the next step
    if changed and torch.distributed.get_rank() == 0:
        logger.info("unickpt: --override-opt_param-scheduler: %s", "; ".join(dict.fromkeys(changed)))


def _has_no_groups(optimizer: Any) -> bool:
    return optimizer is None or bool(getattr(optimizer, "is_stub_optimizer", False))
