"""Access to private attributes of Megatron. A new version can break only this module and those of the optimizers.

``optimizer_internals.py`` has the optimizers, ``cpu_offload.py`` the one that offloads. Follows megatron-core 0.12 to 0.19 and
the development branch: ``parallel_state.py`` and the training scripts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import validation

from megatron_unickpt.framework.flags import ScriptOptions, options_of
from unickpt.transform.convert.megatron import keys
from unickpt.transform.dialects.model_facts import Model


def data_parallel_ranks(*, expert: bool) -> tuple[int, ...]:
    """Return the global ranks that hold the same model weights as this rank, in the order of their group; () if unknown."""
    if not parallel_state.is_initialized():
        return ()
    try:
        if expert:
            group = parallel_state.get_expert_data_parallel_group()
        else:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return tuple(torch.distributed.get_process_group_ranks(group))
    except (AssertionError, AttributeError, TypeError):
        return ()


def data_parallel_group(*, expert: bool) -> Any:
    """Return the process group of the ranks that hold the same model weights as this rank, of experts or of all others."""
    if expert:
        try:
            return parallel_state.get_expert_data_parallel_group()
        except (AssertionError, AttributeError, TypeError):  # such as in a version, or a job, without expert parallelism
            expert = False
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def is_expert(parameter: Any, key: str) -> bool:
    """Whether the copies of this parameter are those of the expert data parallel group.

    ``allreduce`` is False for experts only with expert parallelism. The key identifies experts in all cases.
    """
    return not getattr(parameter, "allreduce", True) or keys.is_expert(key)


_SIZES = {
    "tensor": "get_tensor_model_parallel_world_size",
    "pipeline": "get_pipeline_model_parallel_world_size",
    "virtual_pipeline": "get_virtual_pipeline_model_parallel_world_size",
    "context": "get_context_parallel_world_size",
    "expert": "get_expert_model_parallel_world_size",
    "expert_tensor": "get_expert_tensor_parallel_world_size",
    "data": "get_data_parallel_world_size",
}


def topology() -> dict[str, Any]:
    """Return the parallel degrees of the running job, for the manifest."""
    found: dict[str, Any] = {"world_size": torch.distributed.get_world_size()}
    if parallel_state.is_initialized():
        for name, getter in _SIZES.items():
            try:
                value = getattr(parallel_state, getter)()
            except (AssertionError, AttributeError, TypeError):
                continue
            if value is not None:
                found[name] = int(value)
    return found


def model() -> Model:
    """Return the facts about the model from the arguments of Megatron's training scripts. Empty without the scripts."""
    arguments = global_arguments()
    found = Model.of_megatron(arguments)
    counted = {"vocab": _vocabulary(arguments), "tokens": tokens()}
    positive = {name: count for name, count in counted.items() if type(count) is int and count > 0}
    return Model(found.family, {**found.facts, **positive})


def tokens() -> int | None:
    """Return the number of entries of the scripts' tokenizer, without padding; None if unknown or without the scripts."""
    found = getattr(_tokenizer(), "vocab_size", None)
    return found if type(found) is int and found > 0 else None


def _tokenizer() -> Any:
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_TOKENIZER", None)


def _vocabulary(arguments: Any) -> int | None:
    """Return the number of entries without padding from the arguments, which have it for tokenizers without a file.

    Up to 0.16, ``--vocab-size`` of the NullTokenizer does not count its end-of-document token, which the model has.
    """
    entries = getattr(arguments, "vocab_size", None)
    if entries is not None and getattr(arguments, "tokenizer_type", None) == "NullTokenizer":
        return tokens()
    return entries


