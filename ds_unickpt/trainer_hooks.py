"""The hooks on transformers, declared: ``resume_from_checkpoint=True`` takes the newest checkpoint that can be resumed.

Installed once DeepSpeed and ``transformers.trainer`` are both imported. They change nothing for a job whose DeepSpeed config
lacks the ``unickpt`` key.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from packaging.specifiers import SpecifierSet

from unickpt import hooks
from unickpt.hooks import Hook

logger = logging.getLogger("unickpt")

VERSIONS = SpecifierSet(">=4.50,<6")
TRAINER, UTILS, FUNCTION = "transformers.trainer", "transformers.trainer_utils", "get_last_checkpoint"
UPSTREAM = "https://github.com/huggingface/transformers/blob/main/src/transformers/trainer_utils.py"
UNTIL = "Trainer skips checkpoints that are not whole"

_calls = itertools.count()


def _in_trainer(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """Called by ``Trainer.train`` on every rank: the ranks agree."""
    newest = inspect.unwrap(wrapped)(*args, **kwargs)
    return newest if newest is None or not _enabled() else _agreed(os.path.dirname(newest))


def _in_script(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """Called by a user's script, perhaps on one rank only: each rank decides for itself, by the same rule."""
    newest = inspect.unwrap(wrapped)(*args, **kwargs)
    if newest is None or not _enabled():
        return newest
    from ds_unickpt import trainer_folders

    chosen = trainer_folders.choose(os.path.dirname(newest))
    _say(chosen.line())
    return chosen.folder


def _load_state(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """``TrainerState.load_from_json``: of a folder that was named and is not whole, the error names one that is."""
    try:
        return wrapped(*args, **kwargs)
    except (OSError, ValueError) as err:
        from ds_unickpt import trainer_folders
        from unickpt.errors import NotACheckpointError

        path = inspect.signature(wrapped).bind(*args, **kwargs).arguments.get("json_path")
        folder = os.path.dirname(path) if isinstance(path, str) else ""
        if not _enabled() or not trainer_folders.is_one(folder) or not os.path.isdir(folder):
            raise
        reason = trainer_folders.unusable(folder)
        if not reason:
            raise
        raise NotACheckpointError(f"{folder} cannot be resumed: {reason}. {trainer_folders.advice(folder)}") from err


_SCRIPT = Hook(
    name="transformers.get_last_checkpoint",
    module=UTILS,
    attribute=FUNCTION,
    wrapper=_in_script,
    versions=VERSIONS,
    fingerprints=frozenset({"652647a3fcc8"}),
    why="it returns the folder with the highest number, whether or not its save has finished",
    upstream=UPSTREAM,
    until=UNTIL,
)
HOOKS = [
    _SCRIPT,
    replace(
        _SCRIPT,
        name="transformers.trainer.get_last_checkpoint",
        module=TRAINER,
        wrapper=_in_trainer,
        why="Trainer imports it by name and reads its own state from that folder before DeepSpeed reads anything",
    ),
    Hook(
        name="transformers.load_trainer_state",
        module="transformers.trainer_callback",
        attribute="TrainerState.load_from_json",
        wrapper=_load_state,
        versions=VERSIONS,
        fingerprints=frozenset(),
        parameters=("json_path",),
        why="a folder without trainer_state.json ends in FileNotFoundError, with no word of the whole one beside it",
        upstream="https://github.com/huggingface/transformers/blob/main/src/transformers/trainer_callback.py",
        until=UNTIL,
    ),
]


def install() -> bool:
    """Hook into the imported transformers; on a version that is not known, say so and leave it alone."""
    import transformers

    return hooks.install([*HOOKS, *_holders()], framework="transformers", version=transformers.__version__)


def uninstall() -> None:
    """Give transformers its own functions back."""
    names = {hook.name for hook in HOOKS}
    hooks.uninstall([status.hook for status in hooks.status() if status.hook.name.split(" in ")[0] in names])


def _holders() -> list[Hook]:
    """Modules of the user's that imported the function by name before it was hooked."""
    original = vars(sys.modules[UTILS]).get(FUNCTION)
    found = {  # by module, because one may have two names, as __main__ and __mp_main__
        id(module): name
        for name, module in list(sys.modules.items())
        if original is not None and name not in (UTILS, TRAINER) and getattr(module, "__dict__", {}).get(FUNCTION) is original
    }
    return [replace(_SCRIPT, name=f"{_SCRIPT.name} in {name}", module=name) for name in found.values()]


def _enabled() -> bool:
    """Whether this job's DeepSpeed config, as transformers holds it, asks for unickpt and for falling back."""
    from ds_unickpt.config import read_options
    from unickpt.errors import ConfigError

    module = sys.modules.get("transformers.integrations.deepspeed")
    config = None if module is None else module.deepspeed_config()
    try:
        options = None if config is None else read_options(config)
    except ConfigError:  # raised again, and shown, when the engine is made
        return False
    return options is not None and options.enabled and options.fall_back


def _agreed(output_dir: str) -> str | None:
    """The folder that rank 0 chooses, on every rank."""
    import torch

    from ds_unickpt import internals, trainer_folders
    from unickpt.coordination import Rendezvous
    from unickpt.load.failure import Failure, error_of, failure_of

    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if initialized else (0, 1)
    store = internals.default_store() if world > 1 else None
    meet = Rendezvous(store, rank=rank, world=world, prefix=f"unickpt/trainer/{next(_calls)}")
    word: dict[str, Any] | None = None
    if rank == 0:
        try:
            word = {"failure": None, **asdict(trainer_folders.choose(output_dir))}
        except Exception as err:  # the other ranks wait for this one's word
            word = {"failure": failure_of(err, rank=0, where=output_dir).to_message()}
    told = meet.broadcast("folder", word)
    if told["failure"] is not None:
        raise error_of([Failure.from_message(told["failure"])], where=output_dir, what="finds nothing to resume from")
    chosen = trainer_folders.Chosen(told["folder"], tuple((folder, reason) for folder, reason in told["passed_over"]))
    if rank == 0:
        _say(chosen.line())
    return chosen.folder


def _say(line: str) -> None:
    from unickpt.logs import make_visible

    if line:
        make_visible()
        logger.warning("unickpt: %s", line)
