"""The memory tiers of a program, one for each set of options, such as those of two models."""

from __future__ import annotations

from collections.abc import Callable

from unickpt.base.memory_status import MemoryStatus
from unickpt.base.options.job import MemoryOptions
from unickpt.checkpoint.memory.tier import MemoryTier
from unickpt.checkpoint.save.requests import SaveOptions


class MemoryTiers:
    """The memory tiers of a program. Every rank makes the same calls.

    Args:
        note: receives the state of a tier on rank 0, for metrics.
    """

    def __init__(self, note: Callable[[MemoryStatus], None]) -> None:
        self._note = note
        self._tiers: dict[MemoryOptions, MemoryTier] = {}

    def of(self, options: MemoryOptions, save_options: SaveOptions, save_dir: str = "") -> MemoryTier:
        """Return the tier with these options. A save directory that had others continues with these.

        Args:
            options: options of the tier.
            save_options: options of saves to disk, for a new tier.
            save_dir: the directory that the tier is for; '' if it has no other options anywhere.
        """
        tier = self._tiers.get(options)
        if tier is None:
            tier = self._tiers[options] = MemoryTier(options, save_options, self._note)
        for other in self._tiers.values():
            if other is not tier and save_dir:
                tier.take_over(other, save_dir)
        return tier

    def saved_to_disk(self, save_dir: str, seconds: float) -> None:
        """Note that a checkpoint is on disk, and how long ago its save began."""
        for tier in self._tiers.values():
            tier.saved_to_disk(save_dir, seconds)
