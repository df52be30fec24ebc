"""``unickpt edit``: a checkpoint made from another one, step by step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from unickpt.base.errors import ConfigError
from unickpt.cli.edit_common import check_destination, configure_writing, opened, operate
from unickpt.cli.exit_codes import SOUND
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
from unickpt.transform.grow.folders import configuration_folder, write_configuration
from unickpt.transform.grow.step import Grow
from unickpt.transform.grow.upcycle import Upcycle


class _Append(argparse.Action):
    """Append a step, in the order of the command line."""

    def __call__(self, _parser: object, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        namespace.steps = [*namespace.steps, (str(option_string), values)]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("source", metavar="SRC", help="a checkpoint, or a save directory (follows 'latest'); a path or a URL")
    parser.add_argument("destination", metavar="DST", help="output directory; an interrupted edit into it goes on")
    parser.set_defaults(steps=[])
    steps = parser.add_argument_group("steps, applied in the order of the command line")
    for option, metavar, help_text in (
        ("--drop", "PATTERN", "leave out the selected tensors: NAME or NAME:STATE; * is any text, {layer} a number"),
        ("--keep", "PATTERN", "leave out all others; several in a row keep what any of them selects"),
        ("--cast", "PATTERN=DTYPE", "cast to another dtype, such as '*:exp_avg=bfloat16'"),
        ("--rename", "OLD=NEW", "rename, such as 'model.layers.{i + 4}.*=model.layers.{i}.*'; several in a row apply at once"),
        ("--rules", "FILE", "split, fuse, transpose or stack by the rules in the file of a dialect"),
        ("--vocabulary", "ROWS", "resize the vocabulary to this number of rows"),
        ("--pad-vocabulary-to", "MULTIPLE", "add rows up to the next multiple"),
        ("--grow", "SIZE=N,...", "make a larger model with the same outputs, as 'unickpt grow' does"),
        ("--upcycle", "E,K[,G]", "make a mixture of experts with the same outputs, as 'unickpt upcycle' does"),
        ("--bits", "BITS|PLAN", "round weights to 4, 8, 4/32, 8/channel or by PLAN.json, as 'unickpt export --to vllm' does"),
        ("--residuals", "RANKS", "residuals of compressed gradients for this number of ranks; 0: none"),
    ):
        steps.add_argument(option, metavar=metavar, action=_Append, help=help_text)
    steps.add_argument("--no-optimizer", nargs=0, action=_Append, help="keep weights and buffers only")
    steps.add_argument("--merge-lora", nargs=0, action=_Append, help="add adapters of peft to their weights")
    rows = parser.add_argument_group("options of --vocabulary and --pad-vocabulary-to")
    rows.add_argument(
        "--new-rows", choices=("mean", "zeros"), default="mean", help="new rows: mean of the old ones (default), or zeros"
    )
    rows.add_argument(
        "--vocabulary-tensors", metavar="PATTERN", help="tensors with a row for each entry (default: by the dialect)"
    )
    rows.add_argument(
        "--vocabulary-dim", type=int, default=0, metavar="N", help="dimension of the rows in these tensors (default: 0)"
    )
    lora = parser.add_argument_group("options of --merge-lora")
    lora.add_argument(
        "--lora-config", type=Path, metavar="PATH", help="adapter_config.json, or the folder that peft saved the adapter in"
    )
    lora.add_argument("--lora-alpha", type=float, metavar="N", help="instead of --lora-config: scaling is N / rank")
    lora.add_argument("--lora-rslora", action="store_true", help="with --lora-alpha: scaling is N / sqrt(rank)")
    lora.add_argument("--lora-adapter", default="", metavar="NAME", help="name of the adapter, if there are several")
    lora.add_argument("--lora-base", metavar="DIR", help="checkpoint of the model, if SRC was saved without its weights")
    lora.add_argument(
        "--lora-keep-dtype",
        action="store_true",
        help="round the product to the dtype of the adapters, as peft with autocast_adapter_dtype=False (default: float32)",
    )
    parser.add_argument(
        "--model-config",
        metavar="FOLDER",
        help="with --grow and --upcycle: folder with the config.json of SRC (default: SRC, or the folder above it)",
    )
    configure_writing(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Plan all steps, then write."""
    check_destination(args.destination)
    steps = _steps(args.steps, args)
    if not steps:
        raise ConfigError("no step is given; name one, such as --drop or --cast (unickpt edit --help lists them)")
    used = [args.source, *([args.lora_base] if args.lora_base else [])]
    if not any(isinstance(step, (Grow, Upcycle)) for step in steps):
        return operate(after(opened(args.source), steps), used, steps, args, out)
    folder = configuration_folder(args.model_config, args.source)
    config = configuration(folder) if folder is not None else {}
    table = opened(args.source)
    for at, step in enumerate(steps):
        if isinstance(step, (Grow, Upcycle)):
            steps[at] = step = replace(step, config=config)
            table, config = step.result(table)
        else:
            table = step.apply(table)
    code = operate(table, used, steps, args, out)
    if code == SOUND and folder is not None and not args.dry_run:
        write_configuration(config, folder, Path(args.destination))
    return code


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
