"""``unickpt edit``: a checkpoint made from another one, step by step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from unickpt.base.errors import ConfigError
from unickpt.cli.edit_common import Operated, check_destination, opened, operate
from unickpt.cli.grow_command import change, number
from unickpt.cli.output import Output
from unickpt.transform.convert.huggingface.files import configuration
from unickpt.transform.edit.apply_dialect import Translate
from unickpt.transform.edit.cast import Cast
from unickpt.transform.edit.merge_lora import LoraConfig, MergeLora
from unickpt.transform.edit.patterns import Selection
from unickpt.transform.edit.rename import Rename, Renaming
from unickpt.transform.edit.residuals import ResizeResiduals
from unickpt.transform.edit.resize_vocab import Resize
from unickpt.transform.edit.round_weights import RoundWeights
from unickpt.transform.edit.select import Drop, Keep, NoOptimizer
from unickpt.transform.edit.table import Step
from unickpt.transform.edit.write import after
from unickpt.transform.grow.folders import configuration_folder, keep_configuration
from unickpt.transform.grow.step import Grow
from unickpt.transform.grow.upcycle import Upcycle


def run(args: argparse.Namespace, out: Output) -> int:
    """Plan all steps, then write."""
    check_destination(args.destination)
    steps = _steps(args.steps, args)
    if not steps:
        raise ConfigError("no step is given; name one, such as --drop or --cast (unickpt edit --help lists them)")
    used = [args.source, *([args.lora_base] if args.lora_base else [])]
    lines = Output.for_lines(out, as_json=args.json)
    if any(isinstance(step, (Grow, Upcycle)) for step in steps):
        found = _grown(steps, used, args, lines)
    else:
        found = operate(after(opened(args.source), steps), used, steps, args, lines)
    if args.json:
        out.json(found.as_json())
    return found.code


def _grown(steps: list[Step], used: Sequence[str], args: argparse.Namespace, out: Output) -> Operated:
    """Do steps of which some make a larger model, and write its configuration."""
    table = opened(args.source)
    folder = configuration_folder(args.model_config, table.where)
    config = configuration(folder) if folder is not None else {}
    for at, step in enumerate(steps):
        if isinstance(step, (Grow, Upcycle)):
            steps[at] = step = replace(step, config=config)
            table, config = step.result(table)
        else:
            table = step.apply(table)
    table = replace(table, model_files=None)  # it gets a new configuration
    found = operate(table, used, steps, args, out)
    if found.made is not None and folder is not None:
        keep_configuration(config, folder, Path(args.destination))
    return found


def _steps(written: Sequence[tuple[str, Any]], args: argparse.Namespace) -> list[Step]:
    """Steps of the command line. Consecutive --drop, --keep or --rename options become one step."""
    found: list[Step] = []
    for option, group in groupby(written, key=lambda each: each[0]):
        values = [value for _, value in group]
        if option in ("--drop", "--keep"):
            selections = tuple(map(Selection.parse, values))
            found.append(Drop(selections) if option == "--drop" else Keep(selections))
        elif option == "--rename":
            found.append(Rename(tuple(map(Renaming.parse, values))))
        else:
            found += [_step(option, value, args) for value in values]
    for option, given in (("--merge-lora", "lora_"), ("--vocabulary or --pad-vocabulary-to", "vocabulary_")):
        alone = [name for name, value in vars(args).items() if name.startswith(given) and value]
        if alone and not any(each in option.split() for each, _ in written):
            raise ConfigError(f"--{alone[0].replace('_', '-')} needs {option}")
    return found


def _step(option: str, value: Any, args: argparse.Namespace) -> Step:
    if option == "--no-optimizer":
        return NoOptimizer()
    if option == "--cast":
        return Cast.parse(value)
    if option == "--rules":
        return Translate.read(Path(value))
    if option == "--merge-lora":
        return _merge(args)
    if option == "--grow":
        return Grow(dict(change(each) for each in value.split(",")))
    if option == "--upcycle":
        numbers = [number(each, option) for each in value.split(",")]
        if len(numbers) not in (2, 3) or not all(numbers):
            raise ConfigError(f"{option} {value}: expected E,K or E,K,G, each 1 or more")
        experts, top_k, granularity = (*numbers, 1)[:3]
        return Upcycle(experts, top_k, granularity)
    if option == "--bits":
        return RoundWeights.parse(value)
    if option == "--residuals":
        return ResizeResiduals(number(value, option))
    if not value.isdecimal():
        raise ConfigError(f"{option} {value}: expected a whole number")
    selection = Selection.parse(args.vocabulary_tensors) if args.vocabulary_tensors else None
    rows, multiple = (int(value), 0) if option == "--vocabulary" else (0, int(value))
    return Resize(rows, multiple, args.new_rows, selection, args.vocabulary_dim)


def _merge(args: argparse.Namespace) -> MergeLora:
    if (args.lora_config is None) == (args.lora_alpha is None):
        raise ConfigError("--merge-lora needs either --lora-config PATH (peft's adapter_config.json) or --lora-alpha N")
    if args.lora_rslora and args.lora_config is not None:
        raise ConfigError("--lora-rslora needs --lora-alpha; with --lora-config the file says it")
    config = LoraConfig.read(args.lora_config) if args.lora_config else LoraConfig(args.lora_alpha, rslora=args.lora_rslora)
    base = opened(args.lora_base) if args.lora_base else None
    identity = "+".join(base.identity) if base else ""
    return MergeLora(config, args.lora_adapter, base, identity, args.lora_keep_dtype)
