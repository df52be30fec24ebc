"""Masters as bf16 weights and 16-bit remainders."""

from __future__ import annotations

import struct

import pytest
import torch

from megatron_unickpt.framework.remainders import divided, joined


def halves(master: float) -> tuple[int, int]:
    """Upper and lower half of a float32 as the kernel has them: two int16."""
    lower, upper = struct.unpack("<hh", struct.pack("<f", master))
    return upper, lower


@pytest.mark.parametrize(
    "master", [0.0, -0.0, 1.0, -1.0, 1.00390625, -1.00390625, 1.01171875, 0.1, -0.1, 3.0e-39, -1.1754944e-38, 3.3e38]
)
def test_the_halves_are_those_of_the_kernel(master: float) -> None:
    """1.00390625 and 1.01171875 are ties: the cast to bf16 rounds the first one down and the second one up."""
    upper, lower = halves(master)
    weights, remainders = divided(torch.tensor([master]))
    assert int(remainders) == lower
    assert int(weights.view(torch.int16)) == upper + (lower < 0)


def test_joining_is_the_inverse_for_every_lower_half() -> None:
    for upper in (0x3F80, 0x3F81, 0x0000, -0x8000, -0x4080, 0x7F00):
        bits = (torch.full((1 << 16,), upper, dtype=torch.int32) << 16) | torch.arange(1 << 16, dtype=torch.int32)
        masters = bits.view(torch.float32)
        weights, remainders = divided(masters)
        assert torch.equal(joined(weights, remainders).view(torch.int32), bits)
        ties = (bits & 0xFFFF) == 0x8000
        assert torch.equal(weights[~ties].view(torch.int16), masters.bfloat16()[~ties].view(torch.int16))


def test_random_masters_and_views() -> None:
    generator = torch.Generator().manual_seed(1)
    masters = torch.randn(1000, generator=generator)
    weights, remainders = divided(masters[100:900])
    assert torch.equal(joined(weights, remainders), masters[100:900])
    assert torch.equal(joined(weights.view(8, 100), remainders.view(8, 100)).view(-1), masters[100:900])
