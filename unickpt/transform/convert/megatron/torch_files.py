"""Files of Megatron's ``torch`` format: ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` and ``distrib_optim.pt``.

See ``get_checkpoint_name`` and ``save_checkpoint`` in megatron/training/checkpointing.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unickpt.base.errors import FormatError, NotACheckpointError
from unickpt.transform.convert.megatron.common_state import arguments_of
from unickpt.transform.convert.megatron.shard_rules import writing_ranks
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
from unickpt.transform.convert.pickles.safe_pickle import load

MODEL, BUFFERS = "model_optim_rng.pt", "distrib_optim.pt"
MAX_FILES = 1 << 20
_LAYER_WISE = "layer_wise_optimizer_*.pt"


@dataclass(frozen=True)
class ParallelSizes:
    """Parallel sizes. ``data`` is the number of data and context parallel ranks."""

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int
    data: int


@dataclass(frozen=True)
class MegatronRank:
    """Files of one rank.

    Attributes:
        tensor, pipeline, expert, expert_tensor: parallel ranks.
        dense: whether dense parameters are read from this rank. Other ranks have replicas.
        path: path of its ``model_optim_rng.pt``.
        content: content of that file.
        chunks: state dicts of its model chunks.
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
        """File with the state of a distributed optimizer."""
        return self.path.with_name(BUFFERS)


@dataclass(frozen=True)
class MegatronFolder:
    """Files of an iteration.

    Attributes:
        folder: folder of the iteration.
        arguments: arguments of the job.
        sizes: parallel sizes.
        ranks: ranks by stage, and within a stage by number.
        left_out: state that is not converted, with the reason.
    """

    folder: Path
    arguments: argparse.Namespace
    sizes: ParallelSizes
    ranks: Sequence[MegatronRank]
    left_out: list[str]

    @property
    def first(self) -> MegatronRank:
        """The rank whose common state describes the job."""
        return self.ranks[0]


def is_megatron_torch(folder: Path) -> bool:
    """Return whether a folder is an iteration in this format."""
    return folder.is_dir() and any(folder.glob(f"mp_rank_*/{MODEL}"))


def read_job(folder: Path, files: OpenFiles, also: Sequence[str]) -> MegatronFolder:
    """Read all files of an iteration, without the elements of tensors.

    Args:
        folder: folder of the iteration.
        files, also: as in ``safe_pickle.load``.

    Raises:
        NotACheckpointError: the folder does not have this format.
        FormatError: a file is missing, damaged or not supported.
        OSError: a file cannot be read.
    """
    found = sorted(folder.glob(f"mp_rank_*/{MODEL}"))
    if not found:
        raise NotACheckpointError(f"{folder}: has no file mp_rank_*/{MODEL}")
    wise = next(iter(sorted(folder.glob(f"mp_rank_*/{_LAYER_WISE}"))), None)
    if wise is not None:
        raise FormatError(f"{wise}: the layer-wise optimizer is not supported; {save_otherwise()}")
    left_out: list[str] = []
    head = _content(found[0], files, also)
    arguments = arguments_of(head, left_out.append)
    if arguments is None:
        raise FormatError(f"{found[0]}: has no arguments of Megatron's scripts ('args'), which contain the parallel sizes")
    sizes = _sizes(arguments, found[0])
    ranks = []
    for stage in range(sizes.pipeline):
        places = writing_ranks(sizes.tensor, sizes.expert, sizes.expert_tensor)
        for number, ((tensor, expert), expert_tensor) in enumerate(places.items()):
            path = folder / _name(sizes, tensor, stage, expert) / MODEL
            if not path.is_file():
                raise FormatError(f"{path}: is missing; by the arguments the job has {_sizes_text(sizes)} ranks")
            content = head if path == found[0] else _content(path, files, also)
            if content.get("iteration") != head.get("iteration"):
                raise FormatError(
                    f"{path}: has iteration {content.get('iteration')!r}, {found[0]} has {head.get('iteration')!r}"
                )
            ranks.append(
                MegatronRank(tensor, stage, expert, expert_tensor, number == tensor, path, content, _chunks(content, path))
            )
    extra = set(found) - {rank.path for rank in ranks}
    if extra:
        raise FormatError(f"{min(extra)}: does not belong to the job, which by its arguments has {_sizes_text(sizes)} ranks")
    return MegatronFolder(folder, arguments, sizes, ranks, left_out)


