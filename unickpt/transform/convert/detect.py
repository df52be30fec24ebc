"""Detection of a folder's checkpoint format, and the source that reads it.

A unickpt checkpoint is recognized first: its index and data files are safetensors files, so it would otherwise look like a
transformers model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unickpt.base.errors import NotACheckpointError
from unickpt.base.listing import some
from unickpt.checkpoint.checkpoint_folder import TRACKER, iteration_name
from unickpt.checkpoint.format.file_names import LATEST_FILE
from unickpt.checkpoint.format.layout import DATA_FOLDER, ROWS_FOLDER
from unickpt.checkpoint.format.manifest import FORMAT_NAME, MANIFEST_FILE
from unickpt.checkpoint.load.validation import newer_of_deepspeed
from unickpt.checkpoint.storage.open import open_storage
from unickpt.transform.convert.deepspeed.files import UNIVERSAL_LATEST, is_deepspeed
from unickpt.transform.convert.deepspeed.reader import deepspeed
from unickpt.transform.convert.deepspeed.universal_reader import deepspeed_universal, is_universal
from unickpt.transform.convert.huggingface.files import INDEX, SINGLE
from unickpt.transform.convert.huggingface.reader import huggingface
from unickpt.transform.convert.megatron.dist_reader import backend_of, megatron_dist
from unickpt.transform.convert.megatron.fsdp_reader import is_megatron_fsdp, megatron_fsdp
from unickpt.transform.convert.megatron.keys import BACKEND
from unickpt.transform.convert.megatron.torch_files import is_megatron_torch
from unickpt.transform.convert.megatron.torch_reader import megatron_torch
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
from unickpt.transform.convert.pipeline import Source
from unickpt.transform.convert.torch_dcp.reader import dcp, is_dcp

_POINTERS = (LATEST_FILE, TRACKER, UNIVERSAL_LATEST)
_MAX_TEXT_BYTES = 4096
_OUR_HEADER = b'{"__metadata__":{"format":"unickpt-'  # start of the header of every safetensors file of unickpt


@dataclass(frozen=True, slots=True)
class _Kind:
    """A checkpoint format: its name in messages, a test for a folder, and the function that opens it."""

    name: str
    is_kind: Callable[[Path], bool]
    open: Callable[..., Source]  # folder, files, also


def _is_transformers(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*.safetensors"))


TRANSFORMERS = _Kind("transformers", _is_transformers, lambda folder, files, **_: huggingface(folder, files))
# From the most specific to the most general: a universal folder also looks like DeepSpeed's, torch_dist like DCP's.
_KINDS = (
    _Kind("DeepSpeed universal", is_universal, deepspeed_universal),
    _Kind("DeepSpeed", is_deepspeed, deepspeed),
    _Kind("Megatron torch", is_megatron_torch, megatron_torch),
    _Kind("Megatron torch_dist", lambda folder: backend_of(folder) == BACKEND and is_dcp(folder), megatron_dist),
    _Kind("Megatron fsdp_dtensor", is_megatron_fsdp, megatron_fsdp),
    _Kind("torch.distributed.checkpoint", is_dcp, dcp),
    TRANSFORMERS,
)
_EXPECTED = (
    "expected one of: *.safetensors of transformers, mp_rank_*_model_states.pt of DeepSpeed, .metadata of "
    "torch.distributed.checkpoint or of Megatron's torch_dist or fsdp_dtensor, mp_rank_*/model_optim_rng.pt of Megatron"
)


def open_source(folder: Path, files: OpenFiles, *, also: Sequence[str] = ()) -> Source:
    """Open a checkpoint that another program wrote.

    Args:
        folder: the checkpoint, a save directory whose pointer file (``latest``, ...) names it, or ``model.safetensors`` or
            ``model.safetensors.index.json`` to select the transformers model in a folder that contains other things.
        files: open files to read through.
        also: additional class names that pickles may contain, as for ``safe_pickle.load``.

    Returns:
        The source. ``left_out`` names other checkpoints in the folder that are not read.

    Raises:
        NotACheckpointError: there is no known checkpoint, it is a unickpt checkpoint, or the choice is ambiguous.
        FormatError, OSError: the checkpoint cannot be read.
    """
    if folder.is_file() and folder.name in (SINGLE, INDEX):
        return huggingface(folder.parent, files)
    if not folder.is_dir():
        found = "is a file; pass the folder that contains it" if folder.exists() else "no such directory"
        raise NotACheckpointError(f"{folder}: {found}")
    _refuse_ours(folder)
    place = _pointed_at(folder)
    _refuse_ours(place)
    kinds = [kind for kind in _KINDS if kind.is_kind(place)]
    inside = _inside(place)
    if not kinds:
        raise NotACheckpointError(f"{place}: {_named(inside) or f'contains no checkpoint that can be converted; {_EXPECTED}'}")
    kind = kinds[0]
    tags = [
        name
        for name, format_name in inside.items()
        if kind is TRANSFORMERS and format_name != TRANSFORMERS.name and not _pointer(place / name)
    ]
    if tags:
        raise NotACheckpointError(
            f"{place}: contains a transformers model and the checkpoint {tags[0]} ({inside[tags[0]]}). Pass {place / tags[0]} "
            f"for the whole state, or {_weights_file(place)} for the weights of the model only"
        )
    source = kind.open(place, files, also=also)
    more = [f"the transformers model in {place}"] if kind is not TRANSFORMERS and TRANSFORMERS in kinds else []
    more = [f"the older checkpoint of unickpt in {place}"] if _ours(place) else more
    if kind is TRANSFORMERS and inside:
        more.append(f"{_some(inside)} in {place}: separate checkpoints; pass one of them to convert it")
    source.left_out = [*source.left_out, *more]
    return source


def kind_of(folder: Path) -> str:
    """Return the name of the format that ``open_source`` reads from a folder; '' if there is none.

    Looks at file names only. Never raises.
    """
    try:
        place = _pointed_at(folder)
        return "" if _ours(place) else next((kind.name for kind in _KINDS if kind.is_kind(place)), "")
    except (OSError, NotACheckpointError):
        return ""


def _refuse_ours(folder: Path) -> None:
    """Raise NotACheckpointError if a folder is a unickpt checkpoint, or a part of one, and DeepSpeed has not saved over it."""
    ours = _ours(folder)
    if ours and not newer_of_deepspeed(open_storage(folder)):
        raise NotACheckpointError(f"{folder}: {ours}")


def _ours(folder: Path) -> str:
    """Return why a folder of unickpt cannot be converted; '' if the folder is not one of unickpt."""
    parts = [folder / DATA_FOLDER, folder / ROWS_FOLDER]
    loose = next((path for path in sorted(folder.glob("*.safetensors")) if _our_file(path)), None)
    within = next((path for part in parts for path in sorted(part.glob("*.safetensors")) if _our_file(path)), None)
    if _our_manifest(folder) or ((loose or within) and (folder / MANIFEST_FILE).exists()):
        return (
            f"is already a unickpt checkpoint. Jobs load it under any parallel layout; copy it with cp -r. "
            f"'unickpt export {folder} FOLDER' writes it as a transformers model, or with --to in another format"
        )
    if within is not None:
        return (
            f"is a unickpt checkpoint without {MANIFEST_FILE}: its save did not finish, so it cannot be read. "
            f"'unickpt latest {folder.parent}' finds the newest complete checkpoint"
        )
    if loose is not None:
        return f"{loose.name} is a part of a unickpt checkpoint, not a model; pass the folder that contains {MANIFEST_FILE}"
    return ""


def _our_manifest(folder: Path) -> bool:
    """Return whether ``manifest.json`` is a manifest of unickpt. Other programs use the same file name."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(_MAX_TEXT_BYTES)
    return re.search(rb'"format"\s*:\s*' + re.escape(json.dumps(FORMAT_NAME).encode()), start) is not None


