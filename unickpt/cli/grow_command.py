"""``unickpt grow``: a larger model with the same outputs."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from unickpt.base.errors import ConfigError
from unickpt.cli.edit_common import check_destination, opened, operate
from unickpt.cli.exit_codes import SOUND, UNUSABLE
from unickpt.cli.output import Output
from unickpt.transform.convert.huggingface.files import configuration
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
from unickpt.transform.edit.table import Table
from unickpt.transform.grow.folders import configuration_folder, is_model, keep_configuration, open_source
from unickpt.transform.grow.refusals import NotLosslessError
from unickpt.transform.grow.schedule import FILE, RateSchedule
from unickpt.transform.grow.step import Grow
from unickpt.transform.grow.upcycle import Upcycle

JSON_SCHEMA = 1


def run(args: argparse.Namespace, out: Output) -> int:
    """Plan the growth, then write checkpoint and configuration."""
    check_destination(args.destination)
    place = None if args.place is None else tuple(number(each, "--place") for each in args.place.split(","))
    changes = dict(change(each) for each in args.changes)
    with OpenFiles() as files:
        step = Grow(changes, place, args.seed, zero_second_moments=args.zero_second_moments)
        code, grown = run_step(step, files, args, out)
        if args.schedule and code == SOUND and not args.dry_run:
            made = RateSchedule(args.schedule, grown.step).as_json()
            (Path(args.destination) / FILE).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        return code


def run_step(step: Grow | Upcycle, files: OpenFiles, args: argparse.Namespace, out: Output) -> tuple[int, Table]:
    """Do one step, and write its table and its configuration. Return the exit code and the table.

    Args:
        step: the step, without the configuration of the source.
        files: open files of the source.
        args, out: of the command.

    Raises:
        NotLosslessError: the step is refused, and --json is not given.
    """
    table = open_source(args.source, files, opened)
    folder = configuration_folder(args.config, table.where)
    step = dataclasses.replace(step, config=configuration(folder) if folder is not None else {})
    try:
        table, config = step.result(table)
    except NotLosslessError as err:
        if not args.json:
            raise
        refused = [dataclasses.asdict(each) for each in err.refusals]
        out.json({"schema": JSON_SCHEMA, "refused": refused, "message": str(err)})
        return UNUSABLE, table
    lines = Output.for_lines(out, as_json=args.json)
    table = dataclasses.replace(table, model_files=None)  # it gets a new configuration
    found = operate(table, [] if is_model(args.source) else [args.source], [step], args, lines)
    if found.made is not None:
        if folder is not None:
            lines.line(f"{keep_configuration(config, folder, Path(args.destination))}: the new configuration")
        else:
            lines.line("no config.json was found: --config FOLDER gives that of the source; the new one is needed to train")
    if args.json:
        done = {"done": table.done, "left_out": table.left_out, "config": config, "written": not args.dry_run}
        out.json({"schema": JSON_SCHEMA, "ok": not found.problems, **done})
    return found.code, table


def change(text: str) -> tuple[str, int]:
    """Parse ``SIZE=N``. Raises ConfigError."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--set {text}: expected SIZE=N, such as hidden_size=1024")
    return name.strip(), number(value, f"--set {name}")


def number(text: str, option: str) -> int:
    """Parse a whole number. Raises ConfigError."""
    if not text.strip().isdecimal():
        raise ConfigError(f"{option}: {text!r} is not a whole number")
    return int(text)
