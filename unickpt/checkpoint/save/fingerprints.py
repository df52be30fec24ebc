"""Short fingerprints of tensors, computed on their devices, to compare values between ranks.

They are not the checksums of the files and are not stored in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 22  # elements; limits the temporary memory to 64 MiB
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return a 64-bit fingerprint of each tensor: equal for equal bits in equal order, otherwise almost always different.

    The tensors have any dtype, shape and device. Each device is synchronized once. A fingerprint has 16 hexadecimal digits.
    """
    sums: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for at, tensor in enumerate(tensors):
        sums.setdefault(tensor.device, []).append((at, _sum(tensor.detach())))
    found = [""] * len(tensors)
    for group in sums.values():
        values = torch.stack([value for _, value in group]).tolist()
        for (at, _), value in zip(group, values, strict=True):
            found[at] = f"{value & (1 << 64) - 1:016x}"
    return found


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the 0-d int64 sum, modulo 2**64, of the mixed bits of each element times an odd number given by its position."""
    flat = torch.view_as_real(tensor).contiguous().view(-1) if tensor.is_complex() else tensor.contiguous().view(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for at in range(0, bits.numel(), _BLOCK):
        block = bits[at : at + _BLOCK].to(torch.int64)
        places = torch.arange(at, at + block.numel(), dtype=torch.int64, device=tensor.device)
        mixed = (block + 1) * _FACTOR
        total += ((mixed ^ (mixed >> 29)) * (places * 2 + 1)).sum()
    return total
