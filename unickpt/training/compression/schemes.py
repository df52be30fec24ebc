"""Codecs: rows of float32 numbers to rows of bytes of known length, and back. Pure functions.

A codec is deterministic: equal rows give equal bytes on every rank. Non-finite numbers stay non-finite, so that an overflow
of fp16 is noticed. Bytes are in the order of the machine; all ranks of a job have the same.

Sources: top-k and random-k with memory, Stich et al. 2018; sign with the mean of the absolute values, Karimireddy et al.
2019 (arXiv:1901.09847); two-way compression with memory on both sides, Zheng et al. 2019 (arXiv:1905.10936).
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Protocol

import torch

from unickpt.training.compression.settings import NONE, POWERSGD, Compression


class Codec(Protocol):
    """Encodes rows of a fixed number of elements.

    Attributes:
        lossless: ``decode`` gives exactly what ``encode`` got.
    """

    @property
    def lossless(self) -> bool: ...

    def size_bytes(self, elements: int) -> int:
        """Return the bytes of a row."""
        ...

    def encode(self, rows: torch.Tensor, counts: torch.Tensor, seed: int) -> torch.Tensor:
        """Encode rows.

        Args:
            rows: float32 ``[n, elements]``. Elements from ``counts`` on are zero.
            counts: int64 ``[n]``, elements of each row that are not padding.
            seed: seed of this parameter in this step. The decoder gets the same.

        Returns:
            uint8 ``[n, size_bytes(elements)]``.
        """
        ...

    def decode(self, payload: torch.Tensor, elements: int, seed: int) -> torch.Tensor:
        """Return float32 ``[n, elements]``. Padding has any value."""
        ...


def codec_of(settings: Compression, elements: int) -> Codec:
    """Return the codec of a parameter.

    Args:
        settings: settings of the job. ``powersgd`` has no codec: what it does not factor travels as float32.
        elements: size of the parameter.
    """
    if settings.scheme in (NONE, POWERSGD) or elements < settings.least_elements:
        return NarrowFloat(torch.float32)
    if settings.scheme == "top-k":
        return TopK(settings.ratio)
    if settings.scheme == "random-k":
        return RandomK(settings.ratio)
    if settings.scheme == "int8":
        return Int8(settings.block)
    return Sign() if settings.scheme == "sign" else NarrowFloat(torch.float16 if settings.scheme == "fp16" else torch.bfloat16)


def seed_of(settings: Compression, name: str, count: int) -> int:
    """Return the seed of a parameter in its exchange number ``count``; the same on every rank and machine."""
    return zlib.crc32(f"{settings.seed}/{name}/{count}".encode())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the rows of a tensor: uint8 ``[n, bytes]``."""
    return tensor.contiguous().view(torch.uint8).reshape(tensor.shape[0], -1)


