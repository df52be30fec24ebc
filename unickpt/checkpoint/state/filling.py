"""Fills the tensors of a rank from a checkpoint: what serves a tensor, what is read, what follows the read, and the report."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from unickpt.checkpoint.coordination.host_peers import HostPeers
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load.checkpoint import TWINS, Checkpoint, Planned
from unickpt.checkpoint.load.fragments import Request
from unickpt.checkpoint.load.report import LoadReport

WEIGHT, MASTER, OBJECT = "weight", "master", "object"


@dataclass
class Filling:
    """One load on one rank.

    Attributes:
        checkpoint: the opened checkpoint.
        report: gets an entry for each tensor.
        requests: what is read.
        _late: targets, each with a temporary of as many elements.
    """

    checkpoint: Checkpoint
    report: LoadReport = field(default_factory=LoadReport)
    requests: list[Request] = field(default_factory=list)
    _late: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def source(self, name: str, state: str) -> TensorInfo | None:
        """Return the tensor that serves a tensor of this job: that of its name and state, or a weight for a master and back."""
        return self.checkpoint.serving(name, state)

    def origin(self, info: TensorInfo) -> TensorInfo:
        """Return the stored tensor of which a tensor is the cast; the tensor itself if it is not derived."""
        found = info if info.derived_from is None else self.checkpoint.info(info.name, info.derived_from)
        assert found is not None  # the index checks it
        return found

    def request(self, info: TensorInfo, box: Box, out: torch.Tensor, *, derived: bool = False) -> None:
        """Fill ``out`` with a box of a tensor: of a derived tensor with the cast, and then with what overrides it.

        Args:
            info: the tensor.
            box, out, derived: as in ``Request``.
        """
        self.requests.append(Request(self.checkpoint.ids[self.origin(info).key], box, out, derived))
        for common, data in self.overrides(info, box):
            place = out if out.shape == box.shape else out.view(box.shape)
            self.copy_later(place[common.within(box).slices()], data)

    def overrides(self, info: TensorInfo, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """Request the stored elements of a derived tensor that are not the cast.

        Yields:
            A part of the box, and a tensor of its shape that the read fills.
        """
        if info.derived_from is None:
            return
        position = self.checkpoint.ids[info.key]
        for stored in self.checkpoint.override_boxes(position):
            common = box.intersect(stored)
            if common is not None:
                data = torch.empty(common.shape, dtype=torch_dtype(info.dtype), device="cpu")
                self.requests.append(Request(position, common, data))
                yield common, data

    def copy_later(self, target: torch.Tensor, data: torch.Tensor) -> None:
        """Copy ``data`` into ``target``, which has the same number of elements, after the read. In the order of the calls."""
        self._late.append((target, data))

    def plan(self) -> Planned:
        """Return the plan of the read.

        Raises:
            CorruptCheckpointError, CoverageError, StorageError: as for ``Checkpoint.plan``.
        """
        return self.checkpoint.plan(self.requests)

    def read(self, planned: Planned, *, verify: str, host_peers: HostPeers | None) -> None:
        """Fill the tensors in place. Data that other ranks of this host also need is read once.

        Raises:
            CorruptCheckpointError, StorageError, HostPeerFailedError: as for ``Checkpoint.fill``.
        """
        self.report.add_read(self.checkpoint.fill(planned, verify=verify, host_peers=host_peers))
        self.finish()

    def finish(self) -> None:
        """Do what follows the read."""
        for target, data in self._late:
            target.detach().copy_(data.view(target.shape))

    def account(self, name: str, state: str, info: TensorInfo, dtype: str, note: str = "") -> None:
        """Report how a tensor of this job, in ``dtype``, gets its values from ``info``. ``note``: about a restored tensor."""
        stored = self.origin(info)
        if (info.state, info.dtype) == (state, dtype):
            self.report.add(name, state, "restored", note)
        else:
            self.report.add(name, state, "cast", f"{stored.dtype} {stored.state} to {dtype} {state}")


def state_for(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> str:
    """Return the state that serves a weight of a dtype best: the master, if the weight has been rounded to another one."""
    weight, master = checkpoint.info(name, WEIGHT), checkpoint.info(name, MASTER)
    if weight is None or master is None:
        return WEIGHT
    return MASTER if torch_dtype(master.dtype) == dtype != torch_dtype(weight.dtype) else WEIGHT


def shapes_of_all(own: Mapping[str, tuple[int, ...]], exchange: MessageExchange) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that any rank has, by name. Every rank calls this."""
    message = {name: list(shape) for name, shape in own.items()}
    found = exchange.combined("shapes", message, lambda every: {name: shape for each in every for name, shape in each.items()})
    return {name: tuple(shape) for name, shape in found.items()}


def mask_of(checkpoint: Checkpoint, infos: Iterable[TensorInfo]) -> str:
    """Return tensors of a checkpoint as a number in hexadecimal digits, with a bit for each."""
    return f"{sum(1 << position for position in {checkpoint.ids[info.key] for info in infos}):x}"


def union_of(masks: Iterable[str]) -> str:
    """Return the tensors of several masks as one mask."""
    return f"{functools.reduce(operator.or_, (int(mask, 16) for mask in masks), 0):x}"


def unrequested(checkpoint: Checkpoint, masks: Iterable[str], *, twins: bool = True) -> list[TensorInfo]:
    """Return the tensors of a checkpoint that no rank requests.

    Args:
        checkpoint: the checkpoint.
        masks: ``mask_of`` what each rank requests.
        twins: a weight counts for its master and back.
    """
    used, tensors = int(union_of(masks), 16), checkpoint.index.tensors
    known = {info.key for position, info in enumerate(tensors) if used >> position & 1}
    return [
        info
        for info in tensors
        if info.kind != OBJECT and info.key not in known and not (twins and (info.name, TWINS.get(info.state, "")) in known)
    ]


def lost_parameters(checkpoint: Checkpoint, left: Iterable[TensorInfo]) -> list[str]:
    """Return the names of the parameters among the tensors that no rank requests; none if no rank requests a parameter."""
    lost, every = ({info.name for info in infos if info.kind == "parameter"} for infos in (left, checkpoint.index.tensors))
    return sorted(lost) if lost != every else []
