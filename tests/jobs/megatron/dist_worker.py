"""Under torchrun: jobs saved by Megatron's own ``torch_dist``; see conversions.py. Also DIR/<layout>-buckets/iter_0000002.

DIR/padded is a checkpoint of a job whose buckets are padded, which has states of other elements.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_unickpt.testing.jobs import Job  # before anything of megatron

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.transformer.enums import AttnBackend

from megatron_unickpt.testing.layouts import Layout
from megatron_unickpt.testing.truth import consolidated
from tests.jobs.megatron.conversions import iteration, main


def content(sharding: str) -> dict[str, Any]:
    """As Megatron's scripts have it (training/checkpointing.py, ``_build_sharded_state_dict_metadata``)."""
    return {
        "distrib_optim_sharding_type": sharding, "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True, "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }  # fmt: skip


def native(job: Job, folder: Path, sharding: str) -> None:
    """Save as Megatron's scripts do (``generate_state_dict``), with their arguments and generators."""
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


def save(job: Job, place: Path) -> None:
    native(job, iteration(place), "fully_reshardable")
    if job.layout.optimizer == "dist":
        native(job, iteration(place.with_name(f"{place.name}-buckets")), "dp_reshardable")


def with_padding(folder: Path) -> None:
    """Save a job whose buckets are padded in Megatron's form, as DIR/padded, with its state in DIR/padded.truth."""
    job = Job(Layout(dp=4), bucket_size=1000)
    job.train(1)
    native(job, folder / "padded", "fully_reshardable")
    held = consolidated(job, folder / "scratch")
    if dist.get_rank() == 0:
        torch.save(held, folder / "padded.truth")


if __name__ == "__main__":
    main(save, with_padding)