def config_fields() -> list[str]:
    """Return the fields of ``TransformerConfig`` and ``MLATransformerConfig``, without those of ``ModelParallelConfig``."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer import transformer_config

    kinds = [transformer_config.TransformerConfig, getattr(transformer_config, "MLATransformerConfig", None)]
    names = dict.fromkeys(found.name for kind in kinds if kind is not None for found in dataclasses.fields(kind))
    parallel = {found.name for found in dataclasses.fields(ModelParallelConfig)}
    return [name for name in names if name not in parallel]


def coordinates() -> dict[str, int]:
    """Return this rank's position in every parallel dimension. That of data includes context parallelism."""
    if not parallel_state.is_initialized():
        return {"pipeline": 0, "tensor": 0, "expert": 0, "expert_tensor": 0, "data": torch.distributed.get_rank()}
    return {
        "pipeline": int(parallel_state.get_pipeline_model_parallel_rank()),
        "tensor": int(parallel_state.get_tensor_model_parallel_rank()),
        "expert": int(parallel_state.get_expert_model_parallel_rank()),
        "expert_tensor": _expert_tensor_rank(),
        "data": int(parallel_state.get_data_parallel_rank(with_context_parallel=True)),
    }


def _expert_tensor_rank() -> int:
    try:
        return int(parallel_state.get_expert_tensor_parallel_rank())
    except (AssertionError, AttributeError, TypeError):
        return 0


def process_groups() -> dict[str, list[Any]]:
    """Return this rank's process groups by Megatron's names, such as ``tensor model parallel`` (core/parallel_state.py)."""
    found: dict[str, list[Any]] = {}
    for name, value in vars(parallel_state).items():
        if name.isupper() and "_GROUP" in name and "RANKS" not in name:
            label = name.strip("_").partition("_GROUP")[0].lower().replace("_", " ")
            groups = value if isinstance(value, list) else [value]
            found.setdefault(label, []).extend(g for g in groups if isinstance(g, torch.distributed.ProcessGroup))
    return found


def groups_within_layers() -> list[Any]:
    """Return this rank's process groups whose ranks exchange activations inside of a layer."""
    labels = ("tensor model parallel", "context parallel", "expert model parallel", "expert tensor parallel")
    found = process_groups()
    groups = [group for label in labels for group in found.get(label, [])]
    return [group for at, group in enumerate(groups) if group not in groups[:at]]


def replica_ranks() -> list[int]:
    """Return the global ranks with the same part of the model as this one, with the same experts, in Megatron's order."""
    try:
        group = parallel_state.get_expert_data_parallel_group()
    except (AssertionError, AttributeError, TypeError):
        group = parallel_state.get_data_parallel_group()
    experts = list(torch.distributed.get_process_group_ranks(group))
    others = torch.distributed.get_process_group_ranks(parallel_state.get_data_parallel_group())
    return [rank for rank in experts if rank in others]  # ranks of context parallelism belong to one replica


def is_in_ddp(chunk: Any) -> bool:
    """Return whether a chunk is wrapped in Megatron's own DDP, and not in a variant of FSDP."""
    from megatron.core.distributed import DistributedDataParallel

    return isinstance(chunk, DistributedDataParallel)


@contextlib.contextmanager
def no_gradients_added(parameters: Iterable[Any]) -> Iterator[None]:
    """Let Megatron's DDP add no gradient to its buffers (core/distributed/distributed_data_parallel.py).

    It then takes gradients as added by the layers themselves, and forgets them.
    """
    own = [each for each in parameters if each.requires_grad]
    flags = [(getattr(each, "grad_added_to_main_grad", None), getattr(each, "zero_out_wgrad", None)) for each in own]
    for each in own:
        each.grad_added_to_main_grad, each.zero_out_wgrad = True, False
    try:
        yield
    finally:
        for each, values in zip(own, flags, strict=True):
            for name, value in zip(("grad_added_to_main_grad", "zero_out_wgrad"), values, strict=True):
                if value is None:
                    delattr(each, name)
                else:
                    setattr(each, name, value)


@contextlib.contextmanager
def no_parameters_gathered(chunk: Any) -> Iterator[None]:
    """Let no forward pass gather parameters, which are complete here (core/distributed/param_and_grad_buffer.py).

    With ``overlap_param_gather`` the first forward pass after a reduction of gradients gathers them, and later ones do not. One
    between the reduction and the step would take the place of the one that gathers what the step has changed.
    """
    lists = (getattr(chunk, name, ()) for name in ("bucket_groups", "expert_parallel_bucket_groups"))
    groups = [group for found in lists for group in found if hasattr(group, "param_gather_dispatched")]
    before = [group.param_gather_dispatched for group in groups]
    for group in groups:
        group.param_gather_dispatched = True
    try:
        yield
    finally:
        for group, dispatched in zip(groups, before, strict=True):
            group.param_gather_dispatched = dispatched


