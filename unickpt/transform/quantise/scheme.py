"""Number of bits of a weight, and how many of its values share a scale."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unickpt.base.errors import ConfigError

BITS = (4, 8, 16)  # what vLLM has kernels for
GROUP = 128  # default of llm-compressor, which vLLM's kernels support
WORD_BITS = 32  # packed values fill words of 32 bits
CHOICES = ("4", "8", "16")  # what a plan chooses from
SECOND_MOMENT, WEIGHT_ERROR, VARIANCE = "second-moment", "weight-error", "variance"
INDICATORS = (SECOND_MOMENT, WEIGHT_ERROR, VARIANCE)  # of the error of a rounding: measure.py
_TEXT = re.compile(r"(4|8)(?:/([1-9]\d*|channel))?|16")


@dataclass(frozen=True, slots=True, order=True)
class Scheme:
    """Rounding of a weight ``[out, in]``.

    Attributes:
        bits: bits of a value. 16: not rounded.
        group: neighbouring inputs of a row that share a scale; 0: the whole row (per channel), and for 16 bits.
    """

    bits: int
    group: int = 0

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """Parse ``4`` (groups of 128), ``4/32``, ``8/channel`` or ``16``.

        Raises:
            ConfigError: the text has another form.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ConfigError(f"{text!r}: expected 4, 8 or 16 bits, with a group such as 4/32 or 8/channel")
        if found[1] is None:
            return cls(16)
        return cls(int(found[1]), 0 if found[2] == "channel" else int(found[2] or GROUP))

    @property
    def rounds(self) -> bool:
        """Whether weights change."""
        return self.bits < 16

    def __str__(self) -> str:
        return f"{self.bits}/{self.group or 'channel'}" if self.rounds else str(self.bits)

    def scales(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the shape of the scales of a weight ``[out, in]``."""
        return shape[0], shape[1] // self.group if self.group else 1

    def packed(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the shape of the packed weight, in words of 32 bits."""
        return shape[0], shape[1] * self.bits // WORD_BITS

    def size_bytes(self, shape: Sequence[int], itemsize_bytes: int) -> int:
        """Return the size of a weight with its scales, in bytes.

        Args:
            shape: ``[out, in]``.
            itemsize_bytes: size of a scale, and of a value that is not rounded.
        """
        if not self.rounds:
            return shape[0] * shape[1] * itemsize_bytes
        rows, columns = self.packed(shape)
        return rows * columns * WORD_BITS // 8 + rows * self.scales(shape)[1] * itemsize_bytes

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether rows divide into groups and fill words."""
        return not self.rounds or not (shape[1] * self.bits % WORD_BITS or (self.group and shape[1] % self.group))

    def fitted(self, shapes: Iterable[Sequence[int]]) -> Scheme:
        """Return this scheme; per channel if rows do not divide into groups; 16 bits if they do not fill words."""
        shapes = list(shapes)
        for scheme in (self, Scheme(self.bits)):
            if all(scheme.fits(shape) for shape in shapes):
                return scheme
        return Scheme(16)
