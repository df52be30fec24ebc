"""Which ranks hold the same tensor or object, as far as a rank cannot know it alone.

A plain tensor says nothing of the other ranks. A DTensor knows the ranks of its mesh. If that is a part of a larger mesh, such
as FSDP beside tensor parallelism, other parts may hold copies of a tensor, or other tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from unickpt.api.group import Group
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Holders:
    """The ranks of a save that hold the same.

    Attributes:
        world: number of ranks.
        others: ranks by key, ascending, if the ranks have different keys; None: every rank has all.
        twins: of a mesh of this rank, by its ranks: all meshes that hold the same tensors, in the same order.
    """

    world: int = 1
    others: Mapping[str, Ranks] | None = field(default=None, repr=False)
    twins: Mapping[Ranks, Sequence[Ranks]] = field(default_factory=dict, repr=False)
    _known: dict[tuple[Ranks, Ranks], Ranks] = field(default_factory=dict, repr=False)

    def of(self, key: str) -> Ranks | range:
        """Return the ranks with a key, ascending."""
        return range(self.world) if self.others is None else self.others.get(key, ())

    def first(self, key: str) -> int:
        """Return the first rank with a key."""
        return next(iter(self.of(key)), 0)

    def copies(self, value: Any, ranks: Ranks, group: Group) -> Ranks:
        """Return the ranks of a group with the same box of a DTensor as this rank. ``ranks``: those of its mesh alone."""
        if not self.twins:
            return ranks
        mesh = ranks_of(value.device_mesh)
        every = self.twins.get(mesh, ())
        if len(every) < 2:
            return ranks
        if (mesh, ranks) in self._known:
            return self._known[mesh, ranks]
        places = [at for at, rank in enumerate(group.among((each,))[:1] for each in mesh) if rank and rank[0] in ranks]
        self._known[mesh, ranks] = group.among(other[place] for other in every for place in places)
        return self._known[mesh, ranks]


@lru_cache(maxsize=64)
def ranks_of(mesh: Any) -> Ranks:
    """Return the global ranks of a device mesh, in row-major order."""
    return tuple(mesh.mesh.reshape(-1).tolist())


def mesh_digests(tensors: Iterable[tuple[Any, Any]]) -> dict[Ranks, str]:
    """Return a digest of the DTensors of each mesh of this rank, by its ranks. It is equal on meshes with the same tensors.

    Args:
        tensors: names and DTensors.
    """
    found: dict[int, tuple[Any, list[str]]] = {}
    for key, value in tensors:
        text = f"{key} {tuple(value.shape)} {value.placements}"
        found.setdefault(id(value.device_mesh), (value.device_mesh, []))[1].append(text)
    lists: dict[Ranks, list[str]] = {}
    for mesh, texts in found.values():
        lists.setdefault(ranks_of(mesh), []).extend(f"{tuple(mesh.shape)} {text}" for text in texts)
    return {ranks: _digest(sorted(texts)) for ranks, texts in lists.items()}


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a rank.

    Attributes:
        sorted: the keys.
        digest: of them.
    """

    sorted: Sequence[str] = field(repr=False)
    digest: str

    @classmethod
    def of(cls, keys: Iterable[str]) -> Keys:
        own = sorted(keys)
        return cls(own, _digest(own))


def agreed_holders(exchange: MessageExchange, keys: Keys | None, meshes: Mapping[Ranks, str] | None = None) -> Holders:
    """Find out which ranks have which keys, and which meshes hold the same. Every rank calls this.

    The ranks compare digests. They exchange their keys only if these differ, such as between pipeline stages.

    Args:
        exchange: of the save.
        keys: of this rank. None: this rank failed before it knew them, and the save will say so.
        meshes: ``mesh_digests``.
    """
    message = {"digest": None if keys is None else keys.digest, "meshes": [[_packed(r), d] for r, d in (meshes or {}).items()]}

    def compared(messages: list[Message]) -> Message:
        digests = {each["digest"] for each in messages}
        same: dict[str, list[Any]] = {}
        for each in messages:
            for ranks, digest in each["meshes"]:
                if ranks not in same.setdefault(digest, []):
                    same[digest].append(ranks)
        return {"exchange": None not in digests and len(digests) > 1, "twins": {k: v for k, v in same.items() if len(v) > 1}}

    verdict = exchange.combined("keys", message, compared)
    every = {digest: [_unpacked(each) for each in packed] for digest, packed in verdict["twins"].items()}
    twins = {ranks: every[digest] for ranks, digest in (meshes or {}).items() if digest in every}
    if not verdict["exchange"]:
        return Holders(exchange.world, twins=twins)

    def collected(messages: list[Message]) -> Message:
        found: dict[str, list[int]] = {}
        for rank, each in enumerate(messages):
            for key in each["keys"]:
                found.setdefault(key, []).append(rank)
        return {"holders": found}

    holders = exchange.combined("all-keys", {"keys": None if keys is None else keys.sorted}, collected)["holders"]
    return Holders(exchange.world, {key: tuple(ranks) for key, ranks in holders.items()}, twins)


def _packed(ranks: Ranks) -> list[Any]:
    """Return the ranks of a mesh in a short form: ``[first, [[size, stride], ...]]``, or ``[list]`` if they are not regular."""
    shape: list[list[int]] = []
    rest = list(ranks)
    while len(rest) > 1:
        stride = rest[1] - rest[0]
        size = next((at for at in range(1, len(rest)) if rest[at] - rest[at - 1] != stride), len(rest))
        if len(rest) % size or (size == 1):
            return [rest] if not shape else [list(ranks)]
        shape.insert(0, [size, stride])
        rest = rest[::size]
    packed = [ranks[0], shape]
    return packed if _unpacked(packed) == ranks else [list(ranks)]


def _unpacked(packed: Sequence[Any]) -> Ranks:
    if len(packed) == 1:
        return tuple(packed[0])
    first, shape = packed
    sizes = [size for size, _ in shape]
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, stride in shape:
        offsets = offsets[..., None] + torch.arange(size, device="cpu") * stride
    assert offsets.numel() == math.prod(sizes)
    return tuple((offsets.reshape(-1) + first).tolist())