def save_otherwise() -> str:
    """Return advice for files that cannot be converted."""
    return (
        "load the checkpoint in Megatron under the same parallel sizes, and save it with --ckpt-format torch_dist and "
        "--dist-ckpt-optim-fully-reshardable (or with --ckpt-format unickpt, which needs no conversion)"
    )


def _content(path: Path, files: OpenFiles, also: Sequence[str]) -> Mapping[str, Any]:
    content = load(path, files, also=also)
    if not isinstance(content, dict):
        raise FormatError(f"{path}: contains a {type(content).__name__}, expected a dictionary")
    version = content.get("checkpoint_version", 3.0)
    if not isinstance(version, (int, float)) or version < 3.0:
        raise FormatError(f"{path}: has checkpoint_version {version!r}, expected 3.0: {save_otherwise()}")
    return content


def _sizes(arguments: argparse.Namespace, path: Path) -> ParallelSizes:
    def size(name: str, default: int) -> int:
        found = getattr(arguments, name, None)
        if found is None:
            return default
        if type(found) is not int or not 0 < found < 1 << 20:
            raise FormatError(f"{path}: the argument {name} is {found!r}, expected a positive number")
        return found

    tensor = size("tensor_model_parallel_size", 1)
    pipeline, expert = size("pipeline_model_parallel_size", 1), size("expert_model_parallel_size", 1)
    context = size("context_parallel_size", 1)
    world = size("world_size", tensor * pipeline * context)
    found = ParallelSizes(
        tensor, pipeline, expert, size("expert_tensor_parallel_size", tensor), max(world // (tensor * pipeline), 1)
    )
    if found.pipeline * found.expert * found.expert_tensor > MAX_FILES:
        raise FormatError(f"{path}: by its arguments the job has {_sizes_text(found)} ranks, more than {MAX_FILES:,} files")
    if len({place[0] for place in writing_ranks(tensor, expert, found.expert_tensor)}) < tensor or found.expert_tensor > tensor:
        raise FormatError(
            f"{path}: with {tensor} tensor, {expert} expert and {found.expert_tensor} expert tensor parallel ranks, some "
            f"tensor parallel ranks have no file in this format; {save_otherwise()}"
        )
    return found


def _name(sizes: ParallelSizes, tensor: int, stage: int, expert: int) -> str:
    return (
        f"mp_rank_{tensor:02d}"
        + (f"_{stage:03d}" if sizes.pipeline > 1 else "")
        + (f"_{expert:03d}" if sizes.expert > 1 else "")
    )


def _sizes_text(sizes: ParallelSizes) -> str:
    return f"{sizes.tensor} tensor, {sizes.pipeline} pipeline and {sizes.expert} expert parallel"


def _chunks(content: Mapping[str, Any], path: Path) -> list[Mapping[str, Any]]:
    """Return the state dicts of the chunks: ``model``, or ``model0`` and so on with virtual pipeline stages."""
    keys = ["model"] if "model" in content else [f"model{at}" for at in range(sum(is_chunk(key) for key in content))]
    found = [content.get(key) for key in keys]
    if not found or not all(isinstance(each, dict) for each in found):
        raise FormatError(f"{path}: has no state dict of a model ('model', or 'model0' and so on)")
    return [each for each in found if isinstance(each, dict)]


def is_chunk(key: Any) -> bool:
    """Return whether a key of a file holds a state dict of the model: ``model``, or ``model0`` and so on."""
    number = key.removeprefix("model") if isinstance(key, str) and key.startswith("model") else "none"
    return number == "" or number.isdecimal()
