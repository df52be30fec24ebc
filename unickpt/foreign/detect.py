"""What a folder holds, and the source that it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unickpt.converting import Source
from unickpt.errors import NotACheckpointError
from unickpt.foreign.dcp import dcp, is_dcp
from unickpt.foreign.deepspeed import deepspeed
from unickpt.foreign.deepspeed_files import is_deepspeed
from unickpt.foreign.deepspeed_universal import deepspeed_universal, is_universal
from unickpt.foreign.huggingface import huggingface
from unickpt.foreign.located import Files
from unickpt.foreign.megatron_dist import BACKEND, backend_of, megatron_dist
from unickpt.foreign.megatron_files import MODEL, is_megatron_torch
from unickpt.foreign.megatron_torch import megatron_torch
from unickpt.loading import is_checkpoint

_POINTERS = ("latest", "latest_checkpointed_iteration.txt", "latest_universal")


def open_source(folder: Path, files: Files, *, also: Sequence[str] = ()) -> Source:
    """A checkpoint of others.

    Args:
        folder: with its files, or of a training with a pointer to the newest one.
        files: through which it is read.
        also: classes in pickles, as of ``pickles.load``.

    Raises:
        NotACheckpointError: it holds none that is known.
        FormatError, OSError: it cannot be read.
    """
    folder = _pointed_at(folder)
    if is_universal(folder):
        return deepspeed_universal(folder, files, also=also)
    if is_deepspeed(folder):
        return deepspeed(folder, files, also=also)
    if is_megatron_torch(folder):
        return megatron_torch(folder, files, also=also)
    if backend_of(folder) == BACKEND and is_dcp(folder):
        return megatron_dist(folder, files, also=also)
    if is_dcp(folder):
        return dcp(folder, files, also=also)
    if folder.is_dir() and any(folder.glob("*.safetensors")):
        return huggingface(folder, files)
    if is_checkpoint(folder):
        raise NotACheckpointError(f"{folder}: is a checkpoint of unickpt already")
    raise NotACheckpointError(
        f"{folder}: neither safetensors files of transformers are there nor mp_rank_*_model_states.pt of DeepSpeed nor "
        f".metadata of torch.distributed.checkpoint (also Megatron's torch_dist) nor mp_rank_*/{MODEL} of Megatron"
    )


def _pointed_at(folder: Path) -> Path:
    for name in _POINTERS:
        pointer = folder / name
        if pointer.is_file() and pointer.stat().st_size < 4096:
            tag = pointer.read_text(encoding="utf-8", errors="replace").strip()
            tag = f"iter_{int(tag):07d}" if tag.isdecimal() else tag  # Megatron's; or it is "release"
            if tag and "/" not in tag and tag not in (".", "..") and (folder / tag).is_dir():
                return folder / tag
    return folder
