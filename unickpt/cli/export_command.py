"""``unickpt export``: export a checkpoint to the format of another program."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unickpt.base.errors import ConfigError, FormatError, UnickptError
from unickpt.base.listing import some
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.manifest import MANIFEST_FILE
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.storage.base import is_url
from unickpt.cli.edit_common import counted_files, sound
from unickpt.cli.exit_codes import DAMAGED, SOUND
from unickpt.cli.locate import locate_checkpoint
from unickpt.cli.output import Output, human_bytes, progress_bar
from unickpt.transform.convert.deepspeed import universal_writer
from unickpt.transform.convert.huggingface.files import CONFIG, configuration
from unickpt.transform.convert.huggingface.vllm import export_vllm
from unickpt.transform.convert.huggingface.writer import as_huggingface, check_no_model, export
from unickpt.transform.convert.megatron import dist_writer
from unickpt.transform.convert.megatron.fsdp_writer import export_fsdp
from unickpt.transform.convert.torch_dcp import writer
from unickpt.transform.quantise.encoding import CastEncoding

HF, VLLM, UNIVERSAL, DCP, TORCH_DIST, FSDP = "hf", "vllm", "deepspeed-universal", "dcp", "torch-dist", "fsdp-dtensor"
FOLDERS = (HF, VLLM)  # folders of a model
MEGATRON = (TORCH_DIST, FSDP)
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="a checkpoint, a save directory (follows 'latest'), or checkpoint-500 of a Trainer run; a path or a URL",
    )
    parser.add_argument("output", metavar="FOLDER", type=_folder, help="output directory")
    parser.add_argument(
        "--to",
        choices=(HF, VLLM, UNIVERSAL, DCP, TORCH_DIST, FSDP),
        default=HF,
        help="hf (default): weights as safetensors, for from_pretrained of transformers. vllm: the same for vLLM, rounded to "
        "--bits. deepspeed-universal: masters and "
        'optimizer states, for DeepSpeed with "checkpoint": {"load_universal": true}. dcp: weights and optimizer states under '
        "their own names, for torch.distributed.checkpoint. torch-dist: the same for Megatron with --ckpt-format torch_dist, "
        "under any parallel shape. fsdp-dtensor: the same for Megatron with --use-megatron-fsdp",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FOLDER",
        help="folder of a model of the same kind: gives the configuration; --to hf and vllm copy config.json and the tokenizer "
        "from it (default: the folder of the checkpoint or the one above, as in a Trainer run)",
    )
    parser.add_argument("--with-code", action="store_true", help="copy *.py from --config, too (custom code of a model)")
    parser.add_argument(
        "--dialect", default="", metavar="FAMILY", help="family of the model, if nothing else tells it, or file of a dialect"
    )
    parser.add_argument(
        "--bits",
        default="",
        metavar="4|8|16|PLAN.json",
        help="with vllm: bits of the weights of Linear modules, rounded to nearest in groups of 128. 4/32: in groups of 32. "
        "8/channel: one scale for each row. A file: the plan of 'unickpt plan bits' (default: 16)",
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        help="dtype of all floating point weights (default: as stored; with vllm: bfloat16 for a model in float32)",
    )
    parser.add_argument(
        "--shard-gigabytes", type=float, default=5.0, metavar="N", help="maximum size of a file, in GB (default: 5)"
    )
    parser.add_argument(
        "--tag", default="", help="with deepspeed-universal: tag to write (default: global_step<step>_universal)"
    )
    parser.add_argument(
        "--expert-parallel",
        choices=("yes", "no"),
        help="with torch-dist, for a model with experts: whether the jobs that load it have --expert-model-parallel-size above "
        "1, where experts have an optimizer of their own (default: as in the job that saved it)",
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not check the checkpoint against its checksums before the export"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Export the checkpoint."""
    _check_options(args)
    directory = locate_checkpoint(args.directory)
    if args.to in FOLDERS:
        check_no_model(args.output)
    checkpoint = Checkpoint.open(directory)
    config = model_folder(args.config, directory)
    if args.to != DCP:
        under_names = dist_writer.as_megatron if args.to in MEGATRON else as_huggingface
        checkpoint = under_names(checkpoint, chosen=args.dialect, config=settings_of(config))
    if checkpoint.unread:
        out.line(f"left out, because no model reads them: {some(checkpoint.unread)}")
    if not args.no_verify and not sound(checkpoint.storage, checkpoint.manifest, out):
        return DAMAGED
    try:
        if args.to == UNIVERSAL:
            _universal(checkpoint, args, out)
        elif args.to == DCP:
            _dcp(checkpoint, args, out)
        elif args.to in MEGATRON:
            _megatron(checkpoint, args, out)
        else:
            _huggingface(checkpoint, args, config, out)
    except OSError as err:
        raise UnickptError(f"{args.output}: cannot be written ({err})") from err
    return SOUND


def _folder(text: str) -> Path:
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text}: the output must be a local directory; upload it afterwards")
    return Path(text)


