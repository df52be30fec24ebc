"""``unickpt watch -- COMMAND``: run a program with timing of collectives, without a change of its code."""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from unickpt.base.errors import ConfigError
from unickpt.base.switch import TIMING
from unickpt.cli.output import Output

_AUTOLOADS = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "UNICKPT_AUTOLOAD")


def run(args: argparse.Namespace, out: Output) -> int:
    """Become the program.

    Raises:
        ConfigError: there is no such program, or the environment turns off what timing needs.
    """
    del out
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    program = shutil.which(command[0]) if command else None
    if program is None:
        missing = f"{command[0]}: no such program" if command else "no program"
        raise ConfigError(f"{missing}; unickpt watch -- torchrun ... train.py")
    off = [name for name in _AUTOLOADS if os.environ.get(name) == "0"]
    if off:
        raise ConfigError(f"{off[0]}=0 is in the environment, so import torch does not begin timing; remove it")
    sys.stdout.flush()
    os.execve(program, command, {**os.environ, TIMING: "1"})
