"""Fragments of files, with the outputs that need them.

A fragment that is needed whole, in its stored dtype and contiguous in the output, is read directly into the output. Of others,
pieces are copied, which are contiguous in the fragment and in the output, or regions of any form.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from unickpt.checkpoint.format.boxes import Box, flat_range, split_flat_range
from unickpt.checkpoint.format.casts import is_dense
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.index import Index, TensorInfo
from unickpt.checkpoint.load.checked_read import NeededPart, NeededParts
from unickpt.checkpoint.load.read_plan import ReadPlan

CopyOf = Callable[[torch.Tensor, torch.Tensor], object]  # from the second to the first

_BATCH_BYTES, _BATCH_PARTS = 16 << 20, 256  # limits for fragments that one call reads


@dataclass(frozen=True, slots=True)
class Request:
    """A requested region and its output tensor.

    Attributes:
        tensor_id: position of the tensor in the index.
        box: requested region. Not empty.
        out: output on any device, in any dtype; values are cast. Either a contiguous 1-D tensor of ``box.numel`` elements, or
            a tensor of the shape of the box with any strides.
        derived: another request needs the same elements, and ``out`` is their cast. They count once.
    """

    tensor_id: int
    box: Box
    out: torch.Tensor
    derived: bool = False

    @property
    def place(self) -> torch.Tensor:
        """Output tensor in the shape of the box."""
        return self.out if self.out.shape == self.box.shape else self.out.view(self.box.shape)


@dataclass(frozen=True, slots=True)
class Use:
    """Part of a fragment that one request needs. ``region`` is in coordinates of the tensor."""

    region: Box
    request: Request


@dataclass(slots=True)
class Fragment:
    """A fragment of a file, or a part of it of whole blocks, and the requests that need it.

    Attributes:
        row: row of the index.
        info: its tensor.
        box: box of the whole fragment.
        offset: position of the whole fragment in the file, in bytes.
        size_bytes, checksum: of the whole fragment, as in the index.
        lo, hi: the bytes ``[lo, hi)`` of the fragment are read.
        expected: checksums of the blocks in ``[lo, hi)``. None for a whole fragment: ``checksum`` is that of all blocks.
    """

    row: int
    info: TensorInfo
    box: Box
    offset: int
    size_bytes: int
    checksum: int
    lo: int
    hi: int
    uses: list[Use] = field(default_factory=list)
    expected: array[int] | None = None
    direct: torch.Tensor | None = None  # part of an output that the whole fragment fills byte for byte
    second: torch.Tensor | None = None  # part of another output that receives the cast of the whole fragment
    pieces: NeededParts | None = None  # if it is not direct: its parts that fill dense parts of outputs, with a cast

    @property
    def begin(self) -> int:
        """Position in the file of the first byte that is read."""
        return self.offset + self.lo

    @property
    def end(self) -> int:
        """Position in the file of the end of what is read."""
        return self.offset + self.hi

    @property
    def read_bytes(self) -> int:
        """Size of what is read."""
        return self.hi - self.lo


def by_file(index: Index, plan: ReadPlan, requests: Sequence[Request]) -> Iterator[tuple[str, list[Fragment]]]:
    """Yield each file with its fragments in file order. A fragment with several uses occurs once."""
    first = np.flatnonzero(np.diff(plan.fragment, prepend=-1))
    rows = plan.fragment[first]
    near = index.take(rows)
    uses = list(_uses(plan, requests))
    edges = [*first.tolist(), len(uses)]
    columns = (rows, near.tensor, near.file, near.offset_bytes, near.size_bytes, index.checksum[rows], near.start, near.shape)
    file, fragments = -1, list[Fragment]()
    for at, (row, tensor, of, offset, size, checksum, start, shape) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        if of != file:
            if fragments:
                yield index.files[file], fragments
            file, fragments = of, []
        own = uses[edges[at] : edges[at + 1]]
        box = _box(start, shape, own[0].region)
        fragments.append(Fragment(row, index.tensors[tensor], box, offset, size, checksum, 0, size, own))
    if fragments:
        yield index.files[file], fragments


def _uses(plan: ReadPlan, requests: Sequence[Request]) -> Iterator[Use]:
    for target, start, shape in zip(plan.target.tolist(), plan.start.tolist(), plan.shape.tolist(), strict=True):
        request = requests[target]
        yield Use(_box(start, shape, request.box), request)


def _box(start: list[int], shape: list[int], like: Box) -> Box:
    """Return a box without padding. ``like``: of the same tensor, and the same object if it is equal: most are."""
    ndim = len(like.start)
    begin, extent = tuple(start[:ndim]), tuple(shape[:ndim])
    return like if begin == like.start and extent == like.shape else Box(begin, extent)


def needed_bytes(fragment: Fragment) -> int:
    """Return the size of what the uses of a fragment need."""
    item = torch_dtype(fragment.info.dtype).itemsize
    return sum(use.region.numel * item for use in fragment.uses if not use.request.derived)


def batches_of(fragments: Iterable[Fragment], *, with_pieces: bool) -> Iterator[list[Fragment]]:
    """Group fragments that one call reads: adjacent ones directly into outputs, or ``with_pieces`` those that have pieces.

    Every other fragment is a batch of its own.
    """
    batch: list[Fragment] = []
    size = 0
    for fragment in fragments:
        fragment.direct, fragment.second = _places(fragment)
        if fragment.direct is None and with_pieces:
            fragment.pieces = _pieces(fragment)
        room = size + fragment.read_bytes <= _BATCH_BYTES and len(batch) < _BATCH_PARTS
        if batch and not (room and _joins(batch[-1], fragment)):
            yield batch
            batch, size = [], 0
        batch.append(fragment)
        size += fragment.read_bytes
    if batch:
        yield batch


def _joins(before: Fragment, fragment: Fragment) -> bool:
    """Whether one call can read both fragments."""
    if before.direct is None:
        return before.pieces is not None and fragment.pieces is not None
    return fragment.direct is not None and before.end == fragment.begin


def _pieces(fragment: Fragment) -> NeededParts | None:
    """Return the parts of a fragment that its uses need, if each is dense in the fragment and in its output; otherwise None."""
    dtype, found = torch_dtype(fragment.info.dtype), []
    for use in fragment.uses:
        out = use.request.out
        source = flat_range(use.region.within(fragment.box), fragment.box.shape)
        place = flat_range(use.region.within(use.request.box), use.request.box.shape)
        if source is None or place is None or not out.is_contiguous():
            return None
        target = out.detach().view(-1)[place[0] : place[1]]
        begin, size = source[0] * dtype.itemsize - fragment.lo, (source[1] - source[0]) * dtype.itemsize
        found.append(NeededPart(begin, size, target))
    pieces = NeededParts(fragment.begin, fragment.read_bytes, dtype, found)
    return pieces if pieces.are_castable() else None


def _places(fragment: Fragment) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the part of an output that the whole fragment fills byte for byte, and of one that receives its cast, or None."""
    if len(fragment.uses) > 2:
        return None, None
    stored = torch_dtype(fragment.info.dtype)
    if len(fragment.uses) == 1:
        place = _place(fragment, fragment.uses[0])
        return None if place is None or place.dtype != stored else place, None
    found = [_place(fragment, use) for use in fragment.uses]
    same = [place is not None and place.dtype == stored for place in found]
    if not any(same) or any(place is None for place in found):
        return None, None
    first = same.index(True)
    return found[first], found[1 - first] if len(found) == 2 else None


