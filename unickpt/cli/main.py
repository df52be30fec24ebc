"""Entry point of the command line. It runs the command and turns errors into one line and an exit code.

Only the standard library is imported at module level. ``main`` imports the rest where it handles Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module

from unickpt.base.errors import UnickptError
from unickpt.cli.exit_codes import INTERRUPTED, SOUND, UNUSABLE
from unickpt.cli.parsers.common import add_command

_NOTHING_DONE = "nothing was changed; run the same command again"
_GOES_ON = "the files written so far are kept; run the same command again to continue. DST is not a checkpoint yet"
_REPEAT = "the output is not complete; run the same command again"


@dataclass(frozen=True, slots=True)
class _Command:
    """A subcommand: its module has ``run(args, out) -> exit code``, the one of its arguments ``configure(parser)``.

    Only those of the called command are imported, and ``run`` when its arguments are parsed: ``--help`` waits for no torch.

    Attributes:
        name: of the command.
        help: one line for ``unickpt --help``.
        interrupted: what to do after Ctrl-C.
        starts: the words after ``--`` are a program and its arguments, ``args.command``.
    """

    name: str
    help: str
    interrupted: str = _NOTHING_DONE
    starts: bool = False

    @property
    def module(self) -> str:
        """Name of its module."""
        return f"unickpt.cli.{self.name.replace('-', '_')}_command"

    @property
    def arguments(self) -> str:
        """Name of the module with its arguments."""
        return f"unickpt.cli.parsers.{self.name.replace('-', '_')}"


COMMANDS = (
    _Command("inspect", "show what a checkpoint holds, without reading its data"),
    _Command("verify", "read every byte of a checkpoint and report what is damaged"),
    _Command("latest", "print the newest complete checkpoint of a directory"),
    _Command("diff", "compare two checkpoints, also of different frameworks"),
    _Command(
        "convert", "make a checkpoint from one of transformers, DeepSpeed, Megatron or torch.distributed.checkpoint", _GOES_ON
    ),
    _Command(
        "export",
        "write a checkpoint for transformers, vLLM, DeepSpeed (universal), Megatron (torch_dist) or PyTorch (DCP)",
        "FOLDER is not complete; run the same command again",
    ),
    _Command("edit", "make a checkpoint from another one: cast, drop, rename, resize the vocabulary, merge adapters", _GOES_ON),
    _Command("grow", "make a larger model with the same outputs, and its optimizer states", _GOES_ON),
    _Command("upcycle", "make a mixture of experts with the outputs of a dense model", _GOES_ON),
    _Command("average", "make a checkpoint that is the mean of several", _GOES_ON),
    _Command("watch", "run a program, such as torchrun, with timing of its collectives"),
    _Command("replay-step", "compute a step again from a checkpoint, twice, and say where it differs", starts=True),
    _Command("diagnose", "find the rank or link that a job waits for"),
    _Command("top", "show a job live in the terminal: verdicts, hosts, who waits for whom"),
    _Command(
        "agent", "watch the ranks of this host and report what is wrong", "the agent has stopped; run the same command again"
    ),
    _Command("report", "write an HTML report of a job's ranks", _REPEAT),
    _Command("trace", "write the calls of a job as a Perfetto trace", _REPEAT),
    _Command("metrics", "print measurements of a job for Prometheus, or write them for TensorBoard", _REPEAT),
    _Command("otlp", "send steps, metrics and verdicts of a job to an OpenTelemetry collector", _REPEAT),
    _Command("whatif", "price every rank, link, stage and cause of a slow step by a replay"),
    _Command("plan", "plan the next run: parallel layout, pipeline stages, order of hosts"),
    _Command("hosts", "show, park or admit the hosts of a job of torchrun --rdzv-backend unickpt"),
    _Command("doctor", "say whether unickpt acts here, in what, and what to do; text to paste into an issue"),
    _Command("hooks", "show the hooks in the installed frameworks"),
    _Command("example", "print or write the configurations, launch files and scripts of the guides"),
    _Command("completion", "print a script that completes commands in bash, zsh or fish"),
)
_EPILOG = (
    "exit codes: 0 no problem; 1 damaged, different or incomplete; 2 no readable checkpoint, or wrong usage; 3 no checkpoint "
    "yet (latest); 130 stopped by Ctrl-C. 'unickpt COMMAND --help' describes a command."
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
    called = next((word for word in arguments if not word.startswith("-")), None)
    advice = next((command.interrupted for command in COMMANDS if command.name == called), _NOTHING_DONE)
    with _ended_at_once_by_ctrl_c():
        args = _parse(arguments, called)
        from unickpt.cli.output import Output, one_line

        run = import_module(next(command.module for command in COMMANDS if command.name == called)).run
        out = Output(sys.stdout)
    try:
        code: int = run(args, out)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `unickpt inspect ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SOUND
    except (UnickptError, OSError) as err:
        if getattr(args, "json", False):
            out.json({"error": {"type": type(err).__name__, "message": str(err)}})
        print(f"unickpt: {one_line(str(err), sys.stderr)}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print(f"unickpt: interrupted: {advice}", file=sys.stderr)
        return INTERRUPTED


@contextlib.contextmanager
def _ended_at_once_by_ctrl_c() -> Iterator[None]:
    """End the process immediately on Ctrl-C during imports: nothing was written, and libraries can swallow the exception."""

    def end(*_: object) -> None:
        os.write(2, f"unickpt: interrupted: {_NOTHING_DONE}\n".encode())
        os._exit(INTERRUPTED)

    try:
        before = signal.signal(signal.SIGINT, end) if signal.getsignal(signal.SIGINT) is signal.default_int_handler else None
    except ValueError:  # not in the main thread, which alone may set handlers
        before = None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


class _Version(argparse.Action):
    """Reads the version when it is asked for: in a checkout, git says it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from unickpt import __version__

        print(f"unickpt {__version__}")
        parser.exit()


def _parse(arguments: list[str], called: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="unickpt", description="Universal checkpoints for DeepSpeed, Megatron and PyTorch.", epilog=_EPILOG
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        add_command(commands, command.name, command.help, command.arguments if command.name == called else "")
    empty = [at for at, word in enumerate(arguments) if not word and not arguments[at - 1].startswith("-")]
    if empty:  # an unset variable in a script, which a path would read as the current directory
        parser.error(f"argument {empty[0]} is empty")
    starts = any(command.starts for command in COMMANDS if command.name == called)
    end = arguments.index("--") if starts and "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:end])
    if starts:
        args.command = arguments[end + 1 :]
    return args


if __name__ == "__main__":
    sys.exit(main())
