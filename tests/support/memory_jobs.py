"""A job that saves into memory: ranks are threads, a host is a folder with a keeper process of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.rank_threads import on_all_ranks
from tests.support.saves import INFO, WRITER, values
from unickpt.base.errors import CorruptCheckpointError
from unickpt.base.memory_status import MemoryStatus
from unickpt.base.options.job import MemoryOptions
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.memory.generations import Inventory
from unickpt.checkpoint.memory.hosts import JobHosts
from unickpt.checkpoint.memory.tier import MemoryTier
from unickpt.checkpoint.save.requests import SaveOptions, SaveRequest
from unickpt.checkpoint.save.shards import Contribution, shards_of_flat_range

HOSTS = (0, 0, 1)  # of each rank


class Job:
    """Ranks that save into memory. They can be started again, on other hosts."""

    def __init__(self, folder: Path, hosts: Sequence[int] = HOSTS, **options: Any) -> None:
        self.folder, self.hosts = folder, hosts
        self.checkpoints = str(folder / "checkpoints")
        self.statuses: list[MemoryStatus] = []
        self.tiers = [self._tier(host, options) for host in hosts]
        self.exchanges: list[MessageExchange] = []

    def _tier(self, host: int, options: dict[str, Any]) -> MemoryTier:
        parent = self.folder / f"host{host}"
        parent.mkdir(exist_ok=True)
        return MemoryTier(
            MemoryOptions(**{"to_disk_every": 100, "folder": str(parent), **options}), SaveOptions(), self.statuses.append
        )

    def everywhere(self, action: Callable[[MemoryTier, MessageExchange], Any]) -> list[Any]:
        """Run an action on every rank."""

        def run(exchange: MessageExchange) -> Any:
            return action(self.tiers[exchange.rank], exchange)

        results = on_all_ranks(run, world=len(self.hosts))
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def save(self, *steps: int) -> None:
        """Save steps one after another, and wait for each of them and its copies."""

        def one(tier: MemoryTier, exchange: MessageExchange) -> None:
            for step in steps:
                save = tier.save(request(self.checkpoints, step, exchange.rank, len(self.hosts)), exchange)
                assert save is not None
                assert save.wait(30)
                assert save.committed, save.cause()

        self.everywhere(one)

    def turns(self, *steps: int) -> list[str]:
        """Save steps; return for each whether it is in memory, failed, or belongs on disk, where it is then."""

        def one(tier: MemoryTier, exchange: MessageExchange) -> list[str]:
            found = []
            for step in steps:
                save = tier.save(request(self.checkpoints, step, exchange.rank, len(self.hosts)), exchange)
                if save is None:
                    tier.saved_to_disk(self.checkpoints, 0.0)
                    found.append("disk")
                else:
                    found.append("memory" if save.wait(30) and save.committed else "failed")
            return found

        results = self.everywhere(one)
        assert all(result == results[0] for result in results)
        return list(results[0])

    def load(self) -> tuple[list[int], list[torch.Tensor | Exception]]:
        """Return the steps that can be loaded, and what each rank reads of the newest."""

        def one(tier: MemoryTier, exchange: MessageExchange) -> Any:
            load = tier.look(self.checkpoints, exchange)
            if not load.found:
                return [], None
            try:
                checkpoint = tier.open(self.checkpoints, load, load.found[0].number)
                return [found.step for found in load.found], checkpoint.read_tensor(*INFO.key)
            except CorruptCheckpointError as err:
                return [found.step for found in load.found], err

        results = self.everywhere(one)
        assert all(steps == results[0][0] for steps, _ in results)
        return results[0][0], [value for _, value in results]

    def inventory(self, host: int) -> Inventory:
        """Return what a host holds."""
        found = [tier for tier, at in zip(self.tiers, self.hosts, strict=True) if at == host]
        hosts = next(iter(found[0]._folders.values())).hosts
        assert hosts is not None
        return hosts.folder.inventory()

    @staticmethod
    def hosts_of(tier: MemoryTier) -> list[JobHosts]:
        """Return the hosts that a tier has found: none, or one value for the only save directory."""
        return [known.hosts for known in tier._folders.values() if known.hosts is not None]

    def end(self) -> None:
        """End the keepers, as the end of the processes does."""
        for tier in self.tiers:
            for known in tier._folders.values():
                if known.saver is not None:
                    known.saver.on_disk(math.inf)  # the end of this process has nothing to write
                if known.hosts is not None and known.hosts.keeper is not None:
                    known.hosts.keeper.stop()


def request(folder: str, step: int, rank: int, world: int) -> SaveRequest:
    lo, hi = (INFO.numel * r // world for r in (rank, rank + 1))
    shards = shards_of_flat_range(INFO, lo, hi, values(step)[lo:hi].clone())
    made = Contribution(shards, step, WRITER, tensors=[INFO], rank_objects={"rank": rank}, objects={"step": step})
    return SaveRequest(lambda _: made, folder, f"step{step}", True)


def jobs_in(folder: Path) -> Iterator[Callable[..., Job]]:
    """Give a function that starts a job in a folder and ends the one before it. For a fixture."""
    started: list[Job] = []

    def start(hosts: Sequence[int] = HOSTS, **options: Any) -> Job:
        for before in started:
            before.end()
        started.append(Job(folder, hosts, **options))
        return started[-1]

    yield start
    for each in started:
        each.end()