def _check_options(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not fit together."""
    to, output = args.to, args.output
    model = f"--to {HF} or {VLLM}"
    holds = f"{output}: is a unickpt checkpoint, and an export would add other files to it; name another directory"
    for wrong, text in (
        (to not in FOLDERS and args.dtype, f"--dtype needs {model}: masters and optimizer states are exported as they are"),
        (to not in FOLDERS and args.with_code, f"--with-code needs {model}"),
        (to != VLLM and args.bits, f"--bits needs --to {VLLM}"),
        (
            to == DCP and (args.config or args.dialect),
            f"--config and --dialect have no effect with --to {DCP}, which keeps all names",
        ),
        (to != TORCH_DIST and args.expert_parallel, f"--expert-parallel needs --to {TORCH_DIST}"),
        (to != UNIVERSAL and args.tag, f"--tag needs --to {UNIVERSAL}"),
        (not args.shard_gigabytes > 0, f"--shard-gigabytes {args.shard_gigabytes:g}: expected a number above 0"),
        (output.exists() and not output.is_dir(), f"{output}: is a file; name a directory"),
        ((output / MANIFEST_FILE).exists(), holds),
    ):
        if wrong:
            raise ConfigError(text)


def _universal(checkpoint: Checkpoint, args: argparse.Namespace, out: Output) -> None:
    with progress_bar("export", universal_writer.size_bytes(checkpoint)) as advance:
        made = universal_writer.export(checkpoint, args.output, tag=args.tag, progress=advance)
    out.line(
        f"{made.folder}: masters and states of {made.tensors:,} parameters, {human_bytes(made.size_bytes)}",
        style="bold green",
    )
    for note in made.notes:
        out.line(note)


def _dcp(checkpoint: Checkpoint, args: argparse.Namespace, out: Output) -> None:
    total = sum(info.size_bytes for info in checkpoint.index.tensors)
    with progress_bar("export", total) as advance:
        made = writer.export_dcp(checkpoint, args.output, shard_bytes=int(args.shard_gigabytes * 1e9), progress=advance)
    _summary(made.files, made.tensors, made.size_bytes, args, out)


def _megatron(checkpoint: Checkpoint, args: argparse.Namespace, out: Output) -> None:
    shard_bytes = int(args.shard_gigabytes * 1e9)
    with progress_bar("export", dist_writer.size_bytes(checkpoint)) as advance:
        if args.to == FSDP:
            made = export_fsdp(checkpoint, args.output, shard_bytes=shard_bytes, progress=advance)
        else:
            separate = None if args.expert_parallel is None else args.expert_parallel == "yes"
            made = dist_writer.export(
                checkpoint, args.output, separate_experts=separate, shard_bytes=shard_bytes, progress=advance
            )
    out.line(f"{made.folder}: {made.tensors:,} tensors, {human_bytes(made.size_bytes)}", style="bold green")
    for note in made.notes:
        out.line(note)


def _summary(names: Sequence[str], tensors: int, size_bytes: int, args: argparse.Namespace, out: Output) -> None:
    size = f"{tensors:,} tensors, {human_bytes(size_bytes)}, in {counted_files(len(names))}"
    out.line(f"{args.output}: {size}", style="bold green")


def _huggingface(checkpoint: Checkpoint, args: argparse.Namespace, config: Path | None, out: Output) -> None:
    dtype = torch_dtype(DTYPES[args.dtype]) if args.dtype else None
    total = sum(info.size_bytes for info in checkpoint.index.tensors if info.state == "weight")
    common = {"config_from": config, "with_code": args.with_code, "shard_bytes": int(args.shard_gigabytes * 1e9)}
    with progress_bar("export", total) as advance:
        if args.to == VLLM:
            made = export_vllm(checkpoint, args.output, bits=args.bits or "16", dtype=dtype, progress=advance, **common)
        else:
            made = export(checkpoint, args.output, encoding=CastEncoding(dtype), progress=advance, **common)
    _summary(made.files, made.tensors, made.size_bytes, args, out)
    for note in made.notes:
        out.line(note)
    if made.tied:
        out.line(f"tied, left to transformers: {some(made.tied)}")
    if made.copied:
        out.line(f"copied from {config}: {some(made.copied)}")
    if args.config is not None and made.left:
        out.line(f"not copied, not part of a model: {some(made.left)}")
    if made.without_config:
        out.line(
            "there is no config.json yet, which from_pretrained needs: --config FOLDER copies that of a model of the same kind"
        )
    if made.needs_code:
        out.line("config.json names Python code (auto_map), which was not copied: --with-code copies *.py")


def model_folder(named: Path | None, checkpoint: str) -> Path | None:
    """The folder of the model's configuration: what ``--config`` names, or one beside the checkpoint that has a model's.

    A Trainer run has it in ``checkpoint-500``, above the checkpoint.
    """
    if named is not None:
        return named.parent if named.name == CONFIG and named.is_file() else named
    if is_url(checkpoint):
        return None
    found = Path(checkpoint)
    return next((folder for folder in (found, found.parent) if configuration(folder).get("model_type")), None)


def settings_of(folder: Path | None) -> dict[str, Any] | None:
    """Return the configuration of a folder; None for None. Raises FormatError if the folder has none."""
    if folder is None:
        return None
    found = configuration(folder)
    if not found:
        raise FormatError(f"{folder / CONFIG}: not a configuration of transformers; --config takes the folder of a model")
    return found
