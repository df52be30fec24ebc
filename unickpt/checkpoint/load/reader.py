"""Execute a read plan: in parallel, each byte at most once, directly into the output where possible.

A fragment that is needed whole, in its stored dtype and contiguous in the output, is read directly into the output. Every
other fragment goes step by step through a buffer of at most 1 MiB per thread, or for outputs on a device through two of 8 MiB
(``scratch.py``). Its checksums are computed from the same bytes while they are in the cache. If the page cache holds the file,
a step fits into the cache of one core. Of a fragment that is needed in part, the blocks that are needed are read.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from unickpt.base.errors import CorruptCheckpointError
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.checksums import RunningBlocks, combined
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.index import Index
from unickpt.checkpoint.load.checked_read import FileRange, bytes_of, can_read_pieces, read_checked, read_pieces
from unickpt.checkpoint.load.file_blocks import ReadTurn, core_count, cores_of, in_turns
from unickpt.checkpoint.load.fragments import (
    Fragment,
    Request,
    Use,
    batches_of,
    by_file,
    deliver_to,
    needed_bytes,
    span_of,
    wanted_of,
)
from unickpt.checkpoint.load.needed_blocks import BlockTables, in_parts
from unickpt.checkpoint.load.read_plan import ReadPlan
from unickpt.checkpoint.load.scratch import Scratches
from unickpt.checkpoint.storage.base import Reader, Storage, may_be_cached

T = TypeVar("T")
THREADS = max(4, min(8, os.cpu_count() or 4))
_ALONE_BYTES = 1 << 20  # less is read without a pool of threads
OPEN_FILES = 64
_SAMPLE = 16  # "sampled" reads and checks one in 16 of the fragments that are needed in part


@dataclass(slots=True)
class ReadStats:
    """Cost of a read.

    Attributes:
        bytes_read: bytes read from storage.
        bytes_needed: bytes that the requests needed.
        seconds: wall time.
        bytes_gathered: bytes that this rank needed and other ranks of the host have read.
        gather_seconds: part of ``seconds`` in which this rank copied these bytes, or waited for them, and did not read.
    """

    bytes_read: int = 0
    bytes_needed: int = 0
    seconds: float = 0.0
    bytes_gathered: int = 0
    gather_seconds: float = 0.0


def execute(
    storage: Storage,
    index: Index,
    plan: ReadPlan,
    requests: Sequence[Request],
    *,
    tables: BlockTables | None = None,
    verify: str = "always",
    ranks: int = 1,
) -> ReadStats:
    """Fill the outputs of all requests.

    Args:
        storage: storage of the checkpoint. The headers have been checked.
        index: index of the checkpoint.
        plan: read plan. Its targets are the requests.
        requests: regions and outputs.
        tables: checksums of the blocks of fragments. None: every fragment is read as a whole to be checked.
        verify: ``always`` checks everything that is read. ``sampled`` skips this for most fragments that are needed in part.
            ``off`` checks nothing.
        ranks: ranks of this host that read at the same time.

    Returns:
        Bytes read and needed.

    Raises:
        CorruptCheckpointError: a checksum does not match. The message names file, tensor and box.
        StorageError: a file cannot be read.
    """
    stats, cores = ReadStats(), cores_of(ranks)
    names = list(by_file(index, plan, requests))
    with between_kernels(requests), contextlib.closing(Scratches(request.out for request in requests)) as scratches:
        for at in range(0, len(names), OPEN_FILES):
            with contextlib.ExitStack() as files:
                work: list[tuple[Reader, Sequence[list[Fragment]], ReadTurn]] = []
                for name, fragments in names[at : at + OPEN_FILES]:
                    reader = files.enter_context(storage.reader(name))
                    stats.bytes_needed += sum(map(needed_bytes, fragments))
                    parts: Iterable[Fragment] = fragments
                    if tables is not None and verify == "always":
                        parts = in_parts(fragments, name, reader, tables, index.block_bytes)
                    batches = batches_of(parts, with_pieces=can_read_pieces(reader))
                    turns = in_turns(reader, batches, span_of, cores)
                    work += [(reader, ranges, turn) for ranges, turn in turns]
                alone = core_count(ranks) == 1 and all(each[2] is cores for each in work)
                how = _How(verify, index.block_bytes, scratches)
                stats.bytes_read += sum(_run(work, how, alone=alone))
    return stats


@dataclass(frozen=True, slots=True)
class _How:
    """How batches are read: what is checked, in blocks of which size, and the buffers."""

    verify: str
    block_bytes: int
    scratches: Scratches


def _run(work: Sequence[tuple[Reader, Sequence[list[Fragment]], ReadTurn]], how: _How, *, alone: bool) -> Iterator[int]:
    """Read batches, in a pool of threads. What one thread does best is done by the caller's (``alone``), and what is small.

    Yields:
        Bytes read.
    """
    near = len(work) == 1 or all(may_be_cached(reader) for reader, _, _ in work)
    if alone or (near and sum(span_of(batch)[1] for _, batches, _ in work for batch in batches) < _ALONE_BYTES):
        yield from (_read(reader, batches, how, turn) for reader, batches, turn in work)
        return
    with ThreadPoolExecutor(min(THREADS, len(work)), "unickpt-read") as pool:
        yield from results([pool.submit(_read, reader, batches, how, turn) for reader, batches, turn in work])


@contextlib.contextmanager
def between_kernels(requests: Sequence[Request]) -> Iterator[None]:
    """Order the copies of other threads into outputs on CUDA devices with the caller's streams.

    The current stream is a property of a thread (``c10/cuda/CUDAStream.h``): threads that read copy in a stream for them
    (``scratch.py``), or in the default stream. These do not wait for another stream in which the caller still makes the
    outputs. In the default stream, ``copy_`` blocks until the data are on the device, but not until a following cast or
    scatter is over (``copy_requires_temporaries`` in ``aten/src/ATen/native/cuda/Copy.cu``).
    """
    devices = {request.out.device for request in requests if request.out.is_cuda}
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    yield
    for device in devices:
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))


def results(futures: list[Future[T]]) -> Iterator[T]:
    """Yield the results of all futures. After an error, wait until no thread works any more, then raise it."""
    wait(futures, return_when=FIRST_EXCEPTION)
    for future in futures:
        future.cancel()
    wait(futures)
    for future in futures:
        if not future.cancelled():
            future.result()
    for future in futures:
        yield future.result()


def are_cached(storage: Storage, index: Index, plan: ReadPlan) -> bool:
    """Return whether the page cache surely holds most of each file, from the first to the last byte that a plan reads.

    Raises:
        StorageError: a file cannot be opened.
    """
    rows = plan.rows()
    files, begin = index.file[rows], index.offset_bytes[rows]
    end = begin + index.size_bytes()[rows]
    for file in np.unique(files).tolist():
        first, last = int(begin[files == file].min()), int(end[files == file].max())
        with storage.reader(index.files[file]) as reader:
            if not may_be_cached(reader) or not reader.is_cached(first, last - first, False):
                return False
    return True


def _read(reader: Reader, batches: Sequence[list[Fragment]], how: _How, turn: ReadTurn) -> int:
    """Read batches in order. Return the bytes read."""
    read = 0
    with turn:
        for batch in batches:
            if batch[0].direct is not None:
                _read_in_place(reader, batch, how)
                read += sum(fragment.read_bytes for fragment in batch)
            elif how.verify == "always" and _read_pieces(reader, batch, how):
                read += sum(fragment.read_bytes for fragment in batch)
            else:
                read += sum(_read_through_scratch(reader, fragment, how) for fragment in batch)
    return read


def _read_in_place(reader: Reader, batch: list[Fragment], how: _How) -> None:
    """Read adjacent fragments into their outputs, and check them."""
    checks = how.verify != "off"
    parts = [FileRange(fragment.direct, fragment.second) for fragment in batch if fragment.direct is not None]
    sums = read_checked(reader, batch[0].begin, parts, how.block_bytes, checks=checks)
    for fragment, found in zip(batch, sums, strict=True) if checks else ():
        check(fragment, found, how.block_bytes, reader.path)


def _read_pieces(reader: Reader, batch: list[Fragment], how: _How) -> bool:
    """Read fragments and copy their pieces, and check them. Return whether that is possible."""
    pieces = [fragment.pieces for fragment in batch if fragment.pieces is not None]
    sums = read_pieces(reader, pieces, how.block_bytes) if len(pieces) == len(batch) else None
    if sums is None:
        return False
    for fragment, found in zip(batch, sums, strict=True):
        check(fragment, found, how.block_bytes, reader.path)
    return True


def _read_through_scratch(reader: Reader, fragment: Fragment, how: _How) -> int:
    """Read a fragment step by step and return the bytes read.

    It is read with its checksums checked, or, without a check, what is from the first needed element to the last.
    """
    scratch = how.scratches.mine()
    checks = how.verify == "always" or (how.verify == "sampled" and fragment.checksum % _SAMPLE == 0)
    dtype = torch_dtype(fragment.info.dtype)
    running = RunningBlocks(fragment.read_bytes, how.block_bytes)
    wanted = wanted_of(fragment)
    read = 0
    step = max(max(reader.block_bytes, scratch.block_bytes) // dtype.itemsize, 1)
    for lo, hi in _ranges(wanted, fragment, step, checks=checks):
        block = scratch.take(dtype, hi - lo)
        view = bytes_of(block)
        reader.read_into([view], fragment.offset + lo * dtype.itemsize)
        read += len(view)
        if checks:
            running.update(view)
        with scratch.copying():
            deliver_to(wanted, fragment, lo, block, scratch.copy)
    if checks:
        check(fragment, running.value(), how.block_bytes, reader.path)
    return read


def _ranges(wanted: list[tuple[Use, Box]], fragment: Fragment, step: int, *, checks: bool) -> Iterator[tuple[int, int]]:
    """Yield the flat element ranges of a fragment to read, at most ``step`` elements each."""
    item = torch_dtype(fragment.info.dtype).itemsize
    first, last = fragment.lo // item, fragment.hi // item
    if not checks:
        first = min(_flat(inner.start, fragment.box.shape) for _, inner in wanted)
        last = max(_flat(tuple(stop - 1 for stop in inner.stop), fragment.box.shape) + 1 for _, inner in wanted)
    for lo in range(first, last, step):
        yield lo, min(lo + step, last)


def _flat(position: tuple[int, ...], shape: tuple[int, ...]) -> int:
    at = 0
    for coordinate, extent in zip(position, shape, strict=True):
        at = at * extent + coordinate
    return at


def check(fragment: Fragment, found: array[int], block_bytes: int, path: str) -> None:
    """Compare the checksums of the blocks that were read with those that they must have.

    Raises:
        CorruptCheckpointError: they differ.
    """
    if combined(found) == fragment.checksum if fragment.expected is None else found == fragment.expected:
        return
    lo, hi = fragment.lo, fragment.hi
    if fragment.expected is not None:
        wrong = [at for at, (a, b) in enumerate(zip(found, fragment.expected, strict=True)) if a != b]
        lo, hi = lo + wrong[0] * block_bytes, hi if wrong[-1] == len(found) - 1 else lo + (wrong[-1] + 1) * block_bytes
    raise CorruptCheckpointError(
        f"{path}: checksum of {fragment.info.name} ({fragment.info.state}) {fragment.box} differs from the index: "
        f"the file is damaged at bytes {fragment.offset + lo:,} to {fragment.offset + hi:,}"
    ).about(file=path, tensor=fragment.info.name)
