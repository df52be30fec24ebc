"""One global order of samples, divided among any number of ranks by arithmetic alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import index

import torch
from torch.utils.data import Sampler

from unickpt.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Position in a global order of samples.

    Attributes:
        samples: samples consumed by all ranks since the beginning.
        epoch: complete passes over the data.
        offset: samples consumed in the current pass.
        seed: seed of the order.
    """

    samples: int
    epoch: int
    offset: int
    seed: int


class GlobalOrderSampler(Sampler[int]):
    """Sampler of a job that can go on with another number of ranks.

    All epochs follow each other in one global order: the permutation of epoch 0, then the one of epoch 1, and so on. Every
    epoch has every sample once. A step takes the next samples of this order, whatever the number of ranks is, because rank
    ``r`` of ``n`` takes the micro batches ``r``, ``r + n``, ``r + 2n``, ... With the same global batch, each step therefore has
    the same samples on any number of ranks. A batch may begin in one epoch and end in the next.

    The position is the number of samples consumed by all ranks. It comes from the checkpoint and not from the sampler,
    because a data loader fetches ahead: ``engine.global_samples`` under DeepSpeed.

    Example:
        ```python
        start = ds_unickpt.resume_or_start(engine, "out")
        sampler = unickpt.GlobalOrderSampler(
            len(dataset), rank=rank, ranks=ranks, per_device=engine.train_micro_batch_size_per_gpu(), start=start.samples
        )
        loader = DataLoader(dataset, batch_size=sampler.per_device, sampler=sampler, generator=torch.Generator())
        ```

    Args:
        size: number of samples in the data set.
        rank: data-parallel rank of this process.
        ranks: number of data-parallel ranks.
        per_device: samples of a micro batch, which is the ``batch_size`` of the data loader.
        start: samples that all ranks have consumed before.
        epochs: passes over the data until the sampler ends. Samples at the end that do not give every rank a micro batch are
            left out. None: the sampler does not end.
        seed: seed of the order, the same on all ranks.
        shuffle: whether each epoch has a permutation of its own. False: the order of the data set.

    Raises:
        ConfigError: a number is out of bounds.
    """

    def __init__(
        self, size: int, *, rank: int, ranks: int, per_device: int, start: int = 0, epochs: int | None = None, seed: int = 0,
        shuffle: bool = True,
    ) -> None:  # fmt: skip
        if size < 1 or per_device < 1 or not 0 <= rank < ranks or start < 0 or (epochs is not None and epochs < 0):
            raise ConfigError(
                f"GlobalOrderSampler: size {size} and per_device {per_device} must be at least 1, start {start} and epochs "
                f"{epochs} at least 0, and rank {rank} below ranks {ranks}"
            )
        self.size, self.rank, self.ranks, self.per_device = size, rank, ranks, per_device
        self.start, self.epochs, self.shuffle = start, epochs, shuffle
        self.seed = index(seed)  # the product with one of NumPy's integers overflows

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of this rank from ``start`` on."""
        order, epoch = torch.empty(0, device="cpu"), -1
        for place in self.places():
            if place // self.size != epoch:
                epoch = place // self.size
                order = self.order(epoch)
            yield int(order[place % self.size])

    def __len__(self) -> int:
        """Return the number of samples that this rank still yields.

        Raises:
            TypeError: the sampler does not end.
        """
        if self.epochs is None:
            raise TypeError("a GlobalOrderSampler without epochs has no length")
        return self._rounds_left() * self.per_device

    def places(self) -> Iterator[int]:
        """Yield the places of this rank's samples in the global order, from ``start`` on."""
        turn = 0
        while self.epochs is None or turn < self._rounds_left():
            first = self.start + (turn * self.ranks + self.rank) * self.per_device
            yield from range(first, first + self.per_device)
            turn += 1

    def order(self, epoch: int) -> torch.Tensor:
        """Return the indices of one epoch in their order."""
        if not self.shuffle:
            return torch.arange(self.size, device="cpu")
        generator = torch.Generator().manual_seed((self.seed * 0x9E3779B97F4A7C15 + epoch) % 2**63)
        return torch.randperm(self.size, generator=generator, device="cpu")

    def position(self, samples: int) -> DataPosition:
        """Return the position after all ranks together have consumed this number of samples."""
        return DataPosition(samples, samples // self.size, samples % self.size, self.seed)

    def _rounds_left(self) -> int:
        """Return how many micro batches each rank still yields."""
        assert self.epochs is not None
        return max(self.size * self.epochs - self.start, 0) // (self.ranks * self.per_device)
