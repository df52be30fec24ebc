"""Execute a read plan: in parallel, each byte at most once, directly into the output where possible.

A fragment that is needed whole, in its stored dtype and contiguous in the output, is read directly into the output. Every
other fragment goes through a scratch buffer of a few MiB per thread, block by block. The checksum of a fragment is computed
from the same blocks while they are in the cache. If the page cache holds the file, blocks fit into the cache of one core.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from unickpt.errors import CorruptCheckpointError
from unickpt.format.boxes import Box, flat_range, split_flat_range
from unickpt.format.checksums import RunningChecksum, fragment_checksum
from unickpt.format.dtypes import torch_dtype
from unickpt.format.index import Index, TensorInfo
from unickpt.load.file_blocks import Turn, cores_of, in_turns, read_blocks
from unickpt.load.read_plan import ReadPlan
from unickpt.storage.base import Reader, Storage

T = TypeVar("T")
THREADS = max(4, min(8, os.cpu_count() or 4))
_BATCH_BYTES, _BATCH_PARTS = 16 << 20, 256  # limits for adjacent fragments that one system call reads
_SCRATCH_BYTES = 1 << 20
_ALONE_BYTES = 1 << 20  # one fragment of less is read without a pool of threads
OPEN_FILES = 64
_SAMPLE = 16  # "sampled" reads and checks one in 16 of the fragments that are needed in part


@dataclass(frozen=True, slots=True)
class Request:
    """A requested region and its output tensor.

    Attributes:
        tensor_id: position of the tensor in the index.
        box: requested region. Not empty.
        out: output on any device, in any dtype; values are cast. Either a contiguous 1-D tensor of ``box.numel`` elements, or
            a tensor of the shape of the box with any strides.
    """

    tensor_id: int
    box: Box
    out: torch.Tensor

    @property
    def place(self) -> torch.Tensor:
        """Output tensor in the shape of the box."""
        return self.out if self.out.shape == self.box.shape else self.out.view(self.box.shape)


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


@dataclass(frozen=True, slots=True)
class Use:
    """Part of a fragment that one request needs. ``region`` is in coordinates of the tensor."""

    region: Box
    request: Request


@dataclass(slots=True)
class Fragment:
    """A fragment of a file, and the requests that need it."""

    row: int
    info: TensorInfo
    box: Box
    offset: int
    size_bytes: int
    checksum: int
    uses: list[Use] = field(default_factory=list)
    direct: torch.Tensor | None = None  # part of an output that the whole fragment fills byte for byte

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


def execute(
    storage: Storage, index: Index, plan: ReadPlan, requests: Sequence[Request], *, verify: str = "always", ranks: int = 1
) -> ReadStats:
    """Fill the outputs of all requests.

    Args:
        storage: storage of the checkpoint. The headers have been checked.
        index: index of the checkpoint.
        plan: read plan. Its targets are the requests.
        requests: regions and outputs.
        verify: ``always`` reads and checks every needed fragment as a whole. ``sampled`` skips this for most fragments that
            are needed in part. ``off`` checks nothing.
        ranks: ranks of this host that read at the same time.

    Returns:
        Bytes read and needed.

    Raises:
        CorruptCheckpointError: a checksum does not match. The message names file, tensor and box.
        StorageError: a file cannot be read.
    """
    stats, cores = ReadStats(), cores_of(ranks)
    names = list(by_file(index, plan, requests))
    if len(names) == 1 and len(names[0][1]) == 1 and names[0][1][0].size_bytes < _ALONE_BYTES:  # such as an object
        with between_kernels(requests), storage.reader(names[0][0]) as reader:
            stats.bytes_read, stats.bytes_needed = _read(reader, list(_batches(names[0][1])), verify, cores)
        return stats
    with between_kernels(requests), ThreadPoolExecutor(THREADS, "unickpt-read") as pool:
        for at in range(0, len(names), OPEN_FILES):
            with contextlib.ExitStack() as files:
                futures = []
                for name, fragments in names[at : at + OPEN_FILES]:
                    reader = files.enter_context(storage.reader(name))
                    turns = in_turns(reader, _batches(fragments), _span, cores)
                    futures += [pool.submit(_read, reader, batches, verify, turn) for batches, turn in turns]
                for read, needed in results(futures):
                    stats.bytes_read += read
                    stats.bytes_needed += needed
    return stats


@contextlib.contextmanager
def between_kernels(requests: Sequence[Request]) -> Iterator[None]:
    """Order the copies of other threads into outputs on CUDA devices with the caller's streams. Not seen on a device.

    The current stream is a property of a thread (``c10/cuda/CUDAStream.h``): threads that read copy in the default stream.
    That one does not wait for another stream in which the caller still initialises the outputs. ``copy_`` blocks until the data
    are on the device, but not until a following cast or scatter is over (``copy_requires_temporaries`` in
    ``aten/src/ATen/native/cuda/Copy.cu``).
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


