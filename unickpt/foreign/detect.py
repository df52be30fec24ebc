"""Which kind of checkpoint a folder holds, and the source that reads it.

A checkpoint of unickpt is recognized before anything else: its index and data files are safetensors files, which otherwise
pass for a model of transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unickpt.commit import DATA_FOLDER, ROWS_FOLDER
from unickpt.converting import Source
from unickpt.errors import NotACheckpointError
from unickpt.exporting import INDEX, SINGLE
from unickpt.foreign.dcp import dcp, is_dcp
from unickpt.foreign.deepspeed import deepspeed
from unickpt.foreign.deepspeed_files import is_deepspeed
from unickpt.foreign.deepspeed_universal import deepspeed_universal, is_universal
from unickpt.foreign.huggingface import huggingface
from unickpt.foreign.located import Files
from unickpt.foreign.megatron_dist import BACKEND, backend_of, megatron_dist
from unickpt.foreign.megatron_files import is_megatron_torch
from unickpt.foreign.megatron_torch import megatron_torch
from unickpt.manifest import FORMAT_NAME, MANIFEST_FILE

_POINTERS = ("latest", "latest_checkpointed_iteration.txt", "latest_universal")
_MAX_TEXT_BYTES = 4096
_OUR_HEADER = b'{"__metadata__":{"format":"unickpt-'  # how the header of every safetensors file of ours begins
_SHOWN = 8  # names in a message


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of checkpoint: its name in messages, how a folder of it is recognized, and how it is opened."""

    name: str
    is_kind: Callable[[Path], bool]
    open: Callable[[Path, Files, Sequence[str]], Source]


