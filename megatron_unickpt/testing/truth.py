"""The state of a job through Megatron's own resharding format, ``torch_dist`` with fully reshardable optimizers."""

from __future__ import annotations

import contextlib
import inspect
import queue
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_unickpt.testing.jobs import Job  # before anything of megatron

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer import distrib_optimizer
from torch.distributed.checkpoint.filesystem import FileSystemReader
from packaging.version import Version
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

from megatron_unickpt.framework.versions import version

Truth = dict[str, torch.Tensor]
_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)$")


def optimizers_take_metadata() -> bool:
    """Whether optimizers take metadata, since 0.13. Before, only the distributed optimizer has an argument for its format."""
    return "metadata" in inspect.signature(distrib_optimizer.DistributedOptimizer.sharded_state_dict).parameters


def own_forms() -> tuple[str, str]:
    """Return the names of Megatron's own forms of a distributed optimizer: memory buckets, and whole states."""
    if hasattr(distrib_optimizer.DistributedOptimizer, "sharded_param_state_dp_reshardable"):  # since 0.15
        return "dp_reshardable", "fully_reshardable"
    return "fully_sharded_bucket_space", "fully_sharded_model_space"


def consolidated(job: Job, folder: Path, *, optimizer: bool = True) -> Truth | None:
    """Return all weights, main parameters and moments in global coordinates, on rank 0. Collective.

    Saved by Megatron's own ``torch_dist`` strategy from its own sharded state dicts, and read back whole.
    Megatron names the main parameter ``param`` or ``fp32_param``, depending on the optimizer; the fp32
    optimizer has none, its weights are.
    """
    sharding = own_forms()[1]
    metadata = {
        "distrib_optim_sharding_type": sharding,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    modules = job.modules
    state: dict[str, Any] = {
        "model" if len(modules) == 1 else f"model{at}": module.sharded_state_dict(metadata=metadata)
        for at, module in enumerate(modules)
    }
    if optimizer:
        if optimizers_take_metadata():
            asked: dict[str, Any] = {"metadata": metadata}
        else:
            asked = {"sharding_type": sharding} if job.layout.optimizer == "dist" else {}
        with _places_without_padding(job.optimizer):
            state["optimizer"] = job.optimizer.sharded_state_dict(state, **asked)
    with _results_of_this_process():
        dist_checkpointing.save(state, str(folder), validate_access_integrity=False)
    if sharding != "fully_reshardable":  # flattened: Megatron alone restores the shapes
        tensors = dist_checkpointing.load_plain_tensors(str(folder))
    elif dist.get_rank() == 0:
        tensors = _read_by_one_rank(folder)
    if dist.get_rank() != 0:
        return None
    truth: Truth = {}
    for key, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        match = _STATE.match(key)
        if match is None:
            truth[f"weight/{key}"] = tensor
        else:
            name = {"fp32_param": "master", "param": "master"}.get(match.group(1), match.group(1))
            truth[f"{name}/{match.group(2)}"] = tensor
    for key in [key for key in truth if key.startswith("weight/")]:
        truth.setdefault(key.replace("weight/", "master/", 1), truth[key])
    return truth


def _read_by_one_rank(folder: Path) -> dict[str, Any]:
    """Read all of a ``torch_dist`` checkpoint by PyTorch's own reader, as ``dcp_to_torch_save`` does. Not collective.

    ``load_plain_tensors`` reads everything on every rank.
    """
    state: dict[str, Any] = {}
    reader, planner = FileSystemReader(folder), _EmptyStateDictLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(plan, planner).wait()
    return state


@contextlib.contextmanager
def _places_without_padding(optimizer: Any) -> Iterator[None]:
    """Let Megatron find the states of parameters where it has put them, in its fully reshardable form.

    It gathers the buckets of a buffer one after the other without their padding (``get_parameter_state_dp_zero``), and looks
    for each parameter where it is with the padding (``sharded_param_state_fully_reshardable``, 0.16.1). After a bucket that is
    padded, such as the one before a tied embedding of a job with pipeline stages, it finds other elements.
    """
    wrappers = getattr(optimizer, "chained_optimizers", [optimizer])
    before = []
    for buffer in (buffer for each in wrappers for buffer in getattr(each, "buffers", ())):
        padding, begins = 0, []  # of the buckets before each
        for bucket in buffer.buckets:
            begins.append(padding)
            padding += bucket.grad_data.numel() - bucket.numel_unpadded
        before.append((buffer, buffer.param_index_map))
        buffer.param_index_map = {
            parameter: (begin - begins[number], end - begins[number], number)
            for parameter, (begin, end, number) in buffer.param_index_map.items()
        }
    try:
        yield
    finally:
        for buffer, places in before:
            buffer.param_index_map = places


@contextlib.contextmanager
def _results_of_this_process() -> Iterator[None]:
    """Let a synchronous save of ``torch_dist`` return its results through a queue of this process.

    Megatron takes one of a manager process, for saves in another process. Starting it on every rank imports PyTorch and
    Megatron once more, which takes longer than the save of a small job. Before 0.15, every save is in another process.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if Version(version()) < Version("0.15"):
        yield
        return
    before = getattr(filesystem_async, "_results_queue", None)
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


def close() -> None:
    """End the manager process that ``torch_dist`` started. Otherwise it outlives a worker that leaves at once."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results = getattr(filesystem_async, "_results_queue", None)
    if results is not None:
        results._manager.shutdown()
