"""Declarations of the hooks on transformers.

``resume_from_checkpoint=True`` selects the newest usable checkpoint. A job that torchrun starts again resumes without this
argument, and keeps its global batch on another number of ranks.

They are installed when both DeepSpeed and ``transformers.trainer`` are imported. They do not change a job whose DeepSpeed
configuration lacks the ``unickpt`` key.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from ds_unickpt.edge import RUNTIME
from ds_unickpt.framework.declaration import declared
from ds_unickpt.runtime import EngineRuntime
from unickpt.base import hooks
from unickpt.base.hooks import Hook
from unickpt.base.logs import logger
from unickpt.base.options.job import Options
from unickpt.base.step_replay import asked
from unickpt.base.switch import asks

if TYPE_CHECKING:
    from ds_unickpt.loops.trainer_folders import ResumeFolder
    from unickpt.checkpoint.coordination.message_exchange import MessageExchange


FRAMEWORK, LOST = "transformers", "Trainer resumes from the folder with the highest number, also where a save has not finished"
VERSIONS = SpecifierSet(">=4.50,<6")
TRAINER, UTILS, FUNCTION = "transformers.trainer", "transformers.trainer_utils", "get_last_checkpoint"
SOURCE = "https://github.com/huggingface/transformers/blob/main/src/transformers/"
UNTIL = "Trainer skips incomplete checkpoints"


def _in_trainer(runtime: EngineRuntime, wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """Wrap the call in ``Trainer.train``, which every rank makes. The ranks agree on the folder."""
    if repeated := _repeated(wrapped, args, kwargs):
        return repeated
    newest = inspect.unwrap(wrapped)(*args, **kwargs)
    options = _options()
    if options is None or not (options.memory.to_disk_every or (newest is not None and options.fall_back)):
        return newest
    from ds_unickpt.loops import trainer_folders

    folder = str(inspect.signature(wrapped).bind(*args, **kwargs).arguments["folder"])
    choose = partial(trainer_folders.choose, folder) if options.fall_back else partial(trainer_folders.ResumeFolder, newest)
    return _newest(runtime, folder, options, choose)


def _repeated(wrapped: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """Return the folder of the step that ``unickpt replay-step`` repeats; '' if it repeats none. Each rank finds it."""
    if asked() is None:
        return ""
    from unickpt.checkpoint.load.replayed import replayed_folder

    return replayed_folder(str(inspect.signature(wrapped).bind(*args, **kwargs).arguments["folder"]))


def _newest(runtime: EngineRuntime, output_dir: str, options: Options, choose: Callable[[], ResumeFolder]) -> str | None:
    """Return the folder to resume from, on disk or in the memory of the hosts. Every rank calls this.

    Raises:
        UnickptError: all checkpoints on disk are damaged, and none is in memory. All ranks raise it.
    """
    from unickpt.base.errors import UnickptError

    exchange = runtime.trainer_exchange()
    if not options.memory.to_disk_every:
        return _agreed(exchange, output_dir, choose)
    from ds_unickpt import checkpoint_engine
    from ds_unickpt.trainer import trainer_resume

    folder, error = None, None
    try:
        folder = _agreed(exchange, output_dir, choose)
    except UnickptError as err:
        error = err
    if runtime.memory is None:
        runtime.memory = checkpoint_engine.tier_of(options)
    found = trainer_resume.newer_in_memory(
        runtime.memory, exchange, os.path.abspath(output_dir), folder, trainer_resume.step_on_disk
    )
    if not found and error is not None:
        raise error
    return found or folder


def _save(wrapped: Callable[..., Any], trainer: Any, args: Any, kwargs: Any) -> Any:
    """Wrap ``Trainer._save_checkpoint``, which every rank calls."""
    options = _options() if getattr(trainer, "is_deepspeed_enabled", False) else None
    if options is None or not options.memory.to_disk_every:
        return wrapped(*args, **kwargs)
    from ds_unickpt.trainer import trainer_memory

    trial = inspect.signature(wrapped).bind(*args, **kwargs).arguments.get("trial")
    return trainer_memory.save_checkpoint(partial(wrapped, *args, **kwargs), trainer, trial)


def _in_script(runtime: EngineRuntime, wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """Wrap the call in a user's script, which one rank alone may make. Each rank selects the folder by the same rule."""
    if repeated := _repeated(wrapped, args, kwargs):
        return repeated
    newest = inspect.unwrap(wrapped)(*args, **kwargs)
    if newest is None or not _enabled():
        return newest
    from ds_unickpt.loops import trainer_folders

    chosen = trainer_folders.choose(os.path.dirname(newest))
    _say(chosen.line())
    runtime.script_found = chosen.folder
    return chosen.folder


