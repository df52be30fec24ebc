"""``unickpt export``: export a checkpoint to the format of another program."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unickpt.base.errors import ConfigError, FormatError, UnickptError
from unickpt.base.listing import some
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.manifest import MANIFEST_FILE
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.storage.base import is_url
from unickpt.cli.edit_common import counted_files, damage
from unickpt.cli.exit_codes import DAMAGED, SOUND
from unickpt.cli.locate import locate_checkpoint
from unickpt.cli.output import Output, human_bytes, progress_bar
from unickpt.cli.parsers.export import DCP, DTYPES, FSDP, HF, PEFT, TORCH_DIST, UNIVERSAL, VLLM
from unickpt.transform.convert.deepspeed import universal_writer
from unickpt.transform.convert.exported import Exported
from unickpt.transform.convert.huggingface.files import CONFIG, configuration
from unickpt.transform.convert.huggingface.model_files import configured_folder
from unickpt.transform.convert.huggingface.vllm import export_vllm
from unickpt.transform.convert.huggingface.writer import ExportedModel, as_huggingface, check_no_model, export
from unickpt.transform.convert.megatron import dist_writer
from unickpt.transform.convert.megatron.fsdp_writer import export_fsdp
from unickpt.transform.convert.torch_dcp import writer
from unickpt.transform.dialects.translated_checkpoint import OWN
from unickpt.transform.edit.merge_lora import ADAPTER_CONFIG
from unickpt.transform.edit.peft_adapter import AdapterSettings, export_adapter
from unickpt.transform.edit.table import table_of
from unickpt.transform.quantise.encoding import CastEncoding

JSON_SCHEMA = 1
FOLDERS = (HF, VLLM)  # folders of a model
MEGATRON = (TORCH_DIST, FSDP)


def run(args: argparse.Namespace, out: Output) -> int:
    """Export the checkpoint."""
    _check_options(args)
    directory = locate_checkpoint(args.directory)
    if args.to in FOLDERS:
        check_no_model(args.output)
    checkpoint = Checkpoint.open(directory)
    config = model_folder(args.config, directory)
    if args.to not in (DCP, PEFT) and not _keeps_names(checkpoint, args):
        under_names = dist_writer.as_megatron if args.to in MEGATRON else as_huggingface
        checkpoint = under_names(checkpoint, chosen=args.dialect, config=settings_of(config))
    lines = Output.for_lines(out, as_json=args.json)
    if checkpoint.unread:
        lines.line(f"left out, because no model reads them: {some(checkpoint.unread)}")
    problems = [] if args.no_verify else damage(checkpoint.storage, checkpoint.manifest, lines)
    made = None if problems else _exported(checkpoint, args, config, directory)
    if made is not None:
        _tell(made, args, config, lines)
    if args.json:
        out.json(_document(made, args, checkpoint, problems))
    return DAMAGED if problems else SOUND


def _keeps_names(checkpoint: Checkpoint, args: argparse.Namespace) -> bool:
    """Whether DeepSpeed trains the same module as the job that saved it, so that no name is translated."""
    return args.to == UNIVERSAL and checkpoint.manifest.writer.dialect == OWN and not (args.dialect or args.config)


def _exported(checkpoint: Checkpoint, args: argparse.Namespace, config: Path | None, directory: str) -> Exported:
    """Write the export.

    Raises:
        UnickptError: the output cannot be written.
    """
    try:
        if args.to == UNIVERSAL:
            with progress_bar("export", universal_writer.size_bytes(checkpoint)) as advance:
                return universal_writer.export(checkpoint, args.output, tag=args.tag, progress=advance)
        if args.to == PEFT:
            return _adapter(checkpoint, args, directory)
        if args.to == DCP:
            total = sum(info.size_bytes for info in checkpoint.index.tensors)
            with progress_bar("export", total) as advance:
                return writer.export_dcp(checkpoint, args.output, shard_bytes=_shard_bytes(args), progress=advance)
        return _megatron(checkpoint, args) if args.to in MEGATRON else _huggingface(checkpoint, args, config)
    except OSError as err:
        raise UnickptError(f"{args.output}: cannot be written ({err})") from err


def _adapter(checkpoint: Checkpoint, args: argparse.Namespace, directory: str) -> Exported:
    file = args.lora_config
    if file is None and args.lora_alpha is None:
        beside = [] if is_url(directory) else [Path(directory) / ADAPTER_CONFIG, Path(directory).parent / ADAPTER_CONFIG]
        file = next((path for path in beside if path.is_file()), None)
        if file is None:
            raise ConfigError(
                f"{directory}: has no {ADAPTER_CONFIG} beside it; pass --lora-config PATH, or --lora-alpha N to make one"
            )
    settings = AdapterSettings(file, args.lora_alpha or 0.0, args.lora_rslora, args.lora_base)
    dtype = torch_dtype(DTYPES[args.dtype]) if args.dtype else None
    with progress_bar("export", sum(info.size_bytes for info in checkpoint.index.tensors if "lora_" in info.name)) as advance:
        return export_adapter(
            table_of(checkpoint), args.output, settings, adapter=args.lora_adapter, dtype=dtype, progress=advance
        )


def _document(
    made: Exported | None, args: argparse.Namespace, checkpoint: Checkpoint, problems: Sequence[str]
) -> dict[str, Any]:
    written = {} if made is None else {**asdict(made), "folder": str(made.folder)}
    head = {"schema": JSON_SCHEMA, "ok": not problems, "to": args.to, "problems": list(problems)}
    return {**head, "left_out": list(checkpoint.unread), **written}


def _check_options(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not fit together."""
    to, output = args.to, args.output
    model = f"--to {HF} or {VLLM}"
    holds = f"{output}: is a unickpt checkpoint, and an export would add other files to it; name another directory"
    for wrong, text in (
        (
            to not in (*FOLDERS, PEFT) and args.dtype,
            f"--dtype needs {model} or {PEFT}: masters and optimizer states are exported as they are",
        ),
        (to not in FOLDERS and args.with_code, f"--with-code needs {model}"),
        (to != VLLM and args.bits, f"--bits needs --to {VLLM}"),
        (
            to == DCP and (args.config or args.dialect),
            f"--config and --dialect have no effect with --to {DCP}, which keeps all names",
        ),
        (to == PEFT and (args.config or args.dialect), f"--config and --dialect have no effect with --to {PEFT}"),
        (
            to != PEFT
            and (args.lora_config or args.lora_alpha is not None or args.lora_adapter or args.lora_base or args.lora_rslora),
            f"options of adapters need --to {PEFT}; to merge them: unickpt edit --merge-lora",
        ),
        (args.lora_config and args.lora_alpha is not None, "--lora-config and --lora-alpha exclude each other"),
        (
            args.lora_alpha is None and (args.lora_rslora or args.lora_base),
            "--lora-rslora and --lora-base need --lora-alpha; with --lora-config the file says it",
        ),
        (to != TORCH_DIST and args.expert_parallel, f"--expert-parallel needs --to {TORCH_DIST}"),
        (to != UNIVERSAL and args.tag, f"--tag needs --to {UNIVERSAL}"),
        (not args.shard_gigabytes > 0, f"--shard-gigabytes {args.shard_gigabytes:g}: expected a number above 0"),
        (output.exists() and not output.is_dir(), f"{output}: is a file; name a directory"),
        ((output / MANIFEST_FILE).exists(), holds),
    ):
        if wrong:
            raise ConfigError(text)


