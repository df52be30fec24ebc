"""Samples of plain parameters, by which ranks find out whether what they hold as copies is equal."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash

_SAMPLES = 32  # of a parameter
_MIXED = (
    "These are plain tensors, of which each rank wrote a part as of equal copies: the checkpoint has a mixture. Make them "
    "equal before the save, give them another name on each rank, or save each rank's model with its own group and folder."
)


def samples_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a digest of some elements of each parameter. Each device is synchronized once for each dtype."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in parameters.items():
        data = parameter.detach()
        if data.numel() and data.is_contiguous() and not data.is_meta:
            stride = max(data.numel() // _SAMPLES, 1)
            kinds.setdefault((data.dtype, data.device), []).append((name, data.view(-1)[::stride][:_SAMPLES]))
    found: dict[str, str] = {}
    for taken in kinds.values():
        every = torch.cat([sample for _, sample in taken]).cpu().view(torch.uint8).numpy()
        at = 0
        for name, sample in taken:
            size = sample.numel() * sample.element_size()
            found[name] = xxhash.xxh3_64_hexdigest(every[at : at + size].tobytes())
            at += size
    return found


def different(own: Mapping[str, str], first: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the parameters that differ from the first rank's, each with what that means."""
    return tuple((name, _MIXED) for name, digest in own.items() if first.get(name, digest) != digest)
