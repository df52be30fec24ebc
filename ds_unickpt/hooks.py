"""The hooks on DeepSpeed, declared. Nothing else in this package assigns to a DeepSpeed module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packaging.specifiers import SpecifierSet

from ds_unickpt import hints, trainer_hooks
from unickpt import hooks
from unickpt.autoload import watch
from unickpt.hooks import Hook

VERSIONS = SpecifierSet(">=0.17.0,<0.20")
ENGINE = "deepspeed.runtime.engine"
UPSTREAM = "https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/checkpoint_engine/utils.py"
UNTIL = "DeepSpeed has a registry of checkpoint engines that see the engine, not only (state_dict, path)"


def _configure(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    from ds_unickpt.engine import adopt

    result = wrapped(*args, **kwargs)
    adopt(instance)
    return result


def _save(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    from ds_unickpt.engine import save_checkpoint

    return save_checkpoint(wrapped, instance, *args, **kwargs)


def _load(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    from ds_unickpt.load import load_checkpoint

    return load_checkpoint(wrapped, instance, *args, **kwargs)


HOOKS = [
    Hook(
        name="deepspeed.configure",
        module=ENGINE,
        attribute="DeepSpeedEngine._configure_checkpointing",
        wrapper=_configure,
        versions=VERSIONS,
        fingerprints=frozenset({"05231fd69ed9", "a3ffb260c85d", "e5638865d837"}),
        why="create_checkpoint_engine chooses in a closed if-chain: no registry, no entry point",
        upstream=UPSTREAM,
        until=UNTIL,
    ),
    Hook(
        name="deepspeed.save",
        module=ENGINE,
        attribute="DeepSpeedEngine.save_checkpoint",
        wrapper=_save,
        versions=VERSIONS,
        fingerprints=frozenset({"85ed64e26862", "7713b1f2cbee", "1aeaee6c21f5", "f46deab9e085", "2d2899f240c8"}),
        why="a checkpoint engine sees (state_dict, path) only, not which parameter a flat partition belongs to",
        upstream=UPSTREAM,
        until=UNTIL,
    ),
    Hook(
        name="deepspeed.load",
        module=ENGINE,
        attribute="DeepSpeedEngine.load_checkpoint",
        wrapper=_load,
        versions=VERSIONS,
        fingerprints=frozenset({"551850db228f", "4a4e199b14f5", "dce692e2a74f"}),
        why="load_checkpoint refuses another world size before any checkpoint engine is asked",
        upstream=UPSTREAM,
        until=UNTIL,
    ),
]

DECLARED = [*HOOKS, *hints.HOOKS, *trainer_hooks.HOOKS]


def install() -> bool:
    """Hook into the installed DeepSpeed; on a version that is not known, say so and leave it alone."""
    from deepspeed.git_version_info import version

    installed = hooks.install(HOOKS, framework="DeepSpeed", version=version)
    if installed:
        hints.install_fp32()
        watch(
            {hints.CONVERTER: "ds_unickpt.hints:install_converter", trainer_hooks.TRAINER: "ds_unickpt.trainer_hooks:install"}
        )
    return installed


def uninstall() -> None:
    """Give DeepSpeed and transformers their own functions back."""
    trainer_hooks.uninstall()
    hooks.uninstall([*HOOKS, *hints.HOOKS])
