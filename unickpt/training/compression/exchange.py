"""Mean of gradients over a process group, in compressed form, with error feedback on both ways.

Every rank computes the mean of one slice of each parameter. It gets that slice of all ranks in compressed form (one
``all_to_all``), and sends the mean back in compressed form (one ``all_gather``). What a code loses stays on the rank that lost
it, and is added the next time (BytePS-Compress, arXiv:2105.07829, with the ranks as servers of their slices).

The slices are those of parameters, and sums are in the order of the ranks. So a result does not depend on the buckets in which
the framework passes the gradients, and a job that resumes goes on bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unickpt.training.compression.carried import Common, Residuals, own_or_resized, slice_of
from unickpt.training.compression.powersgd import factored, first_factor, orthogonal
from unickpt.training.compression.schemes import Codec, NarrowFloat, codec_of, seed_of
from unickpt.training.compression.settings import Compression
from unickpt.training.compression.wire import Wire

_EXACT = NarrowFloat(torch.float32)


@dataclass
class _Item:
    """A flat tensor whose mean is taken.

    Attributes:
        values: float32 ``[elements]``.
        codec, seed: its code.
        owed: float32, rest of the mean of this rank's slice; None if there is none.
        lost: float32 ``[elements]``, what this rank did not send.
        owes: what it did not send back.
    """

    values: torch.Tensor
    codec: Codec = _EXACT
    seed: int = 0
    owed: torch.Tensor | None = None
    lost: torch.Tensor | None = None
    owes: torch.Tensor | None = None


@dataclass
class _Matrix:
    """A gradient that is sent as factors: its name and target, the matrix, and the left factor of this rank."""

    name: str
    target: torch.Tensor
    matrix: torch.Tensor
    left: torch.Tensor


class GradientExchange:
    """Exchanges gradients by parameter name, and holds what was not sent.

    Attributes:
        settings: settings of the job.
        residuals: what this rank has not sent.
        common: what all ranks have alike.
    """

    def __init__(self, settings: Compression, wire: Wire) -> None:
        """``wire``: collectives of the ranks that have the same parameters."""
        self.settings, self.wire = settings, wire
        self.rank, self.world = wire.rank, wire.world
        self.residuals, self.common = Residuals(self.rank, self.world), Common()

    def restore(self, saved: Callable[[int], Any], common: Any) -> bool:
        """Take the residuals of a checkpoint.

        Args:
            saved: returns the object that a rank of the saving job stored (``residuals.to_object()``), on the CPU.
            common: object of ``common.to_object()``.

        Returns:
            Whether each rank got its own residuals. False: every rank got the mean, from another number of ranks.

        Raises:
            FormatError: objects of the checkpoint are missing or have another form.
        """
        residuals, same = own_or_resized(saved, self.rank, self.world)
        self.residuals, self.common = residuals, Common.from_object(common)
        return same

    def keep_fitting(self, elements: Mapping[str, int]) -> list[str]:
        """Forget what belongs to parameters that this job lacks or that have another size.

        Args:
            elements: number of elements of each parameter of this job.

        Returns:
            Their names, sorted; the same on all ranks.
        """
        own = self.residuals
        strange = []
        for name in sorted(own.sent.keys() | own.returned.keys() | self.common.counts.keys()):
            lo, hi = slice_of(elements.get(name, 0), self.rank, self.world)
            sizes = (len(own.sent.get(name, ())), len(own.returned.get(name, ())))
            if name not in elements or sizes[0] not in (0, elements[name]) or sizes[1] not in (0, hi - lo):
                strange.append(name)
        for name in strange:
            self.common.counts.pop(name, None)
            for states in (own.sent, own.returned, self.common.factors):
                states.pop(name, None)
        return strange

    @torch.no_grad()
    def exchange(self, gradients: Sequence[tuple[str, torch.Tensor]], *, scale_in: float = 1.0, scale_out: float = 1.0) -> None:
        """Replace gradients by their mean over the ranks. Every rank passes the same names in the same order.

        Args:
            gradients: name of the parameter and its gradient. Any float dtype and device.
            scale_in: factor from the passed numbers to the gradient of the loss, such as one over the loss scale.
            scale_out: factor from the gradient of the loss to the numbers that are wanted.

        A parameter whose gradient is not finite on one rank gets NaN on all ranks, and keeps its residuals.
        """
        plain: list[tuple[str, torch.Tensor, _Item]] = []
        matrices: list[_Matrix] = []
        for name, target in gradients:
            values = target.detach().reshape(-1).float() * scale_in
            values += (values * 0).sum()  # one number that is not finite makes all of them NaN
            sent = self.residuals.sent.get(name)
            if sent is not None:
                values += sent.to(target.device)
            count = self.common.counts[name] = self.common.counts.get(name, 0) + 1
            shape = factored(self.settings, tuple(target.shape)) if self.world > 1 else None
            if shape is None:
                codec = codec_of(self.settings, values.numel()) if self.world > 1 else _EXACT
                item = _Item(values, codec, seed_of(self.settings, name, count), self._owed(name, target))
                plain.append((name, target, item))
            else:
                matrices.append(self._matrix(name, target, values, shape))
        means = self._means([item for _, _, item in plain] + [_Item(each.left.reshape(-1)) for each in matrices])
        for (name, target, item), mean in zip(plain, means, strict=False):
            self._set(name, target, mean, scale_out, item.lost, item.owes)
        self._finish(matrices, means[len(plain) :], scale_out)

    def _owed(self, name: str, target: torch.Tensor) -> torch.Tensor | None:
        found = self.residuals.returned.get(name)
        return None if found is None else found.to(target.device)

    def _means(self, items: Sequence[_Item]) -> list[torch.Tensor]:
        """Return the mean of each item over the ranks. Sets what was lost."""
        if not items:
            return []
        if self.world == 1:
            return [item.values if item.owed is None else item.values + item.owed for item in items]
        sizes = [math.ceil(item.values.numel() / self.world) for item in items]
        payloads = [self._encoded(item, size) for item, size in zip(items, sizes, strict=True)]
        widths = [payload.shape[1] for payload in payloads]
        outgoing = torch.cat(payloads, dim=1)
        parts = torch.split(self.wire.all_to_all(outgoing), widths, dim=1)
        back = [self._averaged(item, part, size) for item, part, size in zip(items, parts, sizes, strict=True)]
        gathered = self.wire.all_gather(torch.cat(back, dim=1))
        found = []
        for item, part, size in zip(items, torch.split(gathered, widths, dim=1), sizes, strict=True):
            found.append(item.codec.decode(part, size, item.seed).view(-1)[: item.values.numel()])
        return found

    def _encoded(self, item: _Item, size: int) -> torch.Tensor:
        """Return the code of each rank's slice: uint8 ``[world, bytes]``."""
        elements = item.values.numel()
        rows = torch.nn.functional.pad(item.values, (0, size * self.world - elements)).view(self.world, size)
        payload = item.codec.encode(rows, self._counts(elements, rows.device), item.seed)
        if not item.codec.lossless and self.settings.error_feedback:
            item.lost = item.values - item.codec.decode(payload, size, item.seed).view(-1)[:elements]
        return payload

    def _averaged(self, item: _Item, part: torch.Tensor, size: int) -> torch.Tensor:
        """Return the code of the mean of this rank's slice: uint8 ``[1, bytes]``."""
        rows = item.codec.decode(part, size, item.seed)
        lo, hi = slice_of(item.values.numel(), self.rank, self.world)
        mean = rows[0].clone()
        for row in rows[1:]:
            mean += row
        mean = mean[: hi - lo] / self.world
        if item.owed is not None:
            mean += item.owed
        padded = torch.nn.functional.pad(mean, (0, size - (hi - lo))).unsqueeze(0)
        counts = self._counts(item.values.numel(), mean.device)[self.rank : self.rank + 1]
        payload = item.codec.encode(padded, counts, item.seed)
        if not item.codec.lossless and self.settings.error_feedback:
            item.owes = mean - item.codec.decode(payload, size, item.seed)[0, : hi - lo]
        return payload

    def _counts(self, elements: int, device: torch.device) -> torch.Tensor:
        ends = (slice_of(elements, rank, self.world) for rank in range(self.world))
        return torch.tensor([hi - lo for lo, hi in ends], device=device)

    def _set(
        self,
        name: str,
        target: torch.Tensor,
        mean: torch.Tensor,
        scale: float,
        lost: torch.Tensor | None,
        owes: torch.Tensor | None,
    ) -> None:
        """Set a gradient and what was lost. Residuals that a lossless exchange has sent are removed."""
        target.copy_((mean * scale).view(target.shape))
        finite = torch.isfinite(mean).all()
        for held, new in ((self.residuals.sent, lost), (self.residuals.returned, owes)):
            old = held.get(name)
            if new is not None:
                kept = torch.zeros_like(new) if old is None else old.to(new.device)
                held[name] = torch.where(finite, new, kept)
            elif old is not None and bool(finite):
                del held[name]

    # ---------------------------------------------------------------- matrices

    def _matrix(self, name: str, target: torch.Tensor, values: torch.Tensor, shape: tuple[int, int, int]) -> _Matrix:
        rows, columns, rank = shape
        owed = self._owed(name, target)
        if owed is not None:  # of another scheme: the mean of the ranks takes one part of ``world``
            lo, hi = slice_of(values.numel(), self.rank, self.world)
            values[lo:hi] += owed * self.world
        right = self.common.factors.get(name)
        if right is None or right.shape != (columns, rank):
            right = first_factor(self.settings, name, columns, rank)
        matrix = values.view(rows, columns)
        return _Matrix(name, target, matrix, matrix @ right.to(target.device))

    def _finish(self, matrices: Sequence[_Matrix], lefts: Sequence[torch.Tensor], scale: float) -> None:
        """Send the right factors, and set the products."""
        bases = [orthogonal(left.view(each.left.shape)) for each, left in zip(matrices, lefts, strict=True)]
        rights = [each.matrix.T @ basis for each, basis in zip(matrices, bases, strict=True)]
        means = self._means([_Item(right.reshape(-1)) for right in rights])
        for each, basis, right, mean in zip(matrices, bases, rights, means, strict=True):
            factor = mean.view(right.shape)
            product = (basis @ factor.T).view(-1)
            lost = each.matrix.view(-1) - product if self.settings.error_feedback else None
            self._set(each.name, each.target, product, scale, lost, None)
            if bool(torch.isfinite(factor).all()):
                self.common.factors[each.name] = factor.clone()
