"""Declarations of the hooks in DeepSpeed's engine. No other module of this package assigns to a DeepSpeed module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ds_unickpt.batch import batch_hooks
from ds_unickpt.compressing import compression_hooks
from ds_unickpt.edge import RUNTIME
from ds_unickpt.framework import settling
from ds_unickpt.framework.declaration import declared
from ds_unickpt.framework.versions import ENGINE, SOURCE, version
from ds_unickpt.runtime import EngineRuntime
from ds_unickpt.saving import hints
from ds_unickpt.trainer import trainer_hooks
from ds_unickpt.witnessing import step_hooks
from unickpt.base import hooks
from unickpt.base.autoload import watch
from unickpt.base.hooks import Hook

if TYPE_CHECKING:
    from ds_unickpt.checkpoint_engine import UnickptCheckpointEngine
    from unickpt.base.options.job import Options

FRAMEWORK = "DeepSpeed"
UPSTREAM = f"{SOURCE}deepspeed/runtime/checkpoint_engine/utils.py"
UNTIL = "DeepSpeed has a registry of checkpoint engines that receive the engine"


def _configure(runtime: EngineRuntime, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    from ds_unickpt.batch.config import valid_options
    from ds_unickpt.checkpoint_engine import ours_of
    from ds_unickpt.engine import adopt
    from ds_unickpt.framework import internals

    result = wrapped(*args, **kwargs)
    if hooks.unsettled(FRAMEWORK) and not _settled(runtime, instance, valid_options(internals.config_of(instance))):
        return result
    adopt(runtime, instance)
    if ours_of(instance) is not None:  # not at the first load: a rank that cannot import then leaves the others waiting
        import ds_unickpt.loading.load_checkpoint
        import ds_unickpt.saving.save_checkpoint  # noqa: F401
    return result


def _settled(runtime: EngineRuntime, engine: Any, options: Options | None) -> bool:
    """Run the self-test of the hooks if the engine uses them. Returns whether it can, which is the same on all ranks."""
    from unickpt.base.logs import make_visible

    if options is None or not options.enabled:
        return True

    def agree(reason: str) -> str:
        exchange = runtime.engine_exchange(engine, timeout_s=options.timeout_seconds)
        exchange.begin("self-test")
        return next(iter(exchange.agree("self-test", reason or None).values()), "")

    make_visible()
    return not hooks.settle(FRAMEWORK, agree)


def _save(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    from ds_unickpt.saving.save_checkpoint import save_checkpoint

    return save_checkpoint(wrapped, instance, *args, **kwargs)


def _load(runtime: EngineRuntime, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    from ds_unickpt.loading.load_checkpoint import load_checkpoint

    return load_checkpoint(partial(_reader, runtime), wrapped, instance, *args, **kwargs)


def _reader(runtime: EngineRuntime, engine: Any, load_dir: Any, tag: Any) -> UnickptCheckpointEngine | None:
    """Return what loads a unickpt checkpoint into an engine without the ``unickpt`` key; None if DeepSpeed loads."""
    from ds_unickpt.loading import recognised

    checkpoint = recognised.checkpoint_for(engine, load_dir, tag)
    if not checkpoint:
        return None
    options = recognised.options_of(engine)
    if hooks.unsettled(FRAMEWORK) and not _settled(runtime, engine, options):
        return None
    return recognised.reader(runtime, engine, options, checkpoint)


def _start_timing(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Start timing before the first collectives of an engine.

    The other ranks wait there for a rank that hangs on its way to ``deepspeed.initialize``, such as in the load of its model.
    """
    from ds_unickpt.batch.config import valid_options
    from ds_unickpt.framework import internals

    options = valid_options(internals.config_of(instance))
    if options is not None and options.timing.enabled:  # imported only then
        from unickpt.base.logs import make_visible
        from unickpt.diagnosis import session

        make_visible()
        session.start(options.timing, lambda: internals.process_groups(instance))
    return wrapped(*args, **kwargs)


def _engine(name: str, method: str, wrapper: Callable[..., Any], why: str) -> Hook:
    """Return a hook that replaces a method of the engine for jobs with the ``unickpt`` key, and for their checkpoints."""
    return declared(
        f"deepspeed.{name}", ENGINE, f"DeepSpeedEngine.{method}", wrapper, why=why, until=UNTIL, strict=True, upstream=UPSTREAM
    )


HOOKS = [
    _engine(
        "configure",
        "_configure_checkpointing",
        partial(_configure, RUNTIME),
        "create_checkpoint_engine selects an engine in an if-chain, without a registry or an entry point",
    ),
    _engine(
        "save",
        "save_checkpoint",
        _save,
        "a checkpoint engine receives (state_dict, path) only, not the parameters that a flat partition holds",
    ),
    _engine(
        "load",
        "load_checkpoint",
        partial(_load, RUNTIME),
        "load_checkpoint refuses another world size before it calls a checkpoint engine",
    ),
]
TIMING = declared(
    "deepspeed.timing.start",
    ENGINE,
    "DeepSpeedEngine._configure_distributed_model",
    _start_timing,
    strict=False,
    why="no callback before the first collectives of an engine",
    until="DeepSpeed has callbacks for the phases of a step",
)
BESIDE = [batch_hooks.HOOK, TIMING]  # alone: without them, the job saves and loads all the same
OPTIONAL = [*compression_hooks.HOOKS, *settling.HOOKS, *step_hooks.HOOKS]  # installed only if an option asks for them
NEEDED = [*HOOKS, *trainer_hooks.HOOKS]  # all of a framework, or unickpt does not act in it
DECLARED = [*HOOKS, *BESIDE, *OPTIONAL, *hints.HOOKS, *trainer_hooks.HOOKS, trainer_hooks.MEMORY]


def install() -> bool:
    """Install the hooks in DeepSpeed, and return whether. A version that they do not fit keeps its own functions."""
    verify = hooks.self_test("ds_unickpt.self_tests.engine", FRAMEWORK)
    installed = hooks.install(HOOKS, framework=FRAMEWORK, version=version(), verify=verify)
    if installed:
        for hook in BESIDE:
            hooks.install([hook], framework=FRAMEWORK, version=version(), verify=verify, lost=hook.why)
        hints.install_fp32()
        hints.explain_uncaught(sys.orig_argv)
        watch(
            {
                hints.CONVERTER: "ds_unickpt.saving.hints:install_converter",
                trainer_hooks.TRAINER: "ds_unickpt.trainer.trainer_hooks:install",
            }
        )
    return installed


def uninstall() -> None:
    """Restore the functions of DeepSpeed and transformers."""
    trainer_hooks.uninstall()
    hooks.uninstall([*HOOKS, *BESIDE, *OPTIONAL, *hints.HOOKS])
