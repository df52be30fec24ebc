"""A named global tensor of a checkpoint: one entry of the table of tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unickpt.checkpoint.format.dtype_names import itemsize_bytes

MAX_NDIM = 32
KINDS = ("parameter", "buffer", "optimizer", "object")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A named global tensor of a checkpoint.

    Attributes:
        name: fully qualified parameter or buffer name.
        state: ``weight``, ``master``, or the optimizer's own key (``exp_avg``, ...).
        dtype: format dtype name of the stored (or, if derived, of the restored) elements.
        shape: global shape.
        kind: one of ``KINDS``.
        derived_from: None for a stored tensor. A derived tensor is the cast of this state of the same name.
            It may still have fragments, which override the cast where the job held other values.
    """

    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    derived_from: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        return (self.name, self.state)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * itemsize_bytes(self.dtype)
