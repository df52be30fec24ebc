"""Under torchrun: jobs saved in Megatron's ``torch`` format; see conversions.py. Its buffers: DIR/buffers.json."""

from __future__ import annotations

import inspect
import json
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_unickpt.testing.jobs import LAYERS, Job  # before anything of megatron

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.transformer.enums import AttnBackend

from tests.jobs.megatron.conversions import iteration, main
from megatron_unickpt.testing.layouts import Layout

BUFFERS = "buffers.json"


def arguments(layout: Layout) -> Namespace:
    """Return arguments of Megatron's scripts: those that the reader of the format needs, and some others."""
    return Namespace(
        num_layers=LAYERS, num_attention_heads=4, kv_channels=8, vocab_size=96, params_dtype=torch.bfloat16,
        world_size=layout.world, tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None, context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.tp, data_parallel_size=layout.dp,
        num_experts=4 if layout.moe else None, moe_layer_freq=1, transformer_impl="local", multi_latent_attention=False,
        untie_embeddings_and_output_weights=layout.moe, use_distributed_optimizer=layout.optimizer == "dist",
        overlap_grad_reduce=False, ddp_bucket_size=None, ddp_num_buckets=None, attention_backend=AttnBackend.unfused,
    )  # fmt: skip


def checkpoint_name(folder: Path) -> Path:
    """Return the name as training/checkpointing.py does (``get_checkpoint_name``)."""
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return folder / name / "model_optim_rng.pt"


def native(job: Job, place: Path) -> None:
    """Save as training/checkpointing.py does (``save_checkpoint`` with ``--ckpt-format torch``, ``generate_state_dict``)."""
    generators = [
        {
            "random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(), "cuda_rng_state": torch.get_rng_state(), "rng_tracker_states": {},
        }
    ]  # fmt: skip
    path = checkpoint_name(iteration(place))
    path.parent.mkdir(parents=True, exist_ok=True)
    if job.layout.optimizer == "dist":
        job.optimizer.save_parameter_state(str(path.with_name("distrib_optim.pt")))
    if parallel_state.get_expert_data_parallel_rank() != 0:
        return
    state: dict[str, Any] = {"args": arguments(job.layout), "checkpoint_version": 3.0, "iteration": job.step}
    for at, module in enumerate(job.modules):
        state["model" if len(job.modules) == 1 else f"model{at}"] = module.state_dict_for_save_checkpoint()
    state["optimizer"] = job.optimizer.state_dict()
    state["opt_param_scheduler"] = {"max_lr": 0.01, "num_steps": 8}
    state["rng_state"] = generators
    state["num_floating_point_operations_so_far"] = 17.0
    torch.save(state, path)


def buffers(folder: Path) -> None:
    """Record the positions of parameters in Megatron's buffers, with several buckets and shared embeddings."""
    if dist.get_rank() != 0:
        return
    sizes = [96 * 32, 33, 32 * 32, 5, 64, 1000, 96 * 32]
    found = []
    for bucket_size in (None, 1, 100, 1500, 4000):
        for shared in ((), (0,), (6,), (0, 6), (3,)):
            parameters = [torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for n in sizes]
            for at in shared:
                parameters[at].shared_embedding = True  # type: ignore[attr-defined]
            config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
            known = inspect.signature(_ParamAndGradBuffer.__init__).parameters
            given: dict[str, Any] = {
                "ddp_config": config, "param_dtype": torch.bfloat16, "grad_dtype": torch.float32, "params": parameters,
                "data_parallel_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
                "bucket_size": bucket_size, "param_to_name": {each: str(at) for at, each in enumerate(parameters)},
                "gradient_scaling_factor": 1.0, "param_indices": list(range(len(sizes))), "nccl_ub": False,
            }  # fmt: skip
            if "pg_collection" in known:
                from megatron.core.process_groups_config import ProcessGroupCollection

                given["pg_collection"] = ProcessGroupCollection()
                given["pg_collection"].tp = parallel_state.get_tensor_model_parallel_group()
                given["pg_collection"].dp_cp = given["data_parallel_group"]
            buffer = _ParamAndGradBuffer(**{key: value for key, value in given.items() if key in known})
            begins, at = [], 0
            for bucket in buffer.buckets:  # assembled as in distrib_optimizer.py (``get_parameter_state_dp_zero``)
                begins.append(at - bucket.offset)
                at += bucket.numel_unpadded
            places = [buffer.param_index_map[each][0] + begins[buffer.param_index_map[each][2]] for each in parameters]
            found.append({"bucket_size": bucket_size, "shared": shared, "places": places, "total": buffer.numel_unpadded})
    (folder / BUFFERS).write_text(json.dumps({"sizes": sizes, "found": found}))


if __name__ == "__main__":
    main(native, buffers)