def by_file(index: Index, plan: ReadPlan, requests: Sequence[Request]) -> Iterator[tuple[str, list[Fragment]]]:
    """Yield each file with its fragments in file order. A fragment with several uses occurs once."""
    sizes = index.size_bytes()
    rows, targets = plan.fragment.tolist(), plan.target.tolist()
    starts, shapes = plan.start.tolist(), plan.shape.tolist()
    file, last, fragments = -1, -1, list[Fragment]()
    for at, row in enumerate(rows):
        if int(index.file[row]) != file:
            if fragments:
                yield index.files[file], fragments
            file, fragments = int(index.file[row]), []
        if row != last:
            last = row
            fragments.append(
                Fragment(
                    row,
                    index.tensors[int(index.tensor[row])],
                    index.box(row),
                    int(index.offset_bytes[row]),
                    int(sizes[row]),
                    int(index.checksum[row]),
                )
            )
        request = requests[targets[at]]
        ndim = request.box.ndim
        fragments[-1].uses.append(Use(Box(tuple(starts[at][:ndim]), tuple(shapes[at][:ndim])), request))
    if fragments:
        yield index.files[file], fragments


def _batches(fragments: Iterable[Fragment]) -> Iterator[list[Fragment]]:
    """Group adjacent fragments that are read directly into outputs. Every other fragment is a batch of its own."""
    batch: list[Fragment] = []
    size = 0
    for fragment in fragments:
        fragment.direct = _place(fragment)
        joins = (
            batch
            and fragment.direct is not None
            and batch[-1].direct is not None
            and batch[-1].end == fragment.offset
            and size + fragment.size_bytes <= _BATCH_BYTES
            and len(batch) < _BATCH_PARTS
        )
        if batch and not joins:
            yield batch
            batch, size = [], 0
        batch.append(fragment)
        size += fragment.size_bytes
    if batch:
        yield batch


def _place(fragment: Fragment) -> torch.Tensor | None:
    """Return the part of an output that the whole fragment fills byte for byte, or None."""
    use = fragment.uses[0]
    out = use.request.out
    if len(fragment.uses) > 1 or use.region != fragment.box:
        return None
    if out.dtype != torch_dtype(fragment.info.dtype) or out.device.type != "cpu" or not out.is_contiguous():
        return None
    if use.region == use.request.box:
        return out.detach().view(-1)
    place = flat_range(use.region.within(use.request.box), use.request.box.shape)
    return None if place is None else out.detach().view(-1)[place[0] : place[1]]


def _span(batch: list[Fragment]) -> tuple[int, int]:
    return batch[0].offset, batch[-1].end - batch[0].offset


def _read(reader: Reader, batches: Sequence[list[Fragment]], verify: str, turn: Turn) -> tuple[int, int]:
    """Read batches in order. Return bytes read and bytes needed."""
    read = needed = 0
    with turn:
        for batch in batches:
            needed += sum(use.region.numel * torch_dtype(f.info.dtype).itemsize for f in batch for use in f.uses)
            if batch[0].direct is not None:
                _read_in_place(reader, batch, verify)
                read += sum(fragment.size_bytes for fragment in batch)
            else:
                read += _read_through_scratch(reader, batch[0], verify)
    return read, needed


def _read_in_place(reader: Reader, batch: list[Fragment], verify: str) -> None:
    """Read adjacent fragments into their outputs, and check each when its last block has been read."""
    views = [(fragment, bytes_of(fragment.direct)) for fragment in batch if fragment.direct is not None]
    running = RunningChecksum()
    for block in read_blocks(reader, batch[0].offset, views, reader.block_bytes):
        for fragment, part, last in block if verify != "off" else ():
            if len(part) == fragment.size_bytes:
                check(fragment, fragment_checksum(part), reader.path)
                continue
            running.update(part)
            if last:
                check(fragment, running.value(), reader.path)
                running = RunningChecksum()


