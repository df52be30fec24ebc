"""Hashes of tensors that notice what sums and xor do not: swapped words, and the same bit in two words.

A tensor's bytes are read as words of 64 bits, in blocks. Each word is multiplied, mixed, and multiplied by an odd key of its
position; the block's hash is the sum. The hashes of the blocks are words in turn. All of it is integer arithmetic modulo 2**64,
so the value is the same on every device and in every order of summation. A change of one word always changes the hash, because
each operation on it can be inverted. Other changes are missed by chance, about once in 2**40 or less often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from unickpt.base.errors import ConfigError

BLOCK = 1 << 20  # words: temporary memory of some times 8 MiB
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
_SECOND = 0xBF58476D1CE4E5B9 - (1 << 64)
_LOW_32 = (1 << 32) - 1
_MASK = (1 << 64) - 1


def hashes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one int64 hash for each tensor, on the CPU. Each device is synchronized once.

    Equal are hashes of tensors with the same dtype, shape and bytes, whatever their strides and devices are. The bytes count,
    not the numbers: 0.0 and -0.0 differ.

    Raises:
        ConfigError: a tensor is sparse, or has no memory.
    """
    found = torch.zeros(len(tensors), dtype=torch.int64, device="cpu")
    longest: dict[torch.device, int] = {}
    by_device: dict[torch.device, list[int]] = {}
    for at, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise ConfigError(f"only tensors with memory of their own have a hash, not {tensor.layout} on {tensor.device}")
        longest[tensor.device] = max(longest.get(tensor.device, 0), tensor.numel() * tensor.element_size())
        by_device.setdefault(tensor.device, []).append(at)
    for device, places in by_device.items():
        keys = _keys(min(BLOCK, -(-longest[device] // 8)), device)
        values = torch.stack([_of_bytes(tensors[at].detach(), keys) for at in places])
        found[torch.tensor(places, device="cpu")] = values.cpu()
    kinds = torch.tensor([_kind(tensor) for tensor in tensors], dtype=torch.int64, device="cpu")
    return found ^ kinds


def combined(values: torch.Tensor) -> int:
    """Return one hash of some hashes, an int64 tensor, in their order."""
    return int(hashes([values])[0])


def _kind(tensor: torch.Tensor) -> int:
    """Return a number of dtype and shape, which the bytes do not tell."""
    value = 0
    for letter in f"{tensor.dtype} {tuple(tensor.shape)}".encode():
        value = ((value ^ letter) * 0x100000001B3) & _MASK
    value = _mixed_number(value)
    return value - (1 << 64) if value >> 63 else value


def _mixed_number(value: int) -> int:
    value = (value * (_FACTOR & _MASK)) & _MASK
    value ^= value >> 32
    return (value * (_SECOND & _MASK)) & _MASK


def _keys(count: int, device: torch.device) -> torch.Tensor:
    """Return an odd number for each position in a block. They look random, so that no two changes cancel by their places."""
    keys = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _FACTOR
    for factor in (_SECOND, _FACTOR):
        keys ^= (keys >> 32) & _LOW_32
        keys *= factor
    keys ^= (keys >> 32) & _LOW_32
    return keys | 1


def _of_words(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the 0-d hash of at most ``BLOCK`` words."""
    mixed = words * _FACTOR
    mixed ^= (mixed >> 32) & _LOW_32
    mixed *= keys[: mixed.numel()]
    return mixed.sum()


def _of_bytes(tensor: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the 0-d hash of the bytes of a tensor, on its device."""
    tensor = tensor.resolve_conj().resolve_neg()  # bits of a view whose values are not in memory
    per_block, end = BLOCK * 8 // tensor.element_size(), tensor.numel()
    blocks = (_flat(tensor, start, min(start + per_block, end)) for start in range(0, end, per_block))
    sums = [_of_words(_words(block), keys) for block in blocks]
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    return sums[0] if len(sums) == 1 else _of_bytes(torch.stack(sums), keys)


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Return the elements of a flat tensor as words of 64 bits. What is missing in the last one is zero."""
    if flat.stride(0) != 1:  # also of a single element
        flat = flat.clone(memory_format=torch.contiguous_format)
    flat = flat.view(torch.uint8)
    rest = flat.numel() % 8
    if rest:
        whole = torch.zeros(flat.numel() + 8 - rest, dtype=torch.uint8, device=flat.device)
        whole[: flat.numel()] = flat
        flat = whole
    elif flat.storage_offset() % 8 or flat.data_ptr() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def _flat(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return some elements in the order of a contiguous tensor. Copies no more than about as many."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    row = math.prod(tensor.shape[1:])
    first, last = start // row, -(-stop // row)
    if row <= stop - start or row == 1:
        return tensor[first:last].reshape(-1)[start - first * row : stop - first * row]
    parts = [_flat(tensor[at], max(start - at * row, 0), min(stop - at * row, row)) for at in range(first, last)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
