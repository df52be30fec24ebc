"""All-gather of flat tensors between the ranks of one host, through the shared memory of a load.

A rank copies its part into its slots of the shared memory, and every other rank of the group copies it from there. The slots
are small, so both copies find the bytes in the cache of the processor. No message carries the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from unickpt.base.errors import HostPeerFailedError
from unickpt.checkpoint.coordination.host_peers import CONSUMED, READY, HostPeers

_SLOTS = 4  # per rank. A rank fills round N + 1 when all have filled round N - 1, so when all have copied round N - 3
_SLOT_BYTES = 512 << 10
_ALIGNMENT = 64  # of a part in the stream of its rank, so that no slot splits an element
_ELSEWHERE = -1


@dataclass(frozen=True, slots=True)
class SplitTensor:
    """A flat tensor of which each rank of a group has computed one part.

    Attributes:
        ranks: job ranks of the group, in the order of their parts.
        me: position of this rank in ``ranks``.
        parts: one part per rank: 1-D tensors of equal size and dtype.
        source: values of this rank's part, in any dtype. The own part receives them cast, as by ``copy_``.
    """

    ranks: tuple[int, ...]
    me: int
    parts: Sequence[torch.Tensor]
    source: torch.Tensor

    @property
    def part_bytes(self) -> int:
        return self.parts[0].numel() * self.parts[0].element_size()

    def is_within(self, host_peers: HostPeers) -> bool:
        """Whether the ranks of this host can gather the tensor through their memory."""
        own = self.parts[self.me]
        equal = all(part.numel() == own.numel() and part.dtype == own.dtype for part in self.parts)
        dense = all(part.is_cpu and part.is_contiguous() for part in self.parts)
        return equal and dense and self.source.numel() == own.numel() and set(self.ranks) <= set(host_peers.ranks)


def gather(host_peers: HostPeers, tensors: Sequence[SplitTensor] | None, *, filled: bool = False) -> bool:
    """Fill all parts of all tensors, if the groups of all tensors of all ranks of this host lie within this host.

    Every rank of the host must call this, also without tensors. The values are those of an all-gather after
    ``parts[me].copy_(source)``.

    Args:
        host_peers: ranks of this host, and their shared memory.
        tensors: tensors of which this rank has a part, in an order that is the same on all ranks of their groups. None: this
            rank must gather in another way.
        filled: this rank has filled all parts in another way. If all ranks of the host have, nothing is copied.

    Returns:
        Whether the parts are filled; the same on all ranks of the host. If not, no tensor has changed.

    Raises:
        HostPeerFailedError: another rank of the host failed.
    """
    slots = _Slots(host_peers)
    mine = None if tensors is None or not all(tensor.is_within(host_peers) for tensor in tensors) else list(tensors)
    found = slots.exchange([int(filled), *_table(mine, slots.size_bytes - 8)])
    tables = [table[1:] for table in found]
    if mine is None or any(table[0] == _ELSEWHERE for table in tables):  # ranks of other hosts wait for this one
        return False
    if all(table[0] for table in found):
        return True
    for tensor in mine:
        if len(tensor.ranks) == 1:
            tensor.parts[0].copy_(tensor.source)
    mine = [tensor for tensor in mine if len(tensor.ranks) > 1]
    at_rank = dict(zip(host_peers.ranks, tables, strict=True))
    own = [(at, tensor) for (_, _, at), tensor in zip(_places(at_rank[host_peers.ranks[host_peers.me]]), mine, strict=True)]
    others = list(_others(mine, at_rank))
    rounds, copied = -(-max(table[0] for table in tables) // slots.size_bytes), 0
    for number in range(rounds):
        while copied < min(rounds, number + 2):
            slot, begin = slots.own(copied), copied * slots.size_bytes
            for at, tensor in own:
                _fill(tensor, at, begin, slot)
            slots.filled(copied)
            copied += 1
        slots.wait_filled(number)
        begin = number * slots.size_bytes
        for rank, at, part in others:
            lo, hi = max(at, begin), min(at + len(part), begin + slots.size_bytes)
            if lo < hi:
                part[lo - at : hi - at].copy_(slots.of(rank, number)[lo - begin : hi - begin])
    slots.end(rounds)
    return True


def _fill(tensor: SplitTensor, at: int, begin: int, slot: torch.Tensor) -> None:
    """Cast a block of the source into the own part, and copy it into the slot.

    ``at`` and ``begin``: positions of the part and of the slot in the stream of this rank.
    """
    lo, hi = max(at, begin), min(at + tensor.part_bytes, begin + len(slot))
    if lo < hi:
        part = tensor.parts[tensor.me]
        first, last = (lo - at) // part.element_size(), (hi - at) // part.element_size()
        block = part[first:last]
        block.copy_(tensor.source[first:last])
        slot[lo - begin : hi - begin].copy_(block.view(torch.uint8))


def _table(tensors: Sequence[SplitTensor] | None, most_bytes: int) -> list[int]:
    """Describe the stream of a rank: its length in bytes, then part bytes and ranks of every tensor of several ranks."""
    if tensors is None:
        return [_ELSEWHERE]
    table = [0]
    for tensor in tensors:
        if len(tensor.ranks) == 1:
            continue
        table[0] += tensor.part_bytes + -tensor.part_bytes % _ALIGNMENT
        table += [tensor.part_bytes, len(tensor.ranks), *tensor.ranks]
    return table if 8 * (len(table) + 1) <= most_bytes else [_ELSEWHERE]


def _places(table: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield ranks, part bytes and position in the stream of every tensor that a table describes."""
    entry, at = 1, 0
    while entry < len(table):
        size, count = table[entry], table[entry + 1]
        yield tuple(table[entry + 2 : entry + 2 + count]), size, at
        entry += 2 + count
        at += size + -size % _ALIGNMENT