def _read_through_scratch(reader: Reader, fragment: Fragment, verify: str) -> int:
    """Read a fragment block by block and return the bytes read.

    A whole fragment is read and its checksum checked, or, without a check, what is from the first needed element to the last.
    """
    whole = verify == "always" or (verify == "sampled" and fragment.checksum % _SAMPLE == 0)
    dtype = torch_dtype(fragment.info.dtype)
    count = fragment.box.numel
    step = max(max(reader.block_bytes, _SCRATCH_BYTES) // dtype.itemsize, 1)
    # Locked memory goes to a device without a further copy by the driver. torch keeps the few blocks for the next fragments.
    on_device = any(use.request.out.is_cuda for use in fragment.uses)
    scratch = torch.empty(min(step, count), dtype=dtype, pin_memory=on_device)
    running = RunningChecksum()
    wanted = _wanted(fragment)
    read = 0
    for lo, hi in _ranges(wanted, fragment.box.shape, count, step, whole=whole):
        block = scratch[: hi - lo]
        view = bytes_of(block)
        reader.read_into([view], fragment.offset + lo * dtype.itemsize)
        read += len(view)
        if whole:
            running.update(view)
        _deliver(wanted, fragment, lo, block)
    if whole:
        check(fragment, running.value(), reader.path)
    return read


def _ranges(
    wanted: list[tuple[Use, Box]], shape: tuple[int, ...], count: int, step: int, *, whole: bool
) -> Iterator[tuple[int, int]]:
    """Yield the flat element ranges of a fragment to read, at most ``step`` elements each."""
    first, last = 0, count
    if not whole:
        first = min(_flat(inner.start, shape) for _, inner in wanted)
        last = max(_flat(tuple(stop - 1 for stop in inner.stop), shape) + 1 for _, inner in wanted)
    for lo in range(first, last, step):
        yield lo, min(lo + step, last)


def _flat(position: tuple[int, ...], shape: tuple[int, ...]) -> int:
    at = 0
    for coordinate, extent in zip(position, shape, strict=True):
        at = at * extent + coordinate
    return at


def _wanted(fragment: Fragment) -> list[tuple[Use, Box]]:
    """Return every use with its region in coordinates of the fragment."""
    return [(use, use.region.within(fragment.box)) for use in fragment.uses]


def deliver(fragment: Fragment, lo: int, block: torch.Tensor) -> None:
    """Copy elements of a fragment, from flat position ``lo`` on, to all requests that need them."""
    _deliver(_wanted(fragment), fragment, lo, block)


def _deliver(wanted: list[tuple[Use, Box]], fragment: Fragment, lo: int, block: torch.Tensor) -> None:
    at = 0
    for box in split_flat_range(fragment.box.shape, lo, lo + block.numel()):
        piece = block[at : at + box.numel].view(box.shape)
        at += box.numel
        for use, inner in wanted:
            _copy(use, inner, box, piece)


def _copy(use: Use, inner: Box, box: Box, piece: torch.Tensor) -> None:
    """Copy the part of a box that a use needs. All boxes are in coordinates of the fragment."""
    common = inner.intersect(box)
    if common is None:
        return
    shift = [use.region.start[d] - inner.start[d] for d in range(inner.ndim)]
    place = Box(tuple(c + s for c, s in zip(common.start, shift, strict=True)), common.shape).within(use.request.box)
    use.request.place[place.slices()].copy_(piece[common.within(box).slices()])


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return memoryview(tensor.detach().view(torch.uint8).numpy().data)


def check(fragment: Fragment, checksum: int, path: str) -> None:
    """Compare a checksum with the index.

    Raises:
        CorruptCheckpointError: they differ.
    """
    if checksum != fragment.checksum:
        raise CorruptCheckpointError(
            f"{path}: checksum of {fragment.info.name} ({fragment.info.state}) {fragment.box} differs from the index: "
            f"the file is damaged at bytes {fragment.offset:,} to {fragment.end:,}. "
            "Resume from an older checkpoint."
        ).about(file=path, tensor=fragment.info.name)


def files_of(index: Index, plan: ReadPlan) -> list[str]:
    """Return the names of the files that a plan reads."""
    used: Mapping[int, None] = dict.fromkeys(index.file[plan.fragment].tolist())
    return [index.files[file] for file in used]