@contextlib.contextmanager
def logged_losses_kept() -> Iterator[None]:
    """Keep what Megatron sums up for its log: auxiliary losses of experts, and those of further predicted tokens."""
    trackers = list(_loss_trackers())
    before = [_copied(each) for each in trackers]
    try:
        yield
    finally:
        for tracker, content in zip(trackers, before, strict=True):
            tracker.clear()
            tracker.update(content)


def _loss_trackers() -> Iterator[dict[str, Any]]:
    for module in ("megatron.core.transformer.moe.moe_utils", "megatron.core.parallel_state"):
        getter = getattr(sys.modules.get(module), "get_moe_layer_wise_logging_tracker", None)
        if getter is not None:
            yield getter()
            break
    predictions = sys.modules.get("megatron.core.transformer.multi_token_prediction")
    tracker = getattr(getattr(predictions, "MTPLossLoggingHelper", None), "tracker", None)
    if isinstance(tracker, dict):
        yield tracker


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def tracked_generators() -> dict[str, Any]:
    """Return the states of the random generators that Megatron forks (core/tensor_parallel/random.py)."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states: dict[str, Any] = get_cuda_rng_tracker().get_states()
    return _copied(states)  # type: ignore[no-any-return]


def restore_tracked_generators(states: dict[str, Any]) -> None:
    """Set these states."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    get_cuda_rng_tracker().set_states(states)


def default_store() -> Any:
    """Return the key-value store that set up the job's process groups."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def dequantized(data: torch.Tensor) -> torch.Tensor:
    """Return an fp8 tensor of TransformerEngine in high precision, and any other tensor unchanged."""
    if type(data) in (torch.nn.Parameter, torch.Tensor):
        return data
    try:
        from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
    except ImportError:
        return data
    return dequantize_fp8_tensor(data) if is_float8tensor(data) else data


def enqueue(queue: Any, caller: Any, request: Any) -> int:
    """Put a request with its own caller into an ``AsyncCallsQueue``. Returns the index of the call."""
    from megatron.core.dist_checkpointing.strategies import async_utils

    queue.call_idx += 1
    queue.async_calls.append(async_utils._ActiveAsyncRequest(queue.call_idx, caller, request.freeze()))
    return int(queue.call_idx)


def compare_common_state(common: Any) -> None:
    """Warn on every rank whose common state differs from rank 0's, as Megatron does. A collective."""
    compare = getattr(validation, "_validate_common_state_dict", None)
    if compare is not None:
        compare(common)


def global_arguments() -> Any:
    """Return the arguments of Megatron's training scripts; None before they are set, or without the scripts."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def exit_signal(handler: Any) -> Any:
    """Return the signal to which a ``DistributedSignalHandler`` of the training scripts listens."""
    return handler.sig


def has_received(handler: Any) -> bool:
    """Return whether this process has received that signal."""
    return bool(getattr(handler, "_signal_received", False))


def iterations_done() -> int | None:
    """Return how many iterations the training scripts have done before the current one; None outside of their training loop."""
    return getattr(global_arguments(), "curr_iteration", None)


def options() -> ScriptOptions:
    """Return the options from the flags of Megatron's training scripts, or the defaults without the scripts."""
    return options_of(global_arguments())


def seed_scripts(options: Any, seed: int) -> None:
    """Seed generators and trackers as the training scripts do when a job starts."""
    from megatron.training import initialize

    accepted = inspect.signature(initialize._set_random_seed).parameters
    given = {
        "data_parallel_random_init": getattr(options, "data_parallel_random_init", False),
        "te_rng_tracker": getattr(options, "te_rng_tracker", False),
        "inference_rng_tracker": getattr(options, "inference_rng_tracker", False),
        "use_cudagraphable_rng": bool(getattr(options, "enable_cuda_graph", False)),
    }
    initialize._set_random_seed(seed, **{key: value for key, value in given.items() if key in accepted})
