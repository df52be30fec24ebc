"""The flags of Megatron's training scripts: which options have one, and what two options exist for them alone."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unickpt.base.options import flags
from unickpt.base.options.declared import KEY, Option, declarations, option
from unickpt.base.options.job import Options, declared

_RENAMED = {"read_once_per_host": "--unickpt-no-read-once"}

# what to use instead of a flag, by option or section
INSTEAD: Mapping[str, str] = {
    "enabled": "use `--ckpt-format unickpt`",
    "restore_rng": "Megatron's `--no-load-rng` disables it",
    "non_persistent_buffers": "the modules' `sharded_state_dict` decides which buffers are saved",
    "name": "a job of the scripts has one model",
    "async_save": "use Megatron's `--async-save`",
    "resume_from": "use Megatron's `--load`",
    "keep_global_batch": "Megatron's `--global-batch-size` keeps it",
    "batch_tolerance": "Megatron's scripts need an exact batch",
    "auto_resume": "use Megatron's `--load`",
    "compression": "Megatron's scripts reduce gradients by themselves",
}

# why an option has no key in JSON
FLAG_ONLY: Mapping[str, str] = {
    "sync_save": "saves are synchronous unless `async_save` is true",
    "accept_changed": "tensors are compared, not arguments",
}


@dataclass(frozen=True, slots=True)
class ScriptOptions(Options):
    """Options of a job of Megatron's scripts."""

    sync_save: bool = option(False, "return from a save only when the checkpoint is durable, even with --async-save")
    accept_changed: str = option(
        "",
        "arguments of the model that may differ from those of the checkpoint, although the load would be refused: tensors of "
        "the same name and shape are loaded",
        several=True,
    )


def reason_without_flag(declaration: Option) -> str:
    """Return what to use instead of a flag of an option; '' if it has one."""
    return INSTEAD.get(declaration.path) or INSTEAD.get(declaration.section, "")


SCRIPT_OPTIONS = tuple(each for each in declarations(ScriptOptions) if each.key in FLAG_ONLY)
FLAGS: Mapping[str, Option] = {
    _RENAMED.get(each.path) or flags.flag_of(each): each
    for each in (*declared(), *SCRIPT_OPTIONS)
    if not reason_without_flag(each)
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to the parser of the scripts, as the group ``unickpt``."""
    group = parser.add_argument_group(KEY, "universal checkpoints (--ckpt-format unickpt) and timing of collectives")
    flags.add_flags(group, FLAGS)
    flags.name_the_nearest(parser, FLAGS)


def options_of(arguments: Any) -> ScriptOptions:
    """Return the options of the scripts' parsed arguments; the defaults for None."""
    return flags.from_flags(ScriptOptions, arguments, FLAGS)