def _place(fragment: Fragment, use: Use) -> torch.Tensor | None:
    """Return the part of an output, 1-D and dense on the CPU, that the whole fragment fills, or None."""
    out, region = use.request.out, use.region
    if (region is not fragment.box and region != fragment.box) or not is_dense(out):
        return None
    if region is use.request.box or region == use.request.box:
        return out.detach().view(-1)
    place = flat_range(use.region.within(use.request.box), use.request.box.shape)
    return None if place is None else out.detach().view(-1)[place[0] : place[1]]


def span_of(batch: list[Fragment]) -> tuple[int, int]:
    """Return offset and size of the part of a file that a batch covers, in bytes."""
    return batch[0].begin, batch[-1].end - batch[0].begin


def wanted_of(fragment: Fragment) -> list[tuple[Use, Box]]:
    """Return every use with its region in coordinates of the fragment."""
    return [(use, use.region.within(fragment.box)) for use in fragment.uses]


def deliver(fragment: Fragment, lo: int, block: torch.Tensor) -> None:
    """Copy elements of a fragment, from flat position ``lo`` on, to all requests that need them."""
    deliver_to(wanted_of(fragment), fragment, lo, block)


def deliver_to(
    wanted: list[tuple[Use, Box]], fragment: Fragment, lo: int, block: torch.Tensor, copy: CopyOf = torch.Tensor.copy_
) -> None:
    """Copy elements of a fragment, as ``deliver``, with what ``wanted_of`` returns for it, by ``copy(target, source)``."""
    at = 0
    for box in split_flat_range(fragment.box.shape, lo, lo + block.numel()):
        piece = block[at : at + box.numel].view(box.shape)
        at += box.numel
        for use, inner in wanted:
            _copy(use, inner, box, piece, copy)


def _copy(use: Use, inner: Box, box: Box, piece: torch.Tensor, copy: CopyOf) -> None:
    """Copy the part of a box that a use needs. All boxes are in coordinates of the fragment."""
    common = inner.intersect(box)
    if common is None:
        return
    shift = [use.region.start[d] - inner.start[d] for d in range(inner.ndim)]
    place = Box(tuple(c + s for c, s in zip(common.start, shift, strict=True)), common.shape).within(use.request.box)
    copy(use.request.place[place.slices()], piece[common.within(box).slices()])


def files_of(index: Index, plan: ReadPlan) -> list[str]:
    """Return the names of the files that a plan reads."""
    used: Mapping[int, None] = dict.fromkeys(index.file[plan.fragment].tolist())
    return [index.files[file] for file in used]