def _typed(payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements in rows of bytes. Copies: a row of a larger payload may not be aligned."""
    return payload.clone(memory_format=torch.contiguous_format).view(dtype)


def _kept(ratio: float, elements: int) -> int:
    return min(max(math.ceil(ratio * elements), 1), elements)


@dataclass(frozen=True, slots=True)
class NarrowFloat:
    """Elements in a narrower float type; float32 sends them as they are."""

    dtype: torch.dtype

    @property
    def lossless(self) -> bool:
        return self.dtype == torch.float32

    def size_bytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize

    def encode(self, rows: torch.Tensor, _counts: torch.Tensor, _seed: int) -> torch.Tensor:
        return _bytes(rows.to(self.dtype))

    def decode(self, payload: torch.Tensor, _elements: int, _seed: int) -> torch.Tensor:
        return _typed(payload, self.dtype).float()


class _Lossy:
    """A codec whose ``decode`` does not give exactly what ``encode`` got."""

    lossless = False


@dataclass(frozen=True, slots=True)
class TopK(_Lossy):
    """The elements of largest absolute value, with their positions: 8 bytes each."""

    ratio: float

    def size_bytes(self, elements: int) -> int:
        return 8 * _kept(self.ratio, elements)

    def encode(self, rows: torch.Tensor, _counts: torch.Tensor, _seed: int) -> torch.Tensor:
        at = rows.abs().topk(_kept(self.ratio, rows.shape[1]), dim=1, sorted=False).indices
        return torch.cat([_bytes(rows.gather(1, at)), _bytes(at.to(torch.int32))], dim=1)

    def decode(self, payload: torch.Tensor, elements: int, _seed: int) -> torch.Tensor:
        half = payload.shape[1] // 2
        values, at = _typed(payload[:, :half], torch.float32), _typed(payload[:, half:], torch.int32).long()
        return torch.zeros(len(payload), elements, device=payload.device).scatter_(1, at, values)


@dataclass(frozen=True, slots=True)
class RandomK(_Lossy):
    """One element of each of k equal ranges, at a position drawn from the seed: 4 bytes each.

    All ranks draw the same positions, so these are not sent, and the mean of the ranks needs no second loss.
    """

    ratio: float

    def size_bytes(self, elements: int) -> int:
        return 4 * _kept(self.ratio, elements)

    def _positions(self, elements: int, seed: int, device: torch.device) -> torch.Tensor:
        kept = _kept(self.ratio, elements)
        edges = torch.arange(kept + 1, dtype=torch.int64, device="cpu") * elements // kept
        drawn = torch.rand(kept, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
        return (edges[:-1] + (drawn * (edges[1:] - edges[:-1])).long()).to(device)

    def encode(self, rows: torch.Tensor, _counts: torch.Tensor, seed: int) -> torch.Tensor:
        return _bytes(rows[:, self._positions(rows.shape[1], seed, rows.device)])

    def decode(self, payload: torch.Tensor, elements: int, seed: int) -> torch.Tensor:
        found = torch.zeros(len(payload), elements, device=payload.device)
        found[:, self._positions(elements, seed, payload.device)] = _typed(payload, torch.float32)
        return found


@dataclass(frozen=True, slots=True)
class Sign(_Lossy):
    """The sign of each element, one bit, and one scale for the row: the mean of the absolute values."""

    def size_bytes(self, elements: int) -> int:
        return 4 + math.ceil(elements / 8)

    def encode(self, rows: torch.Tensor, counts: torch.Tensor, _seed: int) -> torch.Tensor:
        scale = rows.abs().sum(1, keepdim=True) / counts.clamp(min=1).unsqueeze(1)
        bits = torch.nn.functional.pad((rows >= 0).to(torch.uint8), (0, -rows.shape[1] % 8))
        packed = (bits.view(len(rows), -1, 8) << _weights(rows.device)).sum(2, dtype=torch.uint8)
        return torch.cat([_bytes(scale), packed], dim=1)

    def decode(self, payload: torch.Tensor, elements: int, _seed: int) -> torch.Tensor:
        scale = _typed(payload[:, :4], torch.float32)
        bits = (payload[:, 4:].unsqueeze(2) >> _weights(payload.device)) & 1
        return (bits.view(len(payload), -1)[:, :elements].float() * 2 - 1) * scale


def _weights(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


@dataclass(frozen=True, slots=True)
class Int8(_Lossy):
    """Whole numbers from -127 to 127, with a scale per block: its largest absolute value divided by 127."""

    block: int

    def size_bytes(self, elements: int) -> int:
        return elements + 4 * math.ceil(elements / self.block)

    def encode(self, rows: torch.Tensor, _counts: torch.Tensor, _seed: int) -> torch.Tensor:
        blocks = torch.nn.functional.pad(rows, (0, -rows.shape[1] % self.block)).view(len(rows), -1, self.block)
        scale = blocks.abs().amax(2) / 127
        parts = (blocks / torch.where(scale == 0, 1.0, scale).unsqueeze(2)).round().nan_to_num(0.0).clamp(-127, 127)
        numbers = parts.to(torch.int8).view(len(rows), -1)[:, : rows.shape[1]]
        return torch.cat([_bytes(scale), _bytes(numbers)], dim=1)

    def decode(self, payload: torch.Tensor, elements: int, _seed: int) -> torch.Tensor:
        head = 4 * math.ceil(elements / self.block)
        scale = _typed(payload[:, :head], torch.float32).repeat_interleave(self.block, dim=1)[:, :elements]
        return _typed(payload[:, head:], torch.int8).float() * scale