def _shard_bytes(args: argparse.Namespace) -> int:
    return int(args.shard_gigabytes * 1e9)


def _megatron(checkpoint: Checkpoint, args: argparse.Namespace) -> Exported:
    with progress_bar("export", dist_writer.size_bytes(checkpoint)) as advance:
        if args.to == FSDP:
            return export_fsdp(checkpoint, args.output, shard_bytes=_shard_bytes(args), progress=advance)
        separate = None if args.expert_parallel is None else args.expert_parallel == "yes"
        return dist_writer.export(
            checkpoint, args.output, separate_experts=separate, shard_bytes=_shard_bytes(args), progress=advance
        )


def _huggingface(checkpoint: Checkpoint, args: argparse.Namespace, config: Path | None) -> Exported:
    dtype = torch_dtype(DTYPES[args.dtype]) if args.dtype else None
    total = sum(info.size_bytes for info in checkpoint.index.tensors if info.state == "weight")
    common: dict[str, Any] = {"config_from": config, "with_code": args.with_code, "shard_bytes": _shard_bytes(args)}
    with progress_bar("export", total) as advance:
        if args.to == VLLM:
            return export_vllm(checkpoint, args.output, bits=args.bits or "16", dtype=dtype, progress=advance, **common)
        return export(checkpoint, args.output, encoding=CastEncoding(dtype), progress=advance, **common)


def _tell(made: Exported, args: argparse.Namespace, config: Path | None, out: Output) -> None:
    held = f"masters and states of {made.tensors:,} parameters" if args.to == UNIVERSAL else f"{made.tensors:,} tensors"
    files = f", in {counted_files(len(made.files))}" if made.files else ""
    out.line(f"{made.folder}: {held}, {human_bytes(made.size_bytes)}{files}", style="bold green")
    for note in made.notes:
        out.line(note)
    if isinstance(made, ExportedModel):
        _tell_model(made, args, config, out)


def _tell_model(made: ExportedModel, args: argparse.Namespace, config: Path | None, out: Output) -> None:
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
    """The folder of the model's configuration: what ``--config`` names, or that of the checkpoint."""
    if named is not None:
        return named.parent if named.name == CONFIG and named.is_file() else named
    return None if is_url(checkpoint) else configured_folder(Path(checkpoint))


def settings_of(folder: Path | None) -> dict[str, Any] | None:
    """Return the configuration of a folder; None for None. Raises FormatError if the folder has none."""
    if folder is None:
        return None
    found = configuration(folder)
    if not found:
        raise FormatError(f"{folder / CONFIG}: not a configuration of transformers; --config takes the folder of a model")
    return found
