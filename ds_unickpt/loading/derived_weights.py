"""Weights that a load derives while it reads their masters.

A block of a master is cast into the weight while it is in the cache of the processor. Under ZeRO-1 and 2 a rank has the masters
of a part of its weights. If the ranks of the host have read the others through the page cache, it reads them again from there:
one copy, and no rank waits for another one. All this is for weights in host memory. Otherwise, the weights are derived after
reading (``partition_updates.refresh_weights``).
"""

from __future__ import annotations

from collections.abc import Iterator

from ds_unickpt.framework.internals import BF16, ZERO_1_2, ZERO_3
from ds_unickpt.framework.partition_updates import gathers_within
from ds_unickpt.framework.partitions import ParameterRange, Partition
from ds_unickpt.held_state.engine_view import EngineView
from ds_unickpt.loading.reads import Reads
from ds_unickpt.placing.slices import Slices
from unickpt.base.logs import logger
from unickpt.checkpoint.coordination.host_peers import HostPeers
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load.checkpoint import Checkpoint

_MOST_RANKS = 4  # of a host that read all masters. More would take the bandwidth of the memory from each other


class DerivedWeights:
    """The weights of one load into one engine. ``slices`` are without padding that the checkpoint lacks."""

    def __init__(self, view: EngineView, slices: Slices, reads: Reads) -> None:
        self._view, self._slices, self._reads = view, slices, reads
        offloaded = bool(getattr(view.engine.optimizer, "offloaded_states", ()))
        self._possible = view.wrapper in (ZERO_1_2, BF16, ZERO_3) and not offloaded and type(reads.checkpoint) is Checkpoint
        self._others = Reads(reads.checkpoint, stored=reads.stored)

    def request(self, part: Partition, sources: dict[int, TensorInfo | None]) -> None:
        """Request the weights of a partition, of which the masters are requested. ``sources``: of each parameter, by ``id``."""
        padded = not all(self._slices.of(parameter).complete for parameter in part.parameters)  # a request would zero weights
        if padded or not self._possible or not all(self._is_cast(part, sources[id(p)]) for p in part.parameters):
            self._possible = False
            return
        for piece in part.pieces:
            weight, source = part.weight_of(piece), sources[id(piece.parameter)]
            assert weight is not None and source is not None  # noqa: PT018  # by ``_is_cast``
            self._reads.fill(source, self._slices.of(piece.parameter), piece.lo, piece.hi, weight, derived=True)
        for piece in _elsewhere(part) if self._view.wrapper != ZERO_3 else ():
            source, weight = sources[id(piece.parameter)], piece.parameter.detach()
            self._possible = self._possible and weight.is_cpu and weight.is_contiguous()
            if self._possible and source is not None:
                flat = weight.view(-1).narrow(0, piece.lo, piece.hi - piece.lo)
                self._others.fill(source, self._slices.of(piece.parameter), piece.lo, piece.hi, flat)

    def _is_cast(self, part: Partition, info: TensorInfo | None) -> bool:
        """Whether the weight is the cast of the stored master, and of nothing else."""
        weight = part.weight
        if weight is None or not weight.is_cpu or not weight.is_contiguous() or part.swapped is not None or info is None:
            return False
        return info.state == "master" and torch_dtype(info.dtype) == part.master.dtype and info.name not in self._reads.means

    def complete(self, host_peers: HostPeers | None) -> bool:
        """Read the weights of which other ranks have the masters, if the page cache holds them. Call it after reading.

        Returns:
            Whether this rank now has all of its weights.
        """
        if not self._possible:
            return False
        if not self._others.requests:
            return True
        if host_peers is None or len(host_peers.ranks) > _MOST_RANKS or not gathers_within(self._view.engine, host_peers):
            return False
        try:
            return self._reads.checkpoint.fill_from_page_cache(self._others.requests, ranks=len(host_peers.ranks))
        except Exception as err:  # the other ranks have read the same bytes, so there is another way, and they may wait in it
            logger.warning("unickpt: weights are copied from other ranks, because this rank cannot read them: %s", err)
            return False


def _elsewhere(part: Partition) -> Iterator[ParameterRange]:
    """Yield the ranges of the parameters of a partition that other ranks hold; ``at`` is 0."""
    own = {id(piece.parameter): piece for piece in part.pieces}
    for parameter in part.parameters:
        piece, size = own.get(id(parameter)), parameter.numel()
        for lo, hi in ((0, size),) if piece is None else ((0, piece.lo), (piece.hi, size)):
            if lo < hi:
                yield ParameterRange(parameter, lo, hi, 0)
