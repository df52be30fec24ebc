"""Random generators that ranks store for their positions (``ShardedObject``), in a job with other positions.

Follows the rule of ``unickpt.checkpoint.load.rng``. Seeds of different positions differ as in Megatron (``_set_random_seed`` in
megatron/training/initialize.py, ``model_parallel_cuda_manual_seed``): ranks of a tensor parallel group need equal numbers
outside of the tensor parallel regions, and different ones inside.

The form of the object is the caller's: dicts and lists of states of Python, NumPy, torch and Megatron's trackers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_unickpt.held_state.positions import Found, PositionFree, same
from unickpt.checkpoint.format.topology import describe
from unickpt.checkpoint.load import rng

_KEY = re.compile(r"(?:^|[._])rng(?:[._]|$)")  # rng_state of Megatron's scripts and verl, unickpt_rng
_MODEL_PARALLEL, _EXPERT_PARALLEL = "model-parallel-rng", "expert-parallel-rng"  # tracker names, tensor_parallel/random.py
_DATA = "data parallel"
_DIMENSIONS = ("pipeline", "tensor", "expert", "expert_tensor")  # of a layout, on which the seeds of trackers depend
_PYTHON_WORDS, _CPU_BYTES, _CUDA_BYTES = 625, torch.Generator().get_state().numel(), 16


def are_in(item: ShardedObject) -> bool:
    """Whether an object has generators, by its key."""
    return _KEY.search(item.key) is not None and not isinstance(item, PositionFree)


@dataclass(frozen=True, slots=True)
class StoredGenerators:
    """The generators of one key in a checkpoint.

    Attributes:
        names: unique keys of the objects, by position; not empty.
        read: reads the object of a unique key.
        layout: parallel degrees of the job that saved.
    """

    names: tuple[str, ...]
    read: Callable[[str], Any]
    layout: Mapping[str, Any]

    @property
    def first(self) -> Any:
        """The generators of the first position. All ranks seed from them."""
        return self.read(min(self.names, key=lambda name: ShardedObject.empty_from_unique_key(name).global_offset))


@dataclass
class _Seeds:
    """Seeds of one position, and how many states they were used for."""

    base: int
    place: Mapping[str, int]
    data: int = 0
    used: int = field(default=0)

    def of(self, tracker: str) -> int:
        self.used += 1
        seed = self.base + 100 * self.place["pipeline"] + 10 * self.data
        if tracker == _MODEL_PARALLEL:
            return seed + 2718 + self.place["tensor"]
        if tracker == _EXPERT_PARALLEL:
            return seed + 1024 + 100 * self.place["expert"] + self.place["expert_tensor"]
        return seed


def found_for(item: ShardedObject, stored: StoredGenerators, layout: Mapping[str, Any], place: Mapping[str, int]) -> Found:
    """Return the generators of a rank.

    Args:
        item: the request, whose data are the job's own generators, or None.
        stored: what the checkpoint has.
        layout: parallel degrees of this job.
        place: this rank's position in the dimensions of ``layout``.
    """
    if item.global_shape == (1,) and item.unique_key in stored.names:  # one for the whole job, such as a sampler's
        return Found(stored.read(item.unique_key))
    if any(key in stored.layout and int(stored.layout[key]) != int(layout.get(key, 1)) for key in _DIMENSIONS):
        return _seeded(item, stored, layout, place)
    if item.unique_key in stored.names:
        value = stored.read(item.unique_key)
        return _of_more_ranks(item, value, stored, place) if _has_more(item.data, value) else Found(value)
    if len(item.global_shape) == 3:  # pipeline, tensor and data parallel
        return _of_other_data_ranks(item, stored, layout, place)
    return _seeded(item, stored, layout, place)


def seeded(value: Any, place: Mapping[str, int]) -> Any:
    """Return generators that are seeded from stored ones and a position; None for a value without generators."""
    looked = _Seeds(0, place)
    _states(value, looked)
    return _states(value, _Seeds(rng.seed_from(value), place)) if looked.used else None


def _has_more(own: Any, stored: Any) -> bool:
    """Whether this job has more data parallel ranks in a list of the generators of all (``--data-parallel-random-init``)."""
    return isinstance(own, list) and isinstance(stored, list) and len(own) > len(stored) > 0


def _of_more_ranks(item: ShardedObject, value: list[Any], stored: StoredGenerators, place: Mapping[str, int]) -> Found:
    before, now = len(value), len(item.data)
    base = rng.seed_from(stored.first)
    new = [_states(own, _Seeds(base, place, at)) for at, own in enumerate(item.data[before:], before)]
    how = f"{rng.kept(before, now)}, the others are seeded with {base} (from those of rank 0) and their position"
    return Found([*value, *new], reason=rng.change(rng.counted(before, _DATA), str(now), how), outcome="re-seeded")


def _of_other_data_ranks(
    item: ShardedObject, stored: StoredGenerators, layout: Mapping[str, Any], place: Mapping[str, int]
) -> Found:
    """Return the generators under another data parallel size, where every data parallel rank stores its own."""
    *here, data = item.global_offset
    shape = item.global_shape
    known = [ShardedObject.empty_from_unique_key(name) for name in stored.names]
    counts = {each.global_shape[2] for each in known if len(each.global_shape) == 3 and each.global_shape[:2] == shape[:2]}
    if len(counts) != 1:
        return _seeded(item, stored, layout, place)
    before = counts.pop()
    names = [replace(item, global_shape=(*shape[:2], before), global_offset=(*here, at)).unique_key for at in (data, 0, 1)]
    if not all(name in stored.names for name in names[1 : 1 + min(before, 2)]):
        return _seeded(item, stored, layout, place)
    ranks = rng.counted(before, _DATA)
    if data < before and names[0] in stored.names:
        return Found(
            stored.read(names[0]), reason=rng.change(ranks, str(shape[2]), rng.kept(before, shape[2])), outcome="re-seeded"
        )
    first = stored.read(names[1])
    if before > 1 and same(first, stored.read(names[2])):
        how = "all ranks shared one state, and still share it"
        return Found(first, reason=rng.change(ranks, str(shape[2]), how), outcome="re-seeded")
    return _seeded(item, stored, layout, place, data=data)


def _seeded(
    item: ShardedObject, stored: StoredGenerators, layout: Mapping[str, Any], place: Mapping[str, int], *, data: int = 0
) -> Found:
    """Return generators that are seeded from the first stored ones and the position."""
    first = stored.first
    own = first if item.data is None else item.data
    seeds = _Seeds(rng.seed_from(first), place, data)
    if isinstance(own, list):
        each = [replace(seeds, data=at if len(own) > 1 else data) for at in range(len(own))]
        value: Any = [_states(state, mine) for state, mine in zip(own, each, strict=True)]
        used = sum(mine.used for mine in each)
    else:
        value, used = _states(own, seeds), seeds.used
    if not used:
        return Found(refused=True, reason=f"it has {', '.join(stored.names[:4])}, in a form of generators that is not known")
    how = f"seeded with {seeds.base} (from those of the first rank) and the position"
    return Found(value, reason=rng.change(describe(stored.layout), describe(layout), how), outcome="re-seeded")


def _states(own: Any, seeds: _Seeds, name: str = "") -> Any:
    """Return a tree of generators in the form of ``own``, with new seeds. Other values are ``own``'s."""
    if rng.is_state(own):
        return rng.of_seed(seeds.of(name), own)
    if isinstance(own, Mapping):
        if "bit_generator" in own:
            return np.random.RandomState(seeds.of(name) % 2**32).get_state(legacy=False)
        return {key: _states(value, seeds, str(key)) for key, value in own.items()}
    if isinstance(own, torch.Generator):
        return torch.Generator(device=own.device).manual_seed(seeds.of(name))
    if isinstance(own, torch.Tensor) and own.dtype == torch.uint8 and own.numel() in (_CPU_BYTES, _CUDA_BYTES):
        seed = seeds.of(name)
        return torch.Generator().manual_seed(seed).get_state() if own.numel() == _CPU_BYTES else rng.cuda_of_seed(seed)
    if isinstance(own, tuple) and len(own) == 5 and own[0] == "MT19937":
        return np.random.RandomState(seeds.of(name) % 2**32).get_state(legacy=True)
    if isinstance(own, tuple) and len(own) == 3 and isinstance(own[1], (tuple, list)) and len(own[1]) == _PYTHON_WORDS:
        return random.Random(seeds.of(name)).getstate()
    if isinstance(own, list):
        return [_states(value, seeds, name) for value in own]
    return own
