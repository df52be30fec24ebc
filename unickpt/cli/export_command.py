"""``unickpt export``: a checkpoint in the form of others."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from unickpt.cli.exit_codes import DAMAGED, SOUND
from unickpt.cli.locate import locate_checkpoint
from unickpt.cli.output import Output, human_bytes
from unickpt.cli.progress import progress_bar
from unickpt.dtypes import torch_dtype
from unickpt.errors import FormatError, UnickptError
from unickpt.exporting import dcp, deepspeed_universal, megatron_dist
from unickpt.exporting.huggingface import CONFIG, Exported, as_huggingface, export
from unickpt.loading import Checkpoint
from unickpt.verification import verify

HF, UNIVERSAL, DCP, TORCH_DIST = "hf", "deepspeed-universal", "dcp", "torch-dist"
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "directory", metavar="DIR", help="a checkpoint, or a save directory (follows 'latest'); a path or a URL"
    )
    parser.add_argument("output", metavar="FOLDER", type=Path, help="that is made")
    parser.add_argument(
        "--to", choices=(HF, UNIVERSAL, DCP, TORCH_DIST), default=HF,
        help="hf: weights, as safetensors that from_pretrained of transformers loads (default); deepspeed-universal: masters "
        "and optimizer states, as files that DeepSpeed loads with \"checkpoint\": {\"load_universal\": true}; dcp: what "
        "torch.distributed.checkpoint loads, with the optimizer's states, under the names that they have; torch-dist: what "
        "Megatron loads with --ckpt-format torch_dist, under any parallel shape",
    )  # fmt: skip
    parser.add_argument("--config", type=Path, metavar="FOLDER", help="of a model of this kind: all but its weights is copied")
    parser.add_argument(
        "--dialect", default="", metavar="FAMILY", help="of the model, where nothing tells, or a dialect's file"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of all floating point weights (default: as they are stored)")
    parser.add_argument("--shard-gigabytes", type=float, default=5.0, help="of a file, at most (default: 5)")
    parser.add_argument("--tag", default="", help="of deepspeed-universal (default: global_step<step>_universal)")
    parser.add_argument(
        "--expert-parallel", choices=("yes", "no"),
        help="of torch-dist, of a model with experts: whether jobs that load it have --expert-model-parallel-size above 1, "
        "where experts have an optimizer of their own (default: as in the job that saved it)",
    )  # fmt: skip
    parser.add_argument("--no-verify", action="store_true", help="do not read the checkpoint against its checksums before")


def run(args: argparse.Namespace, out: Output) -> int:
    """Write the folder."""
    if args.to != HF and args.dtype:
        raise UnickptError("--dtype is for --to hf: masters and states are exported as they are")
    if args.to == DCP and (args.config or args.dialect):
        raise UnickptError(f"--config and --dialect are not for --to {DCP}, which keeps the names that there are")
    if args.to != TORCH_DIST and args.expert_parallel:
        raise UnickptError(f"--expert-parallel is for --to {TORCH_DIST}")
    directory = locate_checkpoint(args.directory)
    checkpoint = Checkpoint.open(directory)
    if args.to != DCP:
        under_names = megatron_dist.as_megatron if args.to == TORCH_DIST else as_huggingface
        checkpoint = under_names(checkpoint, chosen=args.dialect, config=_config(args.config))
    if not args.no_verify:
        total = sum(record.size_bytes for record in checkpoint.manifest.files)
        with progress_bar("verify", total) as advance:
            problems = verify(directory, progress=advance).problems
        for problem in problems:
            out.line(problem, style="red")
        if problems:
            return DAMAGED
    try:
        if args.to == UNIVERSAL:
            _universal(checkpoint, args, out)
        elif args.to == DCP:
            _dcp(checkpoint, args, out)
        elif args.to == TORCH_DIST:
            _torch_dist(checkpoint, args, out)
        else:
            _huggingface(checkpoint, args, out)
    except OSError as err:
        raise UnickptError(f"{args.output}: cannot be written ({err})") from err
    return SOUND


def _universal(checkpoint: Checkpoint, args: argparse.Namespace, out: Output) -> None:
    with progress_bar("export", deepspeed_universal.size_bytes(checkpoint)) as advance:
        made = deepspeed_universal.export(checkpoint, args.output, tag=args.tag, progress=advance)
    out.line(
        f"{args.output / made.tag}: masters and states of {made.parameters:,} parameters, {human_bytes(made.size_bytes)}",
        style="bold green",
    )
    for note in made.notes:
        out.line(note)


def _dcp(checkpoint: Checkpoint, args: argparse.Namespace, out: Output) -> None:
    total = sum(info.size_bytes for info in checkpoint.index.tensors)
    with progress_bar("export", total) as advance:
        made = dcp.export_dcp(checkpoint, args.output, shard_bytes=int(args.shard_gigabytes * 1e9), progress=advance)
    _told(made, args, out)


def _torch_dist(checkpoint: Checkpoint, args: argparse.Namespace, out: Output) -> None:
    with progress_bar("export", megatron_dist.size_bytes(checkpoint)) as advance:
        made = megatron_dist.export(
            checkpoint, args.output, apart=None if args.expert_parallel is None else args.expert_parallel == "yes",
            shard_bytes=int(args.shard_gigabytes * 1e9), progress=advance,
        )  # fmt: skip
    out.line(f"{made.directory}: {made.tensors:,} tensors, {human_bytes(made.size_bytes)}", style="bold green")
    for note in made.notes:
        out.line(note)


def _told(made: Exported, args: argparse.Namespace, out: Output) -> None:
    files = f"{len(made.files)} file{'s' * (len(made.files) != 1)}"
    out.line(f"{args.output}: {made.tensors:,} tensors, {human_bytes(made.size_bytes)}, in {files}", style="bold green")
    if made.tied:
        out.line(f"tied, and left to transformers: {', '.join(made.tied)}")


def _huggingface(checkpoint: Checkpoint, args: argparse.Namespace, out: Output) -> None:
    dtype = torch_dtype(DTYPES[args.dtype]) if args.dtype else None
    total = sum(info.size_bytes for info in checkpoint.index.tensors if info.state == "weight")
    with progress_bar("export", total) as advance:
        made = export(
            checkpoint, args.output, config_from=args.config, dtype=dtype, shard_bytes=int(args.shard_gigabytes * 1e9),
            progress=advance,
        )  # fmt: skip
    _told(made, args, out)
    if made.without_config:
        out.line("from_pretrained wants a config.json there, too: --config FOLDER copies that of another model of its kind")


def _config(folder: Path | None) -> dict[str, Any] | None:
    if folder is None:
        return None
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise FormatError(f"{folder / CONFIG}: cannot be read as a configuration ({err})") from err
    if not isinstance(found, dict):
        raise FormatError(f"{folder / CONFIG}: is no configuration")
    return found
