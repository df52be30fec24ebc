"""Read each fragment once per host and share it in memory.

ByteCheckpoint (arXiv 2407.20143) and MegaScale (arXiv 2402.15627) let one rank of a data-parallel group read and send to the
others over the network. Here all ranks of a host that need the same fragment share it in host memory, under any layout.

All ranks of a host compute the same schedule from the rows that each rank needs. In each round a rank reads its part into its
slot of the shared memory, while all ranks copy from the slots of the previous round. The rank that reads a fragment checks
its checksum.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from unickpt.base.arrays import Ints
from unickpt.checkpoint.coordination.host_peers import CONSUMED, READY, HostPeers
from unickpt.checkpoint.format.checksums import RunningBlocks
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.index import Index
from unickpt.checkpoint.load.file_blocks import in_turns, read_blocks
from unickpt.checkpoint.load.fragments import Fragment, Request, by_file, deliver, needed_bytes
from unickpt.checkpoint.load.read_plan import ReadPlan
from unickpt.checkpoint.load.reader import THREADS, ReadStats, between_kernels, check, results
from unickpt.checkpoint.storage.base import Reader, Storage, may_be_cached

_RUN_BYTES = 8 << 20  # adjacent fragments that one rank reads
_GROUP_BYTES = 1 << 20  # adjacent blocks that one thread reads from the page cache
_ALIGNMENT = 64
_MOST_TIMES = 4  # what the page cache holds is shared if the ranks would read it more often


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes ``[lo, hi)`` of a fragment, at byte ``at`` of the slot of its reader."""

    row: int
    lo: int
    hi: int
    at: int


@dataclass(slots=True)
class BlockSchedule:
    """Assignment of blocks to ranks and rounds.

    Attributes:
        rows: rows of the index that are shared, int64, sorted.
        rounds: for each round and each rank of the host, the blocks that the rank reads, in file order.
    """

    rows: Ints
    rounds: list[list[list[Block]]] = field(default_factory=list)


def is_faster(index: Index, host_peers: HostPeers) -> bool:
    """Return whether the ranks of a host should share what they read. The same on all of them.

    From the page cache, a rank reads a fragment faster than it receives it from another one. Reading everything several times
    takes all of the memory's bandwidth.
    """
    if not host_peers.cached:
        return True
    sizes = index.size_bytes()
    together = int(sizes[np.unique(np.concatenate(host_peers.rows))].sum())
    return sum(int(sizes[rows].sum()) for rows in host_peers.rows) > _MOST_TIMES * together


def schedule(index: Index, wanted: Sequence[Ints], slot_bytes: int) -> BlockSchedule:
    """Return the schedule, which is the same on every rank of a host.

    Args:
        wanted: sorted rows that each rank of the host needs.
        slot_bytes: bytes that a rank can share in one round.
    """
    rows, count = np.unique(np.concatenate([np.asarray(r, np.int64) for r in wanted]), return_counts=True)
    rows = rows[count > 1]
    plan = BlockSchedule(rows)
    if not len(rows):
        return plan
    users = np.stack([np.isin(rows, each) for each in wanted])
    sizes = index.size_bytes()[rows]
    loads = [0] * len(wanted)
    places = [_Slot(slot_bytes) for _ in wanted]
    for run in _runs(index, rows, users, sizes):
        candidates = np.flatnonzero(users[:, run[0]]).tolist()
        reader = min(candidates, key=lambda at: (loads[at], at))
        loads[reader] += int(sizes[run].sum())
        for at in run:
            places[reader].add(int(rows[at]), int(sizes[at]), int(index.offset_bytes[rows[at]]))
    for number in range(max(len(place.rounds) for place in places)):
        plan.rounds.append([place.rounds[number] if number < len(place.rounds) else [] for place in places])
    return plan


def _runs(index: Index, rows: Ints, users: np.ndarray[tuple[int, int], np.dtype[np.bool_]], sizes: Ints) -> list[list[int]]:
    """Group positions in ``rows``, in file order: adjacent fragments that the same ranks need, up to 8 MiB."""
    order = np.lexsort((index.offset_bytes[rows], index.file[rows]))
    file, begin = index.file[rows][order], index.offset_bytes[rows][order]
    adjacent = (file[1:] == file[:-1]) & (begin[1:] == begin[:-1] + sizes[order][:-1])
    adjacent &= (users[:, order][:, 1:] == users[:, order][:, :-1]).all(axis=0)
    found: list[list[int]] = []
    size = 0
    for joins, at in zip([False, *adjacent.tolist()], order.tolist(), strict=True):
        if not joins or size >= _RUN_BYTES:
            found.append([])
            size = 0
        found[-1].append(at)
        size += int(sizes[at])
    return found