def _load_state(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """Wrap ``TrainerState.load_from_json``. For an incomplete folder the error names one that can be resumed."""
    try:
        return wrapped(*args, **kwargs)
    except (OSError, ValueError) as err:
        from ds_unickpt.loops import trainer_folders
        from unickpt.base.errors import NotACheckpointError

        path = inspect.signature(wrapped).bind(*args, **kwargs).arguments.get("json_path")
        folder = os.path.dirname(path) if isinstance(path, str) else ""
        if not _enabled() or not folder:
            raise
        reason = "there is no such folder"
        if os.path.isdir(folder):
            reason = trainer_folders.unusable(folder) if trainer_folders.is_one(folder) else ""
        if not reason:
            raise
        raise NotACheckpointError(f"{folder} cannot be resumed: {reason}. {trainer_folders.advice(folder)}") from err


def _keep_batch(runtime: EngineRuntime, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrap ``HfTrainerDeepSpeedConfig.trainer_config_process``, which copies the arguments into the configuration."""
    given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    if asks(instance.config) and not given.get("auto_find_batch_size"):
        from ds_unickpt.trainer import trainer_steering

        runtime.reads_batch |= trainer_steering.keep_batch(instance.config, given["args"])
    return wrapped(*args, **kwargs)


def _train(runtime: EngineRuntime, wrapped: Callable[..., Any], trainer: Any, args: Any, kwargs: Any) -> Any:
    """Wrap ``Trainer.train``, which every rank calls."""
    config = _config()
    if config is None or not asks(config) or not getattr(trainer, "is_deepspeed_enabled", False):
        return wrapped(*args, **kwargs)
    from ds_unickpt.trainer import trainer_steering

    options = _options()
    if options is None:
        return wrapped(*args, **kwargs)
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    given, output_dir = trainer_steering.meant(bound.arguments.get("resume_from_checkpoint")), trainer.args.output_dir
    bound.arguments["resume_from_checkpoint"] = given
    if given is None and trainer_steering.resumes(options):
        chosen = partial(trainer_steering.newest, output_dir, fall_back=options.fall_back)
        folder = _newest(runtime, output_dir, options, chosen)
        if folder is not None and trainer.args.process_index == 0:
            _say(f"no checkpoint is named: resuming from {folder}, the newest one", logging.INFO)
        bound.arguments["resume_from_checkpoint"] = folder
    elif isinstance(given, str) and options.memory.to_disk_every and options.fall_back and _found_by_script(runtime, given):
        chosen = partial(trainer_steering.newest, output_dir, fall_back=True)
        bound.arguments["resume_from_checkpoint"] = _newest(runtime, output_dir, options, chosen)
    elif trainer.args.process_index == 0:
        _say(trainer_steering.remark(options, given, output_dir))
    return wrapped(*bound.args, **bound.kwargs)


def _found_by_script(runtime: EngineRuntime, given: str) -> bool:
    """Whether rank 0 has this folder from ``get_last_checkpoint``, so that the newest checkpoint is meant. Collective."""
    exchange = runtime.trainer_exchange()
    found = {"found": given == runtime.script_found} if exchange.rank == 0 else None
    return bool(exchange.broadcast("found-by-script", found)["found"])


_SCRIPT = declared(
    "transformers.get_last_checkpoint", UTILS, FUNCTION, partial(_in_script, RUNTIME),
    why="it returns the folder with the highest number, whether or not its save has finished",
    until=UNTIL, strict=True, upstream=f"{SOURCE}trainer_utils.py", versions=VERSIONS,
)  # fmt: skip
HOOKS = [
    _SCRIPT,
    replace(
        _SCRIPT, name="transformers.trainer.get_last_checkpoint", module=TRAINER, wrapper=partial(_in_trainer, RUNTIME),
        why="Trainer imports it by name and reads its own state from that folder before DeepSpeed reads anything",
    ),
    declared(
        "transformers.load_trainer_state", "transformers.trainer_callback", "TrainerState.load_from_json", _load_state,
        why="for a folder without trainer_state.json it raises FileNotFoundError, which names no folder that can be resumed",
        until=UNTIL, strict=False, upstream=f"{SOURCE}trainer_callback.py", versions=VERSIONS, parameters=("json_path",),
    ),
    declared(
        "transformers.batch", "transformers.integrations.deepspeed", "HfTrainerDeepSpeedConfig.trainer_config_process",
        partial(_keep_batch, RUNTIME),
        why="on another number of ranks the same arguments give another global batch, and Trainer's position in the data, "
        "its learning rate and its total steps count batches",
        until="Trainer keeps the global batch of a checkpoint on another number of ranks",
        strict=False, upstream=f"{SOURCE}integrations/deepspeed.py", versions=VERSIONS, parameters=("args",),
    ),
    declared(
        "transformers.train", TRAINER, "Trainer.train", partial(_train, RUNTIME),
        why="torchrun starts a job again with the same command line, and Trainer then starts from the beginning",
        until="Trainer resumes by itself after a restart by torchrun",
        strict=False, upstream=f"{SOURCE}trainer.py", versions=VERSIONS, parameters=("resume_from_checkpoint",),
    ),
]  # fmt: skip
MEMORY = declared(
    "transformers.save", TRAINER, "Trainer._save_checkpoint", _save,
    why="it writes each checkpoint to a folder on disk, with further files that belong to the checkpoint",
    until="Trainer has a function that returns the files of a checkpoint",
    strict=True, upstream=f"{SOURCE}trainer.py", versions=VERSIONS, parameters=("trial",),
)  # fmt: skip


def install() -> bool:
    """Install the hooks in transformers. A version that they do not fit keeps its own functions, with one warning."""
    import transformers

    version = transformers.__version__
    verify = hooks.self_test("ds_unickpt.self_tests.trainer", FRAMEWORK)
    installed = hooks.install([*HOOKS, *_holders()], framework=FRAMEWORK, version=version, verify=verify, lost=LOST)
    if installed:  # alone: without it, saves of Trainer go to disk
        hooks.install([MEMORY], framework=FRAMEWORK, version=version, verify=verify, lost="no checkpoints in memory")
    return installed


def uninstall() -> None:
    """Restore the functions of transformers."""
    names = {hook.name for hook in (*HOOKS, MEMORY)}
    hooks.uninstall([status.hook for status in hooks.status() if status.hook.name.split(" in ")[0] in names])


def _holders() -> list[Hook]:
    """Return a hook for each module of the user that imported the function by name before it was hooked."""
    original = vars(sys.modules[UTILS]).get(FUNCTION)
    found = {  # by id, because a module may have two names, such as __main__ and __mp_main__
        id(module): name
        for name, module in list(sys.modules.items())
        if original is not None and name not in (UTILS, TRAINER) and getattr(module, "__dict__", {}).get(FUNCTION) is original
    }
    return [replace(_SCRIPT, name=f"{_SCRIPT.name} in {name}", module=name) for name in found.values()]


def _enabled() -> bool:
    """Whether this job's DeepSpeed configuration, which transformers holds, enables unickpt and ``fall_back``."""
    options = _options()
    return options is not None and options.fall_back


def _options() -> Options | None:
    """Return the options of this job's DeepSpeed configuration, which transformers holds; None if unickpt is off."""
    config = _config()
    if config is None or not asks(config):
        return None
    from ds_unickpt.trainer import trainer_steering

    options = trainer_steering.options_of(config)
    return None if options is None or hooks.settle(FRAMEWORK) else options


def _config() -> Any:
    """Return the DeepSpeed configuration that transformers holds, or None."""
    module = sys.modules.get("transformers.integrations.deepspeed")
    return None if module is None else module.deepspeed_config()


def _agreed(exchange: MessageExchange, output_dir: str, choose: Callable[[], ResumeFolder]) -> str | None:
    """Return the folder that rank 0 chooses by ``choose``, on every rank.

    Raises:
        UnickptError: rank 0 failed. All ranks raise its error.
    """
    from ds_unickpt.loops import trainer_folders
    from unickpt.checkpoint.coordination.failure import Failure
    from unickpt.checkpoint.load.failure import error_of, failure_of

    message: dict[str, Any] | None = None
    if exchange.rank == 0:
        try:
            message = {"failure": None, **asdict(choose())}
        except Exception as err:  # the other ranks wait for this message
            message = {"failure": failure_of(err, rank=0, where=output_dir).to_json()}
    choice = exchange.broadcast("folder", message)
    if choice["failure"] is not None:
        raise error_of([Failure.from_json(choice["failure"])], where=output_dir, what="finds nothing to resume from")
    passed_over = tuple((folder, reason) for folder, reason in choice["passed_over"])
    chosen = trainer_folders.ResumeFolder(choice["folder"], passed_over)
    if exchange.rank == 0:
        _say(chosen.line())
    return chosen.folder


def _say(line: str, level: int = logging.WARNING) -> None:
    from unickpt.base.logs import make_visible

    if line:
        make_visible()
        logger.log(level, "unickpt: %s", line)
