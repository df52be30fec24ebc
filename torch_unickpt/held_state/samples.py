"""Samples of plain parameters, by which ranks find out whether what they hold as copies is equal."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash

_SAMPLES = 32  # of a parameter
_DIGITS = 8  # of a digest
_MIXED = (
    "These are plain tensors, of which each rank wrote a part as of equal copies: the checkpoint has a mixture. Make them "
    "equal before the save, give them another name on each rank, or save each rank's model with its own group and folder."
)


def samples_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a digest of some elements of each parameter. Each device is synchronized once for each dtype."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in parameters.items():
        data = parameter.detach()
        if data.layout == torch.strided and not data.is_meta and data.numel() and data.is_contiguous():
            stride = max(data.numel() // _SAMPLES, 1)
            kinds.setdefault((data.dtype, data.device), []).append((name, data.view(-1)[::stride][:_SAMPLES]))
    found: dict[str, str] = {}
    for taken in kinds.values():
        every = torch.cat([sample.contiguous().view(torch.uint8) for _, sample in taken]).cpu().numpy()
        at = 0
        for name, sample in taken:
            size = sample.numel() * sample.element_size()
            found[name] = xxhash.xxh3_64_hexdigest(every[at : at + size].tobytes())
            at += size
    return found


def message(samples: Mapping[str, str]) -> dict[str, str]:
    """Return a message with samples of the first rank: a digest of the names, and a few digits for each, in their order."""
    names = sorted(samples)
    digest = xxhash.xxh3_64_hexdigest("\n".join(names).encode(errors="replace"))
    return {"names": digest, "digits": "".join(samples[name][:_DIGITS] for name in names)}


def different(own: Mapping[str, str], first: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the parameters that differ from the first rank's, each with what that means.

    Args:
        own: samples of this rank.
        first: ``message`` of the first rank. If it has other names, as another pipeline stage has, nothing is compared.
    """
    here = message(own)
    if here["names"] != first["names"] or here == first:
        return ()
    places = (slice(at * _DIGITS, (at + 1) * _DIGITS) for at in range(len(own)))
    return tuple(
        (name, _MIXED)
        for name, place in zip(sorted(own), places, strict=True)
        if here["digits"][place] != first["digits"][place]
    )