class _Slot:
    """The slot of one reader, filled round after round."""

    def __init__(self, slot_bytes: int) -> None:
        self.rounds: list[list[Block]] = []
        self._slot, self._at, self._end = slot_bytes, slot_bytes, -1

    def add(self, row: int, size: int, offset: int) -> None:
        lo = 0
        while lo < size:
            if offset + lo != self._end:  # not adjacent in the file: keep the alignment that it has there
                self._at += -self._at % _ALIGNMENT + (offset + lo) % _ALIGNMENT
            if self._at + min(size - lo, self._slot // 2) > self._slot:
                self.rounds.append([])
                self._at = (offset + lo) % _ALIGNMENT
            hi = min(size, lo + self._slot - self._at)
            if hi < size:
                hi -= (hi - lo) % _ALIGNMENT  # never split an element
            self.rounds[-1].append(Block(row, lo, hi, self._at))
            self._at += hi - lo
            self._end = offset + hi
            lo = hi


def execute(
    storage: Storage,
    index: Index,
    plan: ReadPlan,
    requests: Sequence[Request],
    host_peers: HostPeers,
    *,
    verify: str = "always",
) -> tuple[ReadStats, ReadPlan]:
    """Fill the part of a plan that other ranks of the host also need.

    Returns:
        Cost on this rank, and the rest of the plan.

    Raises:
        CorruptCheckpointError: a fragment that this rank reads is damaged.
        StorageError: this rank cannot read a file.
        HostPeerFailedError: the read of another rank failed.
    """
    slot = len(host_peers.memory[0]) // 2 // _ALIGNMENT * _ALIGNMENT
    agreed = schedule(index, host_peers.rows, slot)
    mine = {f.row: f for _, fragments in by_file(index, plan.only(agreed.rows), requests) for f in fragments}
    slots = [[memory[half * slot : (half + 1) * slot] for half in (0, 1)] for memory in host_peers.memory]
    stats = ReadStats()
    if not agreed.rounds:
        return stats, plan
    begin, reads_s, base = time.monotonic(), 0.0, host_peers.rounds
    host_peers.rounds += len(agreed.rounds)
    stop = threading.Event()
    with (
        contextlib.ExitStack() as files,
        between_kernels(requests),
        ThreadPoolExecutor(THREADS, "unickpt-handover") as pool,
        ThreadPoolExecutor(1, "unickpt-rounds") as reader,
    ):
        job = files.enter_context(contextlib.closing(_Reading(storage, index, mine, verify, pool)))

        def read_all() -> None:
            nonlocal reads_s
            try:
                for number, readers in enumerate(agreed.rounds):
                    host_peers.wait(CONSUMED, base + max(number - 1, 0))  # the round before the last has been copied by all
                    if stop.is_set():
                        return
                    read_since = time.monotonic()
                    stats.bytes_read += job.read(readers[host_peers.me], slots[host_peers.me][number % 2])
                    reads_s += time.monotonic() - read_since
                    host_peers.publish(READY, base + number + 1)
            except BaseException:
                host_peers.fail()
                raise

        reading = reader.submit(read_all)
        try:
            for number, readers in enumerate(agreed.rounds):
                host_peers.wait(READY, base + number + 1)
                copies = [
                    pool.submit(_hand_over, mine[block.row], block, slots[at][number % 2])
                    for at, blocks in enumerate(readers)
                    for block in blocks
                    if block.row in mine
                ]
                for _ in results(copies):
                    pass
                host_peers.publish(CONSUMED, base + number + 1)
        except BaseException:
            stop.set()
            host_peers.fail()
            if reading.exception() is not None:  # the cause, if it is this rank's
                reading.result()
            raise
        reading.result()
        for views in slots:
            for view in views:
                view.release()
    stats.bytes_needed = sum(map(needed_bytes, mine.values()))
    stats.bytes_gathered = max(0, stats.bytes_needed - stats.bytes_read)
    stats.gather_seconds = max(0.0, time.monotonic() - begin - reads_s)
    return stats, plan.only(agreed.rows, without=True)


def _hand_over(fragment: Fragment, block: Block, slot: memoryview) -> None:
    dtype = torch_dtype(fragment.info.dtype)
    data = _memory(block, slot)
    if block.at % dtype.itemsize:
        data = memoryview(bytearray(data))
    deliver(fragment, block.lo // dtype.itemsize, torch.frombuffer(data, dtype=dtype))


class _Reading:
    """Reads the blocks of this rank."""

    def __init__(
        self, storage: Storage, index: Index, mine: dict[int, Fragment], verify: str, pool: ThreadPoolExecutor
    ) -> None:
        self._storage, self._index, self._mine, self._verify, self._pool = storage, index, mine, verify, pool
        self._running: dict[int, RunningBlocks] = {}
        self._files, self._file = contextlib.ExitStack(), -1
        self._open: Reader | None = None

    def read(self, blocks: Sequence[Block], slot: memoryview) -> int:
        """Read blocks into the slot and check them. Return the number of bytes."""
        files: dict[int, list[Block]] = {}
        for block in blocks:
            files.setdefault(int(self._index.file[block.row]), []).append(block)
        for file, of_file in files.items():
            reader = self._reader(file)
            if may_be_cached(reader):
                turns = in_turns(reader, self._adjacent(of_file), self._span, contextlib.nullcontext())
                self._run([partial(self._read_and_verify, groups, slot, reader) for groups, _ in turns])
            else:
                self._run(
                    [
                        partial(reader.read_into, [slot[at : at + size]], offset)
                        for at, size, offset in self._stretches(of_file, reader.block_bytes)
                    ]
                )
                if self._verify != "off":
                    self._run([partial(self._verify_part, block, _memory(block, slot), reader.path) for block in of_file])
        return sum(block.hi - block.lo for block in blocks)

    def _reader(self, file: int) -> Reader:
        """Return a file, open. It stays open while rounds read from it: the kernel reads ahead of an open file."""
        if file != self._file:
            self.close()
            self._open, self._file = self._files.enter_context(self._storage.reader(self._index.files[file])), file
        assert self._open is not None
        return self._open

    def close(self) -> None:
        self._files.close()
        self._open, self._file = None, -1

    def _span(self, blocks: Sequence[Block]) -> tuple[int, int]:
        begin = self._offset(blocks[0])
        return begin, self._offset(blocks[-1]) + blocks[-1].hi - blocks[-1].lo - begin

    def _run(self, tasks: Sequence[Callable[[], None]]) -> None:
        for _ in results([self._pool.submit(task) for task in tasks]):
            pass

    def _offset(self, block: Block) -> int:
        return int(self._index.offset_bytes[block.row]) + block.lo

    def _adjacent(self, blocks: Sequence[Block]) -> list[list[Block]]:
        """Group blocks that are adjacent in slot and file, up to 1 MiB. A larger block is a group of its own."""
        groups: list[list[Block]] = []
        size = 0
        for block in blocks:
            count = block.hi - block.lo
            before = groups[-1][-1] if groups else None
            joins = before is not None and before.at + before.hi - before.lo == block.at
            joins = joins and before is not None and self._offset(before) + before.hi - before.lo == self._offset(block)
            if not joins or size + count > _GROUP_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(block)
            size += count
        return groups

    def _read_and_verify(self, groups: Sequence[Sequence[Block]], slot: memoryview, reader: Reader) -> None:
        """Read groups of adjacent blocks, and update their checksums while the bytes are in the cache of the core."""
        for blocks in groups:
            views = [(block, _memory(block, slot)) for block in blocks]
            for parts in read_blocks(reader, self._offset(blocks[0]), views, reader.block_bytes):
                for block, part, last in parts if self._verify != "off" else ():
                    self._verify_part(block, part, reader.path, last=last)

    def _stretches(self, blocks: Sequence[Block], piece_bytes: int) -> list[tuple[int, int, int]]:
        """Return (slot position, bytes, file position) of blocks adjacent in slot and file, in pieces for threads."""
        joined: list[tuple[int, int, int]] = []
        for block in blocks:
            offset, size = self._offset(block), block.hi - block.lo
            if joined and joined[-1][0] + joined[-1][1] == block.at and joined[-1][2] + joined[-1][1] == offset:
                at, before, begin = joined.pop()
                joined.append((at, before + size, begin))
            else:
                joined.append((block.at, size, offset))
        return [
            (at + shift, min(piece_bytes, size - shift), offset + shift)
            for at, size, offset in joined
            for shift in range(0, size, piece_bytes)
        ]

    def _verify_part(self, block: Block, part: memoryview, path: str, *, last: bool = True) -> None:
        """Update the checksum of a fragment with a part of a block. ``last``: the part ends the block.

        The blocks of a fragment come in order, at most one per round.
        """
        fragment = self._mine[block.row]
        running = self._running.pop(block.row, None) or RunningBlocks(fragment.size_bytes, self._index.block_bytes)
        running.update(part)
        if last and block.hi == fragment.size_bytes:
            check(fragment, running.value(), self._index.block_bytes, path)
        else:
            self._running[block.row] = running


def _memory(block: Block, slot: memoryview) -> memoryview:
    return slot[block.at : block.at + block.hi - block.lo]