def _our_file(path: Path) -> bool:
    """Return whether a safetensors file is a data or index file of unickpt."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(8 + len(_OUR_HEADER))[8:] == _OUR_HEADER


def _inside(folder: Path) -> dict[str, str]:
    """Return the direct subfolders that are checkpoints or contain a pointer to one: format by folder name."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            try:
                place = _pointed_at(path)
                kind = "unickpt" if _ours(place) else kind_of(path)
            except NotACheckpointError:
                continue
            if kind:
                found[path.name] = kind
    return found


def _named(inside: dict[str, str]) -> str:
    """Return advice for a folder that is not a checkpoint but contains some; '' if it contains none."""
    if not inside:
        return ""
    if set(inside.values()) == {"unickpt"}:
        return f"contains unickpt checkpoints ({_some(inside)}), which need no conversion; jobs load them under any layout"
    return f"is not a checkpoint but contains some; pass one of them: {_some(inside)}"


def _some(inside: dict[str, str]) -> str:
    return some((f"{name} ({kind})" for name, kind in inside.items()))


def _weights_file(folder: Path) -> Path:
    return folder / (INDEX if (folder / INDEX).is_file() else SINGLE)


def _pointed_at(folder: Path) -> Path:
    """Return the folder that a pointer file names, or the folder itself without a pointer.

    Raises:
        NotACheckpointError: there are pointers, but the folders they name are missing.
    """
    pointers = _pointer(folder)
    for _, tag in pointers:
        if tag and "/" not in tag and tag not in (".", "..") and (folder / tag).is_dir():
            return folder / tag
    if pointers:
        name, tag = pointers[0]
        weights = _weights_file(folder)
        model = f", or {weights} for the weights of the transformers model only" if weights.is_file() else ""
        raise NotACheckpointError(
            f"{folder}: {name} names {tag[:80]!r}, which does not exist. Pass the folder of a checkpoint{model}"
        )
    return folder


def _pointer(folder: Path) -> list[tuple[str, str]]:
    """Return ``(file, folder name)`` of each pointer file in a folder."""
    found = []
    for name in _POINTERS:
        pointer = folder / name
        if pointer.is_file() and pointer.stat().st_size < _MAX_TEXT_BYTES:
            tag = pointer.read_text(encoding="utf-8", errors="replace").strip()
            tag = iteration_name(int(tag)) if tag.isdecimal() else tag  # Megatron writes an iteration, or "release"
            found.append((name, tag))
    return found
