"""The files of Megatron's ``torch`` format: ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``, and ``distrib_optim.pt`` beside it.

megatron/training/checkpointing.py: ``get_checkpoint_name`` and ``save_checkpoint``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unickpt.errors import FormatError, NotACheckpointError
from unickpt.foreign.located import Files
from unickpt.foreign.megatron_rules import written
from unickpt.foreign.megatron_state import arguments_of
from unickpt.foreign.pickles import load

MODEL, BUFFERS = "model_optim_rng.pt", "distrib_optim.pt"
MAX_FILES = 1 << 20
_LAYER_WISE = "layer_wise_optimizer_*.pt"


@dataclass(frozen=True)
class Sizes:
    """Parallel sizes: tensor, pipeline, expert; tensor parallel ranks of experts; data and context parallel ones together."""

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int
    data: int


@dataclass(frozen=True)
class Rank:
    """One rank's files.

    Attributes:
        tensor, pipeline, expert, expert_tensor: which rank.
        dense: whether what is no expert is taken from it: the others have the same.
        path: of its ``model_optim_rng.pt``.
        content: of that.
        chunks: state dicts of its chunks of the model.
    """

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int
    dense: bool
    path: Path
    content: Mapping[str, Any]
    chunks: Sequence[Mapping[str, Any]]

    @property
    def buffers(self) -> Path:
        """Where a distributed optimizer's state is."""
        return self.path.with_name(BUFFERS)


@dataclass(frozen=True)
class Job:
    """A folder. Attributes: where; arguments; sizes; ranks, by stage, and within one as they are numbered; what is left out."""

    folder: Path
    arguments: argparse.Namespace
    sizes: Sizes
    ranks: Sequence[Rank]
    left_out: list[str]

    @property
    def first(self) -> Rank:
        """Whose common state is that of the job."""
        return self.ranks[0]


def is_megatron_torch(folder: Path) -> bool:
    """Whether a folder is of an iteration of this format."""
    return folder.is_dir() and any(folder.glob(f"mp_rank_*/{MODEL}"))


def read_job(folder: Path, files: Files, also: Sequence[str]) -> Job:
    """All files of a folder, without the data of tensors.

    Args:
        folder: of the iteration.
        files, also: as of ``pickles.load``.

    Raises:
        NotACheckpointError: it is not such a folder.
        FormatError: a file is missing or damaged, or what it is of is not supported.
        OSError: one cannot be read.
    """
    found = sorted(folder.glob(f"mp_rank_*/{MODEL}"))
    if not found:
        raise NotACheckpointError(f"{folder}: no mp_rank_*/{MODEL} is there")
    wise = next(iter(sorted(folder.glob(f"mp_rank_*/{_LAYER_WISE}"))), None)
    if wise is not None:
        raise FormatError(f"{wise}: of the layer-wise optimizer, whose files are not read; {save_otherwise()}")
    left_out: list[str] = []
    head = _content(found[0], files, also)
    arguments = arguments_of(head, left_out.append)
    if arguments is None:
        raise FormatError(f"{found[0]}: has no arguments of Megatron's scripts ('args'), which tell the parallel sizes")
    sizes = _sizes(arguments, found[0])
    ranks = []
    for stage in range(sizes.pipeline):
        places = written(sizes.tensor, sizes.expert, sizes.expert_tensor)
        for number, ((tensor, expert), expert_tensor) in enumerate(places.items()):
            path = folder / _name(sizes, tensor, stage, expert) / MODEL
            if not path.is_file():
                raise FormatError(f"{path}: is not there; its arguments tell of {_told(sizes)} ranks")
            content = head if path == found[0] else _content(path, files, also)
            if content.get("iteration") != head.get("iteration"):
                raise FormatError(
                    f"{path}: of iteration {content.get('iteration')!r}; {found[0]} is of {head.get('iteration')!r}"
                )
            ranks.append(Rank(tensor, stage, expert, expert_tensor, number == tensor, path, content, _chunks(content, path)))
    extra = set(found) - {rank.path for rank in ranks}
    if extra:
        raise FormatError(f"{min(extra)}: is there, but the arguments tell of {_told(sizes)} ranks")
    return Job(folder, arguments, sizes, ranks, left_out)


def save_otherwise() -> str:
    """What a user can do about files that cannot be converted."""
    return (
        "load it once with Megatron itself, under the same parallel sizes, and save it with --ckpt-format torch_dist and "
        "--dist-ckpt-optim-fully-reshardable (or with --ckpt-format unickpt, which needs no conversion)"
    )


def _content(path: Path, files: Files, also: Sequence[str]) -> Mapping[str, Any]:
    content = load(path, files, also=also)
    if not isinstance(content, dict):
        raise FormatError(f"{path}: holds a {type(content).__name__}, not a dictionary")
    version = content.get("checkpoint_version", 3.0)
    if not isinstance(version, (int, float)) or version < 3.0:
        raise FormatError(f"{path}: of version {version!r} of Megatron's checkpoints; 3.0 is read: {save_otherwise()}")
    return content


def _sizes(arguments: argparse.Namespace, path: Path) -> Sizes:
    def size(name: str, default: int) -> int:
        found = getattr(arguments, name, None)
        if found is None:
            return default
        if type(found) is not int or not 0 < found < 1 << 20:
            raise FormatError(f"{path}: its arguments tell of {name} {found!r}")
        return found

    tensor = size("tensor_model_parallel_size", 1)
    pipeline, expert = size("pipeline_model_parallel_size", 1), size("expert_model_parallel_size", 1)
    context = size("context_parallel_size", 1)
    world = size("world_size", tensor * pipeline * context)
    found = Sizes(tensor, pipeline, expert, size("expert_tensor_parallel_size", tensor), max(world // (tensor * pipeline), 1))
    if found.pipeline * found.expert * found.expert_tensor > MAX_FILES:
        raise FormatError(f"{path}: its arguments tell of {_told(found)} ranks, more than {MAX_FILES:,} files")
    if len({place[0] for place in written(tensor, expert, found.expert_tensor)}) < tensor or found.expert_tensor > tensor:
        raise FormatError(
            f"{path}: with {tensor} tensor, {expert} expert and {found.expert_tensor} expert tensor parallel ranks, not every "
            f"tensor parallel rank has a file in this format of Megatron's; {save_otherwise()}"
        )
    return found


def _name(sizes: Sizes, tensor: int, stage: int, expert: int) -> str:
    return (
        f"mp_rank_{tensor:02d}"
        + (f"_{stage:03d}" if sizes.pipeline > 1 else "")
        + (f"_{expert:03d}" if sizes.expert > 1 else "")
    )


def _told(sizes: Sizes) -> str:
    return f"{sizes.tensor} tensor, {sizes.pipeline} pipeline and {sizes.expert} expert parallel"


def _chunks(content: Mapping[str, Any], path: Path) -> list[Mapping[str, Any]]:
    """``model``, or ``model0`` and so on with virtual pipeline stages."""
    keys = ["model"] if "model" in content else [f"model{at}" for at in range(sum(_is_chunk(key) for key in content))]
    found = [content.get(key) for key in keys]
    if not found or not all(isinstance(each, dict) for each in found):
        raise FormatError(f"{path}: has no state dict of a model ('model', or 'model0' and so on)")
    return [each for each in found if isinstance(each, dict)]


def _is_chunk(key: Any) -> bool:
    return isinstance(key, str) and key.startswith("model") and key.removeprefix("model").isdecimal()
