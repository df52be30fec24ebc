"""Declarations of the hooks on Megatron. No other module of this package assigns to a Megatron module.

Each group is installed after its module is imported (``unickpt.base.autoload.MEGATRON``). A hook calls unickpt if the arguments
of the call select it, and Megatron's function otherwise. Wrappers are bound to ``edge.RUNTIME`` here, because Megatron's
arguments cannot carry the runtime.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_unickpt.edge import RUNTIME
from megatron_unickpt.framework.declaration import declared
from megatron_unickpt.framework.versions import FRAMEWORK, version
from megatron_unickpt.measuring import precision
from megatron_unickpt.runtime import Purpose, Runtime
from megatron_unickpt.witnessing import step_hooks
from unickpt.base import hooks
from unickpt.base.hooks import Hook
from unickpt.base.options.job import TimingOptions
from unickpt.base.step_replay import asked
from unickpt.base.switch import switch, times

SERIALIZATION = "megatron.core.dist_checkpointing.serialization"
ASYNC = "megatron.core.dist_checkpointing.strategies.async_utils"


def _arguments(wrapped: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the call's arguments by name, defaults included."""
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _late(function: str, *bound: Any, of_instance: bool = False) -> Callable[..., Any]:
    """Return a wrapper that calls a function of this package, which is imported at the first call.

    Args:
        function: ``module:name`` below this package.
        bound: its first arguments. The hooked function and the arguments of the call follow.
        of_instance: the object whose method is hooked comes before the arguments of the call.
    """
    module, _, name = function.partition(":")

    def wrapper(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        target = getattr(importlib.import_module(f"megatron_unickpt.{module}"), name)
        own = (instance,) if of_instance else ()
        return target(*bound, wrapped, *own, *args, **kwargs)

    return wrapper


# ---------------------------------------------------------------- megatron.core.dist_checkpointing


def _save(runtime: Runtime, wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    given = _arguments(wrapped, args, kwargs)
    strategy = given["sharded_strategy"]
    from megatron_unickpt.dist_checkpointing import saving, strategies, switched
    from megatron_unickpt.framework import marks

    inner = strategies.unwrap(strategy)
    if strategy == (marks.BACKEND, marks.VERSION) or runtime.call.purpose is Purpose.SAVE:
        inner = strategies.UnickptSaveStrategy()
    if asked() is not None:  # which saves nothing, whatever strategy the job names
        inner = strategies.UnickptSaveStrategy()
    ours = isinstance(inner, strategies.UnickptSaveStrategy)
    if not ours and (runtime.call.purpose is not None or not switch().saves):
        return wrapped(*args, **kwargs)
    save = partial(
        saving.save,
        runtime,
        given["sharded_state_dict"],
        given["checkpoint_dir"],
        content_metadata=given.get("content_metadata"),
        asynchronous=given["async_sharded_save"],
        validate_access_integrity=given["validate_access_integrity"],
        preprocess_common=given.get("preprocess_common_before_consistancy_check"),
    )
    if ours:
        return save(share=inner.share)
    return switched.save(
        runtime, partial(save, stands_in=True), partial(_natively, wrapped, args, kwargs), strategy=type(inner).__name__,
        directory=given["checkpoint_dir"],
    )  # fmt: skip


def _natively(wrapped: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call Megatron's save or load with the optimizers in Megatron's form."""
    from megatron_unickpt.held_state import optimizer_forms

    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.arguments["sharded_state_dict"] = optimizer_forms.natively(bound.arguments["sharded_state_dict"])
    return wrapped(*bound.args, **bound.kwargs)


def _load(runtime: Runtime, wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron_unickpt.dist_checkpointing import loading, masters
    from megatron_unickpt.dist_checkpointing.lacking import Fit

    given = _arguments(wrapped, args, kwargs)
    if not runtime.recognises(given["checkpoint_dir"]):
        return _natively(wrapped, args, kwargs)
    alone = masters.parameters_alone(given["sharded_state_dict"]) if runtime.call.purpose is None else []
    loaded = loading.load(
        runtime,
        given["sharded_state_dict"],
        given["checkpoint_dir"],
        receiver=runtime.call.receiver,
        validate_access_integrity=given["validate_access_integrity"],
        strict=given["strict"],
        fit=Fit.EQUAL if runtime.call.complete else Fit.REQUESTED,
    )
    masters.follow_loaded(alone, loaded[0] if isinstance(loaded, tuple) else loaded)
    return loaded


def _metadata(name: str, runtime: Runtime, wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of ``metadata`` for a unickpt checkpoint."""
    from megatron_unickpt.dist_checkpointing import metadata

    given = _arguments(wrapped, args, kwargs)
    if not runtime.recognises(given["checkpoint_dir"]):
        return wrapped(*args, **kwargs)
    return getattr(metadata, name)(runtime, given["checkpoint_dir"])


def _remove_tensors(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron_unickpt.dist_checkpointing import metadata
    from megatron_unickpt.framework import marks

    given = _arguments(wrapped, args, kwargs)
    if not marks.recognises(given["checkpoint_dir"]):
        return wrapped(*args, **kwargs)
    return metadata.remove_sharded_tensors(given["checkpoint_dir"], given["key_prefix"])


def _default_save(runtime: Runtime, wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron_unickpt.dist_checkpointing import strategies
    from megatron_unickpt.framework import marks

    if _arguments(wrapped, args, kwargs)["backend"] == marks.BACKEND:
        return strategies.UnickptSaveStrategy(runtime=runtime)
    return wrapped(*args, **kwargs)


def _default_load(runtime: Runtime, wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron_unickpt.dist_checkpointing import strategies

    if runtime.recognises(_arguments(wrapped, args, kwargs)["checkpoint_dir"]):
        return strategies.UnickptLoadStrategy(runtime=runtime)
    return wrapped(*args, **kwargs)


def _core(attribute: str, wrapper: Callable[..., Any], parameters: tuple[str, ...], why: str) -> Hook:
    return declared(
        f"megatron.{attribute}", SERIALIZATION, attribute, wrapper, parameters=parameters, why=why,
        until="dist_checkpointing lets a strategy save the common state, and has its registry of strategies again",
    )  # fmt: skip


CORE = [
    _core(
        "save", partial(_save, RUNTIME),
        ("sharded_state_dict", "checkpoint_dir", "sharded_strategy", "validate_access_integrity", "async_sharded_save"),
        "no strategy for the common state: save always pickles it",
    ),
    _core(
        "load", partial(_load, RUNTIME), ("sharded_state_dict", "checkpoint_dir", "validate_access_integrity", "strict"),
        "no strategy for the common state: load always unpickles it",
    ),
    _core(
        "load_common_state_dict", partial(_metadata, "load_common_state_dict", RUNTIME), ("checkpoint_dir",),
        "reads common.pt; a unickpt checkpoint has the common state in its manifest",
    ),
    _core(
        "load_tensors_metadata", partial(_metadata, "load_tensors_metadata", RUNTIME), ("checkpoint_dir",),
        "reads torch's .metadata; a unickpt checkpoint has shapes and dtypes in its index",
    ),
    _core(
        "load_sharded_metadata", partial(_metadata, "load_sharded_metadata", RUNTIME), ("checkpoint_dir",),
        "reads torch's .metadata for tensors and objects; a unickpt checkpoint has both in its index",
    ),
    _core(
        "remove_sharded_tensors", _remove_tensors, ("checkpoint_dir", "key_prefix"),
        "rewrites torch's .metadata; in a unickpt checkpoint the index has to be rewritten",
    ),
    _core(
        "get_default_save_sharded_strategy", partial(_default_save, RUNTIME), ("backend",),
        "the development branch removed the registry and accepts a fixed set of backends",
    ),
    _core(
        "get_default_load_sharded_strategy", partial(_default_load, RUNTIME), ("checkpoint_dir",),
        "the development branch always returns torch's strategy, without regard to the directory",
    ),
]  # fmt: skip


# ---------------------------------------------------------------- asynchronous saves


ASYNCHRONOUS = [
    declared(
        "megatron.schedule_async_request", ASYNC, "AsyncCallsQueue.schedule_async_request",
        _late("dist_checkpointing.async_queue:schedule", of_instance=True),
        parameters=("async_request",),
        why="the queue forks a process, or uses a worker process, for a save that already runs in a thread",
        until="AsyncCallsQueue takes a caller with the request",
    )
]  # fmt: skip


# ---------------------------------------------------------------- megatron.core.optimizer


def _optimizer(module: str, name: str, why: str) -> list[Hook]:
    """Return the hooks on both directions of an optimizer's state."""
    state = _late("dist_checkpointing.optimizer_hooks:hooked_state_dict", RUNTIME, of_instance=True)
    load = _late("dist_checkpointing.optimizer_hooks:hooked_load")
    return [
        declared(
            f"megatron.{name}.{method}", f"megatron.core.optimizer.{module}", f"{name}.{method}", wrapper,
            parameters=parameters, why=reason,
            until="sharded_state_dict has a model space type without a gather, the same for all optimizers",
        )
        for method, wrapper, parameters, reason in (
            ("sharded_state_dict", state, ("model_sharded_state_dict", "is_loading"), why),
            ("load_state_dict", load, ("state_dict",), f"reads only the form that {name} itself has described"),
        )
    ]  # fmt: skip


OPTIMIZER = [
    *_optimizer(
        "optimizer",
        "Float16OptimizerWithFloat16Params",
        "its state does not load into a distributed optimizer, nor the reverse",
    ),
    *_optimizer("optimizer", "FP32Optimizer", "its state has no master weights, and does not load into a bf16 optimizer"),
    *_optimizer("optimizer", "ChainedOptimizer", "prefixes keys with the position in the chain, which depends on the shape"),
]
DISTRIBUTED_OPTIMIZER = _optimizer(
    "distrib_optimizer", "DistributedOptimizer", "stores buckets of one parallel shape, or gathers them on one rank"
)
LAYER_WISE_OPTIMIZER = _optimizer(
    "layer_wise_optimizer", "LayerWiseDistributedOptimizer", "its state is tied to the distribution of parameters over ranks"
)


# ---------------------------------------------------------------- megatron.training


def _script(module: str, attribute: str, function: str, parameters: tuple[str, ...], why: str, *bound: Any) -> Hook:
    return declared(
        f"megatron-lm.{attribute}", f"megatron.training.{module}", attribute, _late(f"pretraining.{function}", *bound),
        parameters=parameters, why=why, until="--ckpt-format takes the name of a registered strategy",
    )  # fmt: skip


def _checkpointing(attribute: str, function: str, parameters: tuple[str, ...], why: str) -> Hook:
    return _script("checkpointing", attribute, function, parameters, why, RUNTIME)


ARGUMENTS = [
    _script("arguments", "add_megatron_arguments", "arguments:add_arguments", ("parser",), "--ckpt-format is a closed choice"),
    _script("arguments", "parse_args", "arguments:parse_arguments", (), "the scripts branch on the literal torch_dist"),
]
SCRIPTS = [
    _checkpointing("save_checkpoint", "scripts:save_checkpoint", ("iteration",), "an error of a save ends training"),
    _checkpointing(
        "load_checkpoint", "scripts:load_checkpoint", ("load_arg",),
        "loads one format only, and no older checkpoint if the newest is damaged",
    ),
    _checkpointing(
        "get_rng_state", "scripts:get_rng_state", ("ckpt_format",),
        "without experts, stores the generators of one data parallel rank only",
    ),
    _checkpointing(
        "get_checkpoint_name", "scripts:checkpoint_name", ("return_base_dir",),
        "knows iter_... directories only; other frameworks' checkpoints have other names",
    ),
    _checkpointing(
        "get_checkpoint_tracker_filename", "tracker_hooks:tracker_file", ("checkpoints_path",),
        "writes the tracker file when it polls a save, and takes what it says then for the checkpoint before",
    ),
    _checkpointing(
        "cleanup_old_non_persistent_checkpoint", "tracker_hooks:remove_old_non_persistent", ("save_dir", "leave_ckpt_num"),
        "counts a checkpoint that is still being written, and removes the complete one",
    ),
    _checkpointing(
        "find_checkpoint_rank_0", "scripts:first_file", ("checkpoints_path", "iteration"),
        "looks for files of Megatron's formats in the directory",
    ),
    _checkpointing(
        "_get_checkpoint_format", "scripts:checkpoint_format", ("checkpoint_name",),
        "recognises a directory by Megatron's metadata.json, which other frameworks do not write",
    ),
]  # fmt: skip
# Since 0.13. In 0.12 the sharding type is an argument of the optimizer's sharded_state_dict.
METADATA = [
    _checkpointing(
        "_build_sharded_state_dict_metadata", "scripts:sharding_metadata", ("args",),
        "chooses the sharding type of the optimizer from a closed set",
    )
]  # fmt: skip
EXIT = [
    declared(
        "megatron-lm.signals_received", "megatron.training.dist_signal_handler", "DistributedSignalHandler.signals_received",
        _late("pretraining.preemption:signals_received", RUNTIME, of_instance=True),
        why="an all_gather in every iteration, and the job ends with exit code 0, as after its last iteration",
        until="Megatron's exit handler agrees without a collective, and ends with an exit code of its own",
    )
]  # fmt: skip


OPTIONAL = [*precision.OPTIONAL, *step_hooks.HOOKS, step_hooks.MODEL]  # installed only if an option asks for them
NEEDED = [*CORE, *ASYNCHRONOUS, *OPTIMIZER, *DISTRIBUTED_OPTIMIZER, *LAYER_WISE_OPTIMIZER, *ARGUMENTS, *SCRIPTS]
DECLARED = [*NEEDED, *METADATA, *EXIT, *OPTIONAL]


def _install(group: list[Hook]) -> bool:
    return hooks.install(
        group, framework=FRAMEWORK, version=version(), verify=hooks.self_test("megatron_unickpt.self_test", FRAMEWORK)
    )


# ``unickpt.base.autoload`` calls these after the import of a module. The hooks on ``dist_checkpointing.serialization`` are
# installed before its package imports the functions by name.
install_core = partial(_install, CORE)
install_async = partial(_install, ASYNCHRONOUS)
install_optimizer = partial(_install, OPTIMIZER)
install_distributed_optimizer = partial(_install, DISTRIBUTED_OPTIMIZER)
install_layer_wise_optimizer = partial(_install, LAYER_WISE_OPTIMIZER)
install_arguments = partial(_install, ARGUMENTS)
install_exit = partial(_install, EXIT)  # alone: without it, Megatron's own handler acts


def install_parallel_state() -> bool:
    """Let a job time its collectives if the environment asks for it: libraries pass no flag on."""
    if not times():
        return False
    from megatron_unickpt.measuring import timing

    timing.begin_with_groups(TimingOptions(enabled=True))
    return True


def install_training() -> bool:
    import megatron.training.checkpointing as native

    return _install(SCRIPTS + (METADATA if hasattr(native, "_build_sharded_state_dict_metadata") else []))


def uninstall() -> None:
    """Restore Megatron's functions in the modules that define them. Modules that imported a name keep the hooked function."""
    hooks.uninstall(DECLARED)
