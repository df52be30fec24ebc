"""The hooks on Megatron, declared. Nothing else in this package assigns to a Megatron module.

They come in groups, each when its module has been imported (``unickpt.autoload.MEGATRON``). All of
them look at their arguments, do our work where it is asked for, and otherwise call through.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from packaging.specifiers import SpecifierSet

from unickpt import hooks
from unickpt.hooks import Hook

VERSIONS = SpecifierSet(">=0.12.0,<0.21")
SERIALIZATION = "megatron.core.dist_checkpointing.serialization"
ASYNC = "megatron.core.dist_checkpointing.strategies.async_utils"
TRAINING = "megatron.training.checkpointing"
_CORE_URL = "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core"
_TRAINING_URL = "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training"


def _arguments(wrapped: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The call's arguments by name, defaults included."""
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


# ---------------------------------------------------------------- megatron.core.dist_checkpointing


def _save(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    given = _arguments(wrapped, args, kwargs)
    strategy = given["sharded_strategy"]
    from megatron_unickpt import job, saving, strategies

    inner = strategies.unwrap(strategy)
    scripts = sys.modules.get("megatron_unickpt.training")
    if strategy == (job.BACKEND, job.VERSION) or (scripts is not None and scripts.in_a_save()):
        inner = strategies.UnickptSaveStrategy()
    if not isinstance(inner, strategies.UnickptSaveStrategy):
        return wrapped(*args, **kwargs)
    return saving.save(
        given["sharded_state_dict"],
        given["checkpoint_dir"],
        content_metadata=given.get("content_metadata"),
        asynchronous=given["async_sharded_save"],
        validate_access_integrity=given["validate_access_integrity"],
        preprocess_common=given.get("preprocess_common_before_consistancy_check"),
        share=inner.share,
    )


def _load(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron_unickpt import job, loading

    given = _arguments(wrapped, args, kwargs)
    if not job.recognises(given["checkpoint_dir"]):
        return wrapped(*args, **kwargs)
    return loading.load(
        given["sharded_state_dict"],
        given["checkpoint_dir"],
        validate_access_integrity=given["validate_access_integrity"],
        strict=given["strict"],
    )


def _by_directory(name: str) -> Callable[..., Any]:
    """A function whose first argument is the directory: ours if that is a unickpt checkpoint."""

    def wrapper(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        from megatron_unickpt import job, metadata

        given = _arguments(wrapped, args, kwargs)
        if not job.recognises(given["checkpoint_dir"]):
            return wrapped(*args, **kwargs)
        own = getattr(metadata, name)
        return own(given["checkpoint_dir"], *([given["key_prefix"]] if "key_prefix" in given else []))

    return wrapper


def _default_save(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron_unickpt import job, strategies

    if _arguments(wrapped, args, kwargs)["backend"] == job.BACKEND:
        return strategies.UnickptSaveStrategy()
    return wrapped(*args, **kwargs)


def _default_load(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron_unickpt import job, strategies

    if job.recognises(_arguments(wrapped, args, kwargs)["checkpoint_dir"]):
        return strategies.UnickptLoadStrategy()
    return wrapped(*args, **kwargs)


def _core(attribute: str, wrapper: Callable[..., Any], parameters: tuple[str, ...], why: str) -> Hook:
    return Hook(
        name=f"megatron.{attribute}", module=SERIALIZATION, attribute=attribute, wrapper=wrapper, versions=VERSIONS,
        fingerprints=frozenset(), parameters=parameters, why=why, upstream=f"{_CORE_URL}/dist_checkpointing/serialization.py",
        until="dist_checkpointing lets a strategy save the common state, and has its registry of strategies again",
    )  # fmt: skip


_DIRECTORY = "the development branch finds a directory's strategy in no registry"
CORE = [
    _core(
        "save", _save,
        ("sharded_state_dict", "checkpoint_dir", "sharded_strategy", "validate_access_integrity", "async_sharded_save"),
        "save takes no strategy for the common state: it would be pickled",
    ),
    _core("load", _load, ("sharded_state_dict", "checkpoint_dir", "validate_access_integrity", "strict"), _DIRECTORY),
    _core("load_common_state_dict", _by_directory("load_common_state_dict"), ("checkpoint_dir",), _DIRECTORY),
    _core("load_tensors_metadata", _by_directory("load_tensors_metadata"), ("checkpoint_dir",), _DIRECTORY),
    _core("load_sharded_metadata", _by_directory("load_sharded_metadata"), ("checkpoint_dir",), _DIRECTORY),
    _core("remove_sharded_tensors", _by_directory("remove_sharded_tensors"), ("checkpoint_dir", "key_prefix"), _DIRECTORY),
    _core("get_default_save_sharded_strategy", _default_save, ("backend",), _DIRECTORY),
    _core("get_default_load_sharded_strategy", _default_load, ("checkpoint_dir",), _DIRECTORY),
]  # fmt: skip


# ---------------------------------------------------------------- asynchronous saves


def _schedule(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron_unickpt import asynchronous

    return asynchronous.schedule(wrapped, instance, *args, **kwargs)


ASYNCHRONOUS = [
    Hook(
        name="megatron.schedule_async_request", module=ASYNC, attribute="AsyncCallsQueue.schedule_async_request",
        wrapper=_schedule, versions=VERSIONS, fingerprints=frozenset(), parameters=("async_request",),
        why="the queue would fork a process, or feed a worker, for work that already goes on in a thread",
        upstream=f"{_CORE_URL}/dist_checkpointing/strategies/async_utils.py",
        until="AsyncCallsQueue takes a caller with the request",
    )
]  # fmt: skip


# ---------------------------------------------------------------- megatron.core.optimizer


def _optimizer_state(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron_unickpt import optimizer_hooks

    return optimizer_hooks.sharded_state_dict(wrapped, instance, *args, **kwargs)


def _optimizer_load(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron_unickpt import optimizer_hooks

    return optimizer_hooks.load_state_dict(wrapped, instance, *args, **kwargs)


def _optimizer(module: str, *classes: str) -> list[Hook]:
    return [
        Hook(
            name=f"megatron.{name}.{method}", module=f"megatron.core.optimizer.{module}", attribute=f"{name}.{method}",
            wrapper=wrapper, versions=VERSIONS, fingerprints=frozenset(), parameters=parameters,
            why="the wrappers describe their state in ways that do not fit each other, or another model parallel shape",
            upstream=f"{_CORE_URL}/optimizer/{module}.py",
            until="sharded_state_dict has a model space type that needs no gather, the same for all optimizers",
        )
        for name in classes
        for method, wrapper, parameters in (
            ("sharded_state_dict", _optimizer_state, ("model_sharded_state_dict", "is_loading")),
            ("load_state_dict", _optimizer_load, ("state_dict",)),
        )
    ]  # fmt: skip


OPTIMIZER = _optimizer("optimizer", "Float16OptimizerWithFloat16Params", "FP32Optimizer", "ChainedOptimizer")
DISTRIBUTED_OPTIMIZER = _optimizer("distrib_optimizer", "DistributedOptimizer")
LAYER_WISE_OPTIMIZER = _optimizer("layer_wise_optimizer", "LayerWiseDistributedOptimizer")


# ---------------------------------------------------------------- megatron.training


def _training(name: str) -> Callable[..., Any]:
    def wrapper(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        from megatron_unickpt import training

        return getattr(training, name)(wrapped, *args, **kwargs)

    return wrapper


def _script(module: str, attribute: str, name: str, parameters: tuple[str, ...], why: str) -> Hook:
    return Hook(
        name=f"megatron-lm.{attribute}", module=f"megatron.training.{module}", attribute=attribute, wrapper=_training(name),
        versions=VERSIONS, fingerprints=frozenset(), parameters=parameters, why=why, upstream=f"{_TRAINING_URL}/{module}.py",
        until="--ckpt-format takes the name of a registered strategy",
    )  # fmt: skip


ARGUMENTS = [
    _script("arguments", "add_megatron_arguments", "add_arguments", ("parser",), "--ckpt-format is a closed choice"),
    _script("arguments", "parse_args", "parse_arguments", (), "the scripts branch on the literal torch_dist"),
]
SCRIPTS = [
    _script("checkpointing", "save_checkpoint", "save_checkpoint", ("iteration",), "a failed save must not end training"),
    _script("checkpointing", "load_checkpoint", "load_checkpoint", ("load_arg",), "formats by directory; damaged ones; RNG"),
    _script("checkpointing", "get_rng_state", "get_rng_state", ("ckpt_format",), "states of all data parallel ranks"),
    _script("checkpointing", "get_checkpoint_name", "checkpoint_name", ("return_base_dir",), "tags are no iter_..."),
    _script("checkpointing", "find_checkpoint_rank_0", "first_file", ("checkpoints_path", "iteration"), "the same"),
    _script("checkpointing", "_get_checkpoint_format", "checkpoint_format", ("checkpoint_name",), "they lack Megatron's mark"),
]  # fmt: skip
# Since 0.13; before, the sharding type is an argument of the optimizer's sharded_state_dict.
METADATA = [
    _script("checkpointing", "_build_sharded_state_dict_metadata", "sharding_metadata", ("args",), "chooses the sharding type")
]


DECLARED = [
    *CORE, *ASYNCHRONOUS, *OPTIMIZER, *DISTRIBUTED_OPTIMIZER, *LAYER_WISE_OPTIMIZER, *ARGUMENTS, *SCRIPTS, *METADATA,
]  # fmt: skip


def version() -> str:
    """Of the installed megatron-core; the training scripts come in the same tree."""
    from megatron.core.package_info import __version__

    return str(__version__)


def _install(group: list[Hook]) -> bool:
    return hooks.install(group, framework="Megatron", version=version())


def install_core() -> bool:
    """After ``dist_checkpointing.serialization`` was imported, before the package takes its functions from it."""
    return _install(CORE)


def install_async() -> bool:
    return _install(ASYNCHRONOUS)


def install_optimizer() -> bool:
    return _install(OPTIMIZER)


def install_distributed_optimizer() -> bool:
    return _install(DISTRIBUTED_OPTIMIZER)


def install_layer_wise_optimizer() -> bool:
    return _install(LAYER_WISE_OPTIMIZER)


def install_arguments() -> bool:
    return _install(ARGUMENTS)


def install_training() -> bool:
    import megatron.training.checkpointing as native

    return _install(SCRIPTS + (METADATA if hasattr(native, "_build_sharded_state_dict_metadata") else []))


def uninstall() -> None:
    """Give Megatron its own functions back (in the modules that hold them; names imported elsewhere keep ours)."""
    hooks.uninstall(DECLARED)
