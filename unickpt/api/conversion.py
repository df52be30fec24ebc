"""Convert checkpoints of other programs, and export to them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unickpt.base.errors import ConfigError, CorruptCheckpointError
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.verify import verify_files
from unickpt.checkpoint.storage.base import is_url
from unickpt.transform.convert.deepspeed import universal_writer
from unickpt.transform.convert.detect import open_source
from unickpt.transform.convert.exported import Exported
from unickpt.transform.convert.huggingface import writer as huggingface_writer
from unickpt.transform.convert.huggingface.files import configuration
from unickpt.transform.convert.huggingface.model_files import configured_folder
from unickpt.transform.convert.huggingface.vllm import export_vllm
from unickpt.transform.convert.megatron import dist_writer
from unickpt.transform.convert.megatron.fsdp_writer import export_fsdp
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
from unickpt.transform.convert.pipeline import Converted, convert
from unickpt.transform.convert.torch_dcp import writer as dcp_writer
from unickpt.transform.quantise.encoding import CastEncoding

FORMATS = ("hf", "vllm", "deepspeed-universal", "dcp", "torch-dist", "fsdp-dtensor")


def convert_checkpoint(
    source: str | os.PathLike[str], directory: str | os.PathLike[str], *, take: Sequence[str] = (), workers: int = 2
) -> Converted:
    """Convert a checkpoint of another program into a unickpt checkpoint. No code of the source is run.

    Example:
        Convert a Hugging Face model::

            unickpt.convert_checkpoint("Llama-3.2-1B", "out/step0")

    Args:
        source: directory of a transformers model (safetensors), a DeepSpeed checkpoint (native or universal), a Megatron
            checkpoint (``torch_dist`` or ``torch``), or a ``torch.distributed.checkpoint`` directory; or the save directory
            above it.
        directory: output directory. An interrupted conversion in it is continued.
        take: further classes in pickles whose stored values are read, as ``module.Class``, or ``module.`` for all classes
            of a module.
        workers: number of files that are written at the same time.

    Returns:
        Number of files and tensors, and their size in bytes.

    Raises:
        NotACheckpointError: ``source`` holds no checkpoint of a known format.
        MismatchError: ``directory`` holds a checkpoint already.
        FormatError: the source is malformed, or a pickle has a class that is not allowed.
        CoverageError: the source has holes or overlaps. No checkpoint is written.
        OSError, StorageError: a file cannot be read or written.
    """
    with OpenFiles() as files:
        return convert(open_source(Path(source), files, also=take), Path(directory), workers=max(workers, 1))


@dataclass(frozen=True, slots=True)
class Export:
    """An exported checkpoint.

    Attributes:
        directory: directory that was written.
        size_bytes: size of all tensors.
        notes: differences from the checkpoint, one sentence each.
    """

    directory: Path
    size_bytes: int
    notes: tuple[str, ...]


def export_checkpoint(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    to: str = "hf",
    config: str | os.PathLike[str] | None = None,
    dialect: str = "",
    dtype: torch.dtype | None = None,
    bits: str | os.PathLike[str] = "16",
    shard_bytes: int = 5_000_000_000,
    verify: bool = True,
) -> Export:
    """Export a checkpoint to the format of another program.

    Example:
        Export the weights for ``from_pretrained``::

            unickpt.export_checkpoint("out/step100", "model", config="Llama-3.2-1B", dtype=torch.bfloat16)

    Args:
        directory: checkpoint directory. A path or a URL.
        output: output directory.
        to: format: ``hf`` (safetensors for transformers), ``vllm`` (the same, rounded to ``bits``), ``deepspeed-universal``,
            ``dcp`` (``torch.distributed.checkpoint``), ``torch-dist`` (Megatron) or ``fsdp-dtensor`` (Megatron FSDP).
        config: folder with the ``config.json`` of a model of the same kind. ``hf`` and ``vllm`` copy it and the tokenizer
            files. None: what the checkpoint keeps of its model, its folder, or the one above.
        dialect: model family, or file of a dialect, if neither checkpoint nor configuration names it.
        dtype: dtype of all floating-point weights that are not rounded, with ``hf`` and ``vllm`` only. None: as stored; with
            ``vllm``, bfloat16 for a model in float32.
        bits: with ``vllm`` only: bits of the weights of Linear modules, rounded to nearest: ``"4"`` and ``"8"`` in groups of
            128, ``"4/32"`` in groups of 32, ``"8/channel"`` with one scale for each row, ``"16"``, or a file with the plan of
            ``unickpt plan bits``.
        shard_bytes: maximum size of a file, in bytes.
        verify: check all checksums of the checkpoint first, which reads all of it.

    Returns:
        Directory, size in bytes, and notes.

    Raises:
        ConfigError: an option has no effect in this format, or the format is unknown.
        CorruptCheckpointError: the checkpoint is damaged. Nothing is written.
        LanguageError: no dialect is known for the model, or the dialect does not fit.
        MismatchError: ``output`` holds a model already, or the checkpoint lacks tensors that the format needs.
        OSError, StorageError: a file cannot be read or written.
    """
    if to not in FORMATS:
        raise ConfigError(f"to={to!r}: expected one of {', '.join(FORMATS)}")
    if bits != "16" and to != "vllm":
        raise ConfigError(f"bits has no effect with to={to!r}")
    if dtype is not None and to not in ("hf", "vllm"):
        raise ConfigError(f"dtype has no effect with to={to!r}: masters and optimizer states are exported as stored")
    if to == "dcp" and (config is not None or dialect):
        raise ConfigError("config and dialect have no effect with to='dcp', which keeps all names")
    folder, checkpoint = Path(output), Checkpoint.open(directory)
    if to != "dcp":
        if config is None and not is_url(directory):
            config = configured_folder(Path(directory))
        model: dict[str, Any] | None = None if config is None else configuration(Path(config))
        named = dist_writer.as_megatron if to in ("torch-dist", "fsdp-dtensor") else huggingface_writer.as_huggingface
        checkpoint = named(checkpoint, chosen=dialect, config=model)
    if verify:
        problems = verify_files(checkpoint.storage, checkpoint.manifest).problems
        if problems:
            raise CorruptCheckpointError("; ".join(problems))
    config_from = None if config is None else Path(config)
    made: Exported
    if to == "deepspeed-universal":
        made = universal_writer.export(checkpoint, folder)
    elif to in ("torch-dist", "fsdp-dtensor"):
        write = dist_writer.export if to == "torch-dist" else export_fsdp
        made = write(checkpoint, folder, shard_bytes=shard_bytes)
    elif to == "dcp":
        made = dcp_writer.export_dcp(checkpoint, folder, shard_bytes=shard_bytes)
    elif to == "vllm":
        made = export_vllm(checkpoint, folder, bits=bits, dtype=dtype, config_from=config_from, shard_bytes=shard_bytes)
    else:
        made = huggingface_writer.export(
            checkpoint, folder, config_from=config_from, encoding=CastEncoding(dtype), shard_bytes=shard_bytes
        )
    tied = made.tied if isinstance(made, huggingface_writer.ExportedModel) else ()
    return Export(made.folder, made.size_bytes, (*made.notes, *([f"tied, not written: {', '.join(tied)}"] if tied else ())))