def _is_transformers(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*.safetensors"))


TRANSFORMERS = _Kind("transformers", _is_transformers, lambda folder, files, _: huggingface(folder, files))
# From the most specific to the most general one: a universal folder is also one of DeepSpeed's, torch_dist also DCP's.
_KINDS = (
    _Kind("DeepSpeed universal", is_universal, lambda folder, files, also: deepspeed_universal(folder, files, also=also)),
    _Kind("DeepSpeed", is_deepspeed, lambda folder, files, also: deepspeed(folder, files, also=also)),
    _Kind("Megatron torch", is_megatron_torch, lambda folder, files, also: megatron_torch(folder, files, also=also)),
    _Kind(
        "Megatron torch_dist",
        lambda folder: backend_of(folder) == BACKEND and is_dcp(folder),
        lambda folder, files, also: megatron_dist(folder, files, also=also),
    ),
    _Kind("torch.distributed.checkpoint", is_dcp, lambda folder, files, also: dcp(folder, files, also=also)),
    TRANSFORMERS,
)
_EXPECTED = (
    "expected one of: *.safetensors of transformers, mp_rank_*_model_states.pt of DeepSpeed, .metadata of "
    "torch.distributed.checkpoint or of Megatron's torch_dist, mp_rank_*/model_optim_rng.pt of Megatron"
)


def open_source(folder: Path, files: Files, *, also: Sequence[str] = ()) -> Source:
    """Open a checkpoint that another program wrote.

    Args:
        folder: the checkpoint, or a save directory whose pointer file (``latest``, ...) names it; or ``model.safetensors`` or
            ``model.safetensors.index.json``, which selects the transformers model among other things in its folder.
        files: reads the files.
        also: names of classes in pickles that may be read, as for ``pickles.load``.

    Returns:
        The source. ``left_out`` names other checkpoints beside it that are not read.

    Raises:
        NotACheckpointError: there is no known checkpoint, it is a checkpoint of unickpt, or several could be meant.
        FormatError, OSError: the checkpoint cannot be read.
    """
    if folder.is_file() and folder.name in (SINGLE, INDEX):
        return huggingface(folder.parent, files)
    if not folder.is_dir():
        found = "is a file; name the folder that holds it" if folder.exists() else "there is no such directory"
        raise NotACheckpointError(f"{folder}: {found}")
    _refuse_ours(folder)
    place = _pointed_at(folder)
    _refuse_ours(place)
    kinds = [kind for kind in _KINDS if kind.is_kind(place)]
    inside = _inside(place)
    if not kinds:
        raise NotACheckpointError(f"{place}: {_named(inside) or f'there is no checkpoint that can be converted; {_EXPECTED}'}")
    kind = kinds[0]
    tags = [
        name
        for name, told in inside.items()
        if kind is TRANSFORMERS and told != TRANSFORMERS.name and not _pointer(place / name)
    ]
    if tags:
        raise NotACheckpointError(
            f"{place}: holds a model of transformers and the checkpoint {tags[0]} ({inside[tags[0]]}). Name {place / tags[0]} "
            f"for all of its state, or {_weights_file(place)} for the weights of the model alone"
        )
    source = kind.open(place, files, also)
    more = [f"the model of transformers in {place}"] if kind is not TRANSFORMERS and TRANSFORMERS in kinds else []
    if kind is TRANSFORMERS and inside:
        more.append(f"{_some(inside)} in {place}: checkpoints of their own; name one of them to convert it")
    source.left_out = [*source.left_out, *more]
    return source


def kind_of(folder: Path) -> str:
    """The kind of checkpoint of another program that ``open_source`` reads from a folder; '' if there is none.

    Looks at names of files alone, and never raises.
    """
    try:
        place = _pointed_at(folder)
        return "" if _ours(place) else next((kind.name for kind in _KINDS if kind.is_kind(place)), "")
    except (OSError, NotACheckpointError):
        return ""


def _refuse_ours(folder: Path) -> None:
    """Raise NotACheckpointError if a folder is a checkpoint of unickpt, or a part of one."""
    ours = _ours(folder)
    if ours:
        raise NotACheckpointError(f"{folder}: {ours}")


def _ours(folder: Path) -> str:
    """Why a folder, as a part of unickpt's, is not converted; '' if it is none."""
    parts = [folder / DATA_FOLDER, folder / ROWS_FOLDER]
    loose = next((path for path in sorted(folder.glob("*.safetensors")) if _our_file(path)), None)
    within = next((path for part in parts for path in sorted(part.glob("*.safetensors")) if _our_file(path)), None)
    if _our_manifest(folder) or ((loose or within) and (folder / MANIFEST_FILE).exists()):
        return (
            f"is a checkpoint of unickpt already. Jobs load it as it is, under any parallel layout; copy it with cp -r. "
            f"'unickpt export {folder} FOLDER' writes it as a model of transformers, or with --to as another kind"
        )
    if within is not None:
        return (
            f"is a checkpoint of unickpt without {MANIFEST_FILE}: its save did not finish, so nothing can be read from it. "
            f"'unickpt latest {folder.parent}' finds the newest whole checkpoint"
        )
    if loose is not None:
        return f"{loose.name} is a part of a checkpoint of unickpt, not a model; name the folder that holds {MANIFEST_FILE}"
    return ""


def _our_manifest(folder: Path) -> bool:
    """Whether ``manifest.json`` is unickpt's: other programs have a file of that name, too."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(_MAX_TEXT_BYTES)
    return re.search(rb'"format"\s*:\s*' + re.escape(json.dumps(FORMAT_NAME).encode()), start) is not None


def _our_file(path: Path) -> bool:
    """Whether a safetensors file is a data or index file of unickpt."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(8 + len(_OUR_HEADER))[8:] == _OUR_HEADER


def _inside(folder: Path) -> dict[str, str]:
    """Folders directly in a folder that are checkpoints, or have a pointer to one: the kind of each by its name."""
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
    """What to do about a folder that is no checkpoint and holds some; '' if it holds none."""
    if not inside:
        return ""
    if set(inside.values()) == {"unickpt"}:
        return f"holds checkpoints of unickpt ({_some(inside)}), which need no conversion; jobs load them under any layout"
    return f"is no checkpoint, but holds some; name one of them: {_some(inside)}"


def _some(inside: dict[str, str]) -> str:
    names = [f"{name} ({kind})" for name, kind in inside.items()]
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else "")


def _weights_file(folder: Path) -> Path:
    return folder / (INDEX if (folder / INDEX).is_file() else SINGLE)


def _pointed_at(folder: Path) -> Path:
    """The folder that a pointer file names, or the folder itself without one.

    Raises:
        NotACheckpointError: there are pointers, and what they name is not there.
    """
    pointers = _pointer(folder)
    for _, tag in pointers:
        if tag and "/" not in tag and tag not in (".", "..") and (folder / tag).is_dir():
            return folder / tag
    if pointers:
        name, tag = pointers[0]
        weights = _weights_file(folder)
        model = f", or {weights} for the weights of the model of transformers alone" if weights.is_file() else ""
        raise NotACheckpointError(
            f"{folder}: {name} names {tag[:80]!r}, which is not there. Name the folder of a checkpoint{model}"
        )
    return folder


def _pointer(folder: Path) -> list[tuple[str, str]]:
    """(file, name of a folder) of each pointer file in a folder."""
    found = []
    for name in _POINTERS:
        pointer = folder / name
        if pointer.is_file() and pointer.stat().st_size < _MAX_TEXT_BYTES:
            tag = pointer.read_text(encoding="utf-8", errors="replace").strip()
            tag = f"iter_{int(tag):07d}" if tag.isdecimal() else tag  # Megatron's; or it is "release"
            found.append((name, tag))
    return found
