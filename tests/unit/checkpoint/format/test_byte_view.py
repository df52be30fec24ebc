"""One element of a tensor with strides: torch calls it contiguous, and does not view it as bytes."""

from __future__ import annotations

import torch

from unickpt.checkpoint.format import object_encoder
from unickpt.checkpoint.load import checked_read, rng
from unickpt.checkpoint.save.data_file import host_bytes


def test_one_element_with_a_stride_has_its_bytes() -> None:
    piece = torch.arange(24, dtype=torch.float32).reshape(4, 6).t()[1:2, 2:3]
    assert piece.reshape(-1).stride() == (6,)
    expected = torch.tensor([13.0]).numpy().tobytes()
    assert bytes(host_bytes(piece)) == expected
    assert bytes(checked_read.bytes_of(piece)) == expected
    assert object_encoder.digest_of([piece]) == object_encoder.digest_of([piece.clone()])
    assert rng.seed_from(piece) == rng.seed_from(piece.clone())
