"""Under torchrun: jobs saved by Megatron's own ``torch_dist`` and by the adapter, and what the first became loaded again.

dist_worker save DIR LAYOUT...           DIR/<layout>/iter_0000002 and .../ours; what the job holds: DIR/<layout>.truth
dist_worker load DIR SOURCE TARGET ...   pairs: DIR/<source>/converted into a job; DIR/<source>-<target>.json
"""

from __future__ import annotations

import json
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

from tests.megatron.jobs import Job  # before anything of megatron

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.transformer.enums import AttnBackend

import megatron_unickpt
from megatron_unickpt import loading
from tests.launch import leave
from tests.megatron.layouts import Layout
from tests.megatron.truth import close, consolidated, differences

STEPS = 2


def content(sharding: str) -> dict[str, Any]:
    """As Megatron's scripts have it (training/checkpointing.py, ``_build_sharded_state_dict_metadata``)."""
    return {
        "distrib_optim_sharding_type": sharding, "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True, "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }  # fmt: skip


def native(job: Job, folder: Path, sharding: str) -> None:
    """As Megatron's scripts save it (``generate_state_dict``), with arguments and generators as they have them."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    metadata = content(sharding)
    modules, layout = job.modules, job.layout
    state: dict[str, Any] = {
        "model" if len(modules) == 1 else f"model{at}": module.sharded_state_dict(metadata=metadata)
        for at, module in enumerate(modules)
    }
    state["optimizer"] = job.optimizer.sharded_state_dict(state, metadata=metadata)
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    generators = {"torch_rng_state": torch.get_rng_state(), "random_rng_state": (3, (1, 2), None)}
    state["rng_state"] = ShardedObject(
        "rng_state", [generators], (layout.pp, layout.tp), place,
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )  # fmt: skip
    state |= {"iteration": job.step, "checkpoint_version": 3.0, "opt_param_scheduler": {"max_lr": 0.01, "num_steps": 8}}
    state["args"] = Namespace(
        num_layers=4, num_attention_heads=4, kv_channels=8, vocab_size=96, params_dtype=torch.bfloat16, world_size=layout.world,
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp, attention_backend=AttnBackend.unfused,
    )  # fmt: skip
    dist_checkpointing.save(state, str(folder), validate_access_integrity=False, content_metadata=_plain(metadata))


def _plain(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key != "dp_cp_group"}


def save(folder: Path, layout: Layout) -> None:
    job = Job(layout, seed=1, tied=not layout.moe)
    job.train(STEPS)
    place = folder / layout.name
    native(job, place / f"iter_{STEPS:07d}", "fully_reshardable")
    megatron_unickpt.save(place / "ours", job.chunks, job.optimizer, iteration=job.step)
    truth = consolidated(job, folder / "scratch")
    if layout.optimizer == "dist":
        native(job, folder / f"{layout.name}-buckets" / f"iter_{STEPS:07d}", "dp_reshardable")
    if dist.get_rank() == 0:
        (place / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
        torch.save(truth, folder / f"{layout.name}.truth")


def load(folder: Path, source: str, target: Layout) -> None:
    job = Job(target, seed=9, tied=not target.moe)
    found = megatron_unickpt.load(folder / source / "converted", job.chunks, job.optimizer)
    state, report = consolidated(job, folder / "scratch"), loading.last_report
    if state is None or report is None:
        return
    problems = differences(torch.load(folder / f"{source}.truth"), state)
    problems += [f"{e.name} ({e.state}): {e.reason}" for e in report.entries if e.outcome == "left out" and e.state != "object"]
    groups = sorted((group["wd_mult"], group["lr"], group.get("step")) for group in job.hyperparameters())
    result = {"iteration": found["iteration"], "problems": problems, "groups": groups}
    (folder / f"{source}-{target.name}.json").write_text(json.dumps(result))


def main() -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    folder, names = Path(sys.argv[2]), sys.argv[3:]
    if sys.argv[1] == "save":
        for name in names:
            save(folder, Layout.parse(name))
    else:
        for source, target in zip(names[::2], names[1::2], strict=True):
            load(folder, source, Layout.parse(target))
    dist.barrier()
    close()
    leave()


if __name__ == "__main__":
    main()
