"""Entry point of the command line: finds the command, runs it, turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from unickpt import __version__
from unickpt.cli.exit_codes import INTERRUPTED, SOUND, UNUSABLE
from unickpt.cli.output import Output, one_line
from unickpt.errors import UnickptError


@dataclass(frozen=True, slots=True)
class _Command:
    """A subcommand: its module has ``configure(parser)`` and ``run(args, out) -> exit code``.

    Only the module of the command that is called is imported, so that ``--help`` need not wait for torch.
    """

    name: str
    module: str
    help: str


COMMANDS = (
    _Command("inspect", "unickpt.cli.inspect_command", "show what a checkpoint holds, without reading its data"),
    _Command("verify", "unickpt.cli.verify_command", "read every byte of a checkpoint and say what is wrong with it"),
    _Command("latest", "unickpt.cli.latest_command", "print the newest whole checkpoint of a directory"),
    _Command("diff", "unickpt.cli.diff_command", "say what differs between two checkpoints, whatever wrote them"),
    _Command("convert", "unickpt.cli.convert_command", "make a checkpoint of a model of transformers"),
    _Command("export", "unickpt.cli.export_command", "write a checkpoint's weights as a model of transformers"),
    _Command(
        "edit", "unickpt.cli.edit_command", "make a checkpoint of another one: cast, drop, rename, resize, merge adapters"
    ),
    _Command("average", "unickpt.cli.average_command", "make a checkpoint that is the mean of several"),
    _Command("diagnose", "unickpt.cli.diagnose_command", "say which rank or link a job waits for"),
    _Command("agent", "unickpt.cli.agent_command", "watch the ranks of this host, and say what is wrong"),
    _Command("report", "unickpt.cli.report_command", "draw what a job's ranks did on one HTML page"),
    _Command("trace", "unickpt.cli.trace_command", "write every call of a job as a trace for Perfetto"),
    _Command(
        "metrics", "unickpt.cli.metrics_command", "print measurements of a job for Prometheus, or write them for TensorBoard"
    ),
    _Command("hooks", "unickpt.cli.hooks_command", "show what is put into the installed frameworks"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        The exit code (``unickpt.cli.exit_codes``). ``--help`` and malformed options end in argparse's own
        SystemExit (0 and 2).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parse(arguments)
    out = Output(sys.stdout)
    try:
        code: int = args.run(args, out)
        sys.stdout.flush()
        return code
    except UnickptError as err:
        if getattr(args, "json", False):
            out.json({"error": {"type": type(err).__name__, "message": str(err)}})
        print(f"unickpt: {one_line(str(err), sys.stderr)}", file=sys.stderr)
        return UNUSABLE
    except BrokenPipeError:  # `unickpt inspect ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SOUND
    except KeyboardInterrupt:
        return INTERRUPTED


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="unickpt", description="Universal checkpoints for DeepSpeed and Megatron.")
    parser.add_argument("--version", action="version", version=f"unickpt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    called = next((word for word in arguments if not word.startswith("-")), None)
    for command in COMMANDS:
        subparser = commands.add_parser(command.name, help=command.help, description=f"{command.help.capitalize()}.")
        if command.name == called:
            module = import_module(command.module)
            module.configure(subparser)
            subparser.set_defaults(run=module.run)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