def _others(tensors: Sequence[SplitTensor], at_rank: dict[int, list[int]]) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield every part that other ranks fill: rank, position in the stream of the rank, memory of the part as uint8.

    Raises:
        HostPeerFailedError: a rank does not have its part.
    """
    taken: dict[tuple[int, tuple[int, ...]], int] = {}
    for tensor in tensors:
        for position, rank in enumerate(tensor.ranks):
            if position == tensor.me:
                continue
            found = [place for place in _places(at_rank[rank]) if place[0] == tensor.ranks]
            number = taken.get((rank, tensor.ranks), 0)
            taken[rank, tensor.ranks] = number + 1
            if number >= len(found) or found[number][1] != tensor.part_bytes:
                raise HostPeerFailedError(
                    f"rank {rank} has no part of {tensor.part_bytes:,} bytes of a tensor that this rank gathers"
                )
            yield rank, found[number][2], tensor.parts[position].detach().view(torch.uint8)


class _Slots:
    """The shared memory as a ring of slots per rank. A round fills and copies one slot of every rank."""

    def __init__(self, host_peers: HostPeers) -> None:
        self._peers, self._base = host_peers, host_peers.rounds
        self.size_bytes = min(_SLOT_BYTES, len(host_peers.memory[0]) // _SLOTS) // _ALIGNMENT * _ALIGNMENT
        areas = [torch.frombuffer(memory, dtype=torch.uint8) for memory in host_peers.memory]
        self._areas = dict(zip(host_peers.ranks, areas, strict=True))

    def exchange(self, table: list[int]) -> list[list[int]]:
        """Return the tables of all ranks of the host. One round."""
        self._peers.wait(CONSUMED, self._base)
        slot = self.own(0)[: 8 * (len(table) + 1)]
        slot.copy_(torch.tensor([len(table), *table], device="cpu").view(torch.uint8))
        self.filled(0)
        self.wait_filled(0)
        tables = []
        for rank in self._peers.ranks:
            words = self.of(rank, 0)[: self.size_bytes // 8 * 8].view(torch.int64)
            tables.append([int(word) for word in words[1 : 1 + int(words[0])].tolist()])
        self.end(1)
        self._peers.wait(CONSUMED, self._base)  # the next round fills this slot again
        return tables

    def of(self, rank: int, number: int) -> torch.Tensor:
        """Return the slot of a rank in a round, uint8."""
        at = number % _SLOTS * self.size_bytes
        return self._areas[rank][at : at + self.size_bytes]

    def own(self, number: int) -> torch.Tensor:
        """Return the slot of this rank in a round."""
        return self.of(self._peers.ranks[self._peers.me], number)

    def filled(self, number: int) -> None:
        self._peers.publish(READY, self._base + number + 1)

    def wait_filled(self, number: int) -> None:
        self._peers.wait(READY, self._base + number + 1)

    def end(self, rounds: int) -> None:
        """End rounds of which this rank has copied all. The next round is number 0."""
        self._base += rounds
        self._peers.rounds = self._base
        self._peers.publish(CONSUMED, self._base)
