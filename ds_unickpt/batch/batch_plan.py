"""Factors of a global batch on another number of ranks, as a pure function of what the configuration and the checkpoint say."""

from __future__ import annotations

from dataclasses import dataclass

from ds_unickpt.batch.batches import Batch
from unickpt.base.errors import ConfigError

_SWITCH_OFF = 'set "keep_global_batch": "never" in "unickpt" to train with another global batch'
_SHOWN = 12  # numbers of ranks that an error names


@dataclass(frozen=True, slots=True)
class Asked:
    """The batch as a DeepSpeed configuration spells it. None: not given.

    Attributes:
        total: ``train_batch_size``.
        per_device: ``train_micro_batch_size_per_gpu``.
        accumulation: ``gradient_accumulation_steps``.
        tolerance: by which share ``total`` may differ from the batch that is made; 0 for an exact batch.
    """

    total: int | None = None
    per_device: int | None = None
    accumulation: int | None = None
    tolerance: float = 0.0


def planned(asked: Asked, saved: Batch | None, ranks: int) -> Batch | None:
    """Return the batch that keeps the global batch on these ranks.

    A given ``train_batch_size`` is the global batch; otherwise it is the one of the checkpoint. A given
    ``train_micro_batch_size_per_gpu`` stays; otherwise the micro batch is at most the one of the checkpoint, so that it fits
    the memory of a device. The accumulation follows. If these ranks cannot make a given ``train_batch_size``, the accumulation
    is rounded, within the tolerance.

    Args:
        asked: what the configuration gives.
        saved: batch of the job that saved the checkpoint; None if there is no checkpoint.
        ranks: data-parallel ranks of this job.

    Returns:
        None if DeepSpeed's own rule decides: neither the configuration nor a checkpoint gives what is needed.

    Raises:
        ConfigError: this number of ranks cannot make the batch. The message names those that can.
    """
    total = asked.total or (saved.total if saved is not None and asked.per_device is not None else None)
    if total is None:
        return None
    if asked.per_device is not None:
        accumulation, rest = divmod(total, asked.per_device * ranks)
        if rest:
            return _near(asked, total, asked.per_device, ranks)
        return Batch(total, asked.per_device, accumulation, ranks)
    if saved is None or saved.per_device is None:
        return None
    share, rest = divmod(total, ranks)
    if rest:
        return _near(asked, total, min(saved.per_device, max(share, 1)), ranks, exact=1)
    per_device = max(size for size in range(1, min(saved.per_device, share) + 1) if share % size == 0)
    return Batch(total, per_device, share // per_device, ranks)


def in_place_of(asked: Asked, made: Batch) -> str:
    """Return what a log line adds about a batch that is not the one of the configuration; '' if it is."""
    if asked.total in (None, made.total):
        return ""
    share = (made.total - asked.total) / asked.total
    return f", in place of {asked.total}: {share:+.2%}, within batch_tolerance {asked.tolerance:.2%}"


def allowed_ranks(total: int, per_device: int) -> list[int]:
    """Return the numbers of ranks on which a micro batch makes a global batch, in ascending order."""
    parts, rest = divmod(total, per_device)
    return [] if rest else [ranks for ranks in range(1, parts + 1) if parts % ranks == 0]


def _near(asked: Asked, total: int, per_device: int, ranks: int, exact: int | None = None) -> Batch:
    """Return the nearest batch that these ranks can make, if it is within the tolerance.

    Only a batch that the configuration names has a tolerance: that of a checkpoint would drift from restart to restart.

    Raises:
        ConfigError: it is not within the tolerance. The message names the numbers of ranks that can make the batch with micro
            batches of ``exact``, or else ``per_device``.
    """
    below = total // (per_device * ranks)
    made = [Batch(count * per_device * ranks, per_device, count, ranks) for count in (below, below + 1) if count]
    near = min(made, key=lambda batch: abs(batch.total - total))
    if asked.total is not None and abs(near.total - total) <= asked.tolerance * total:
        return near
    text = _impossible(total, exact or per_device, ranks)
    if asked.tolerance:
        share = abs(near.total - total) / total
        text += f" The nearest batch is {near.total}, {share:.2%} away; batch_tolerance allows {asked.tolerance:.2%}" + (
            "." if asked.total is not None else ", but only of a train_batch_size in the JSON."
        )
    raise ConfigError(text)


def _impossible(total: int, per_device: int, ranks: int) -> str:
    allowed = allowed_ranks(total, per_device)
    of_micro = f" with micro batches of {per_device}" if per_device > 1 else ""
    text = f"the global batch of {total} cannot be kept on {ranks} data-parallel ranks{of_micro}"
    if not allowed:
        return f"{text}: {total} is no multiple of {per_device}. Change the micro batch, or {_SWITCH_OFF}."
    near = sorted(sorted(allowed, key=lambda each: abs(each - ranks))[:_SHOWN])
    more = " (the nearest)" if len(near) < len(allowed) else ""
    return (
        f"{text}. It can be kept on these numbers of ranks{more}: {', '.join(map(str, near))}. Start one of them (under "
        f"torchrun --rdzv-backend unickpt: --rdzv-conf sizes=A+B, in hosts), or {_SWITCH_OFF}."
    )
