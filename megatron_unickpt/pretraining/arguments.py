"""Arguments of Megatron's training scripts: ``--ckpt-format unickpt`` and the ``--unickpt-...`` options.

``megatron.training.checkpointing`` branches on the literal ``torch_dist`` in many places. The parsed arguments therefore say
``torch_dist``, and an attribute ``unickpt`` of them selects unickpt.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_unickpt.framework.flags import add_flags, options_of
from megatron_unickpt.framework.marks import BACKEND
from megatron_unickpt.framework.versions import require_usable
from unickpt.base.errors import ConfigError
from unickpt.base.round_folder import note_saver
from unickpt.base.switch import switch
from unickpt.checkpoint.save import requests
from unickpt.checkpoint.save.requests import SaveOptions
from unickpt.checkpoint.storage.base import is_url
from unickpt.checkpoint.storage.open import unusable_reason
from unickpt.training.witness.settings import settings_from

NATIVE_FORMAT = "torch_dist"
ASKED_ASYNC = "unickpt_async_save"  # value of --async-save before Megatron checks the arguments
RETAIN_INTERVAL = "unickpt_retain_interval"  # value of --save-retain-interval, by which unickpt removes checkpoints
IN_MEMORY = "unickpt_in_memory"  # whether the arguments have --non-persistent-ckpt-type in_memory


def add_arguments(wrapped: Callable[..., Any], parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Wrap ``add_megatron_arguments``: add ``unickpt`` to the values of ``--ckpt-format``."""
    result: argparse.ArgumentParser = wrapped(parser)
    for action in result._actions:
        if "--ckpt-format" in action.option_strings and action.choices is not None and BACKEND not in action.choices:
            action.choices = [*action.choices, BACKEND]
            action.help = f"{action.help or ''} {BACKEND}: universal checkpoints, loadable under any parallel shape."
            if switch().saves:
                action.default = BACKEND
    add_flags(result)
    return result


def save_options(arguments: argparse.Namespace) -> SaveOptions:
    """Return how the scripts save, by their arguments."""
    found = requests.save_options(options_of(arguments), asynchronous=_wants_asynchronous(arguments))
    every = getattr(arguments, RETAIN_INTERVAL, None) or 0
    return replace(found, retention=replace(found.retention, also_every=every)) if every else found


def _wants_asynchronous(options: argparse.Namespace) -> bool:
    """Return whether the user asks for asynchronous saves.

    Megatron's checks of the arguments turn ``--async-save`` off if its worker process is not used, which unickpt does not need.
    This function therefore returns the parsed value. Megatron's local checkpoints keep Megatron's value.
    """
    if getattr(options, "non_persistent_ckpt_type", None) == "local":
        return bool(getattr(options, "async_save", False))
    return bool(getattr(options, ASKED_ASYNC, False)) and not options_of(options).sync_save


def set_asynchronous(options: argparse.Namespace) -> None:
    """Set Megatron's own flag, by which it finalizes a save. Called at a save, after Megatron has checked its arguments."""
    vars(options).update(asynchronous_arguments(options) if _wants_asynchronous(options) else {"async_save": False})


def take_retention(options: argparse.Namespace) -> None:
    """Take ``--save-retain-interval`` from Megatron, which then removes no checkpoint. Called at a save, after its checks."""
    asked = getattr(options, "save_retain_interval", None)
    if asked is not None:
        vars(options).update({"save_retain_interval": None, RETAIN_INTERVAL: asked})


def asynchronous_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments with which the scripts save asynchronously."""
    return {"async_save": True, **({"async_strategy": "mcore"} if hasattr(options, "async_strategy") else {})}


def parse_arguments(wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap ``parse_args``: replace ``--ckpt-format unickpt`` with the format whose branches the scripts take."""
    parsed = wrapped(*args, **kwargs)
    options = options_of(parsed)
    timing = options.timing
    if options.precision:  # imported only then
        from megatron_unickpt.measuring import precision

        precision.begin(options.precision)
    settings = settings_from(options.witness)
    if settings is not None:
        from megatron_unickpt.pretraining.non_persistent import save_folders
        from megatron_unickpt.witnessing import step_hooks

        step_hooks.begin_with_scripts(settings, partial(save_folders, parsed))
    if timing.enabled:
        from megatron_unickpt.measuring.timing import begin_with_groups

        begin_with_groups(timing)
    wanted = getattr(parsed, "ckpt_format", None) == BACKEND
    setattr(parsed, BACKEND, wanted)
    if wanted and getattr(parsed, "save", None):
        note_saver()
    setattr(parsed, ASKED_ASYNC, bool(getattr(parsed, "async_save", False)))
    setattr(parsed, IN_MEMORY, wanted and getattr(parsed, "non_persistent_ckpt_type", None) == "in_memory")
    if getattr(parsed, IN_MEMORY):  # Megatron refuses this type
        parsed.non_persistent_ckpt_type = "global"
    if wanted:
        require_usable()
        _check_sharding(parsed)
        _check_places(parsed)
        _check_accepted(parsed)
        parsed.ckpt_format = NATIVE_FORMAT
    return parsed


def _check_sharding(parsed: argparse.Namespace) -> None:
    """Check that the parameters are whole on each model parallel rank.

    Raises:
        ConfigError: Megatron FSDP shards them. Megatron accepts one format for such a job.
    """
    if getattr(parsed, "use_megatron_fsdp", False):
        raise ConfigError(
            "--ckpt-format unickpt with --use-megatron-fsdp: Megatron saves such a job with --ckpt-format fsdp_dtensor only. "
            "Use this format, and `unickpt convert` to read its checkpoints. Or train without Megatron FSDP: "
            "--use-distributed-optimizer shards the optimizer, and its checkpoints load under any layout."
        )


def accepted_changes(arguments: argparse.Namespace) -> frozenset[str]:
    """Return the arguments of the model that may differ from those of a checkpoint (``--unickpt-accept-changed``)."""
    words = options_of(arguments).accept_changed.replace("-", "_").split(",")
    return frozenset(filter(None, (word.strip().strip("_") for word in words)))


def _check_accepted(parsed: argparse.Namespace) -> None:
    """Check that the arguments that may differ exist.

    Raises:
        ConfigError: one does not.
    """
    for name in sorted(accepted_changes(parsed)):
        if not hasattr(parsed, name):
            near = difflib.get_close_matches(name, vars(parsed), n=1, cutoff=0.0)
            raise ConfigError(f'--unickpt-accept-changed {name}: Megatron has no such argument; did you mean "{near[0]}"?')


def _check_places(parsed: argparse.Namespace) -> None:
    """Check ``--save``, ``--load`` and the upload URL. The scripts themselves create directories and files in the first two.

    Raises:
        ConfigError: one of them is a URL, or the upload URL cannot be used.
    """
    for name in ("save", "load"):
        where = getattr(parsed, name, None)
        if where and is_url(where):
            raise ConfigError(
                f"--{name} {where}: Megatron's scripts need a local directory. Save into one, and let --unickpt-upload-to URL "
                "copy the checkpoints while training continues. To resume from a copy, download it with the store's own tool."
            )
    upload_to = options_of(parsed).upload_to
    reason = unusable_reason(upload_to) if upload_to else ""
    if reason:
        raise ConfigError(f"--unickpt-upload-to: {reason}")
