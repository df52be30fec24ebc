"""The jobs of ``benchmarks.memory_tier``: DeepSpeed engines, and Megatron models with the distributed optimizer."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.deepspeed_engine import EngineJob

ALWAYS_MEMORY = 1 << 30  # to_disk_every


class MemoryJob(Protocol):
    """One rank of a job. All ranks make the same calls.

    Attributes:
        rank, world: of this rank.
        tensors: number of tensors of this rank, for peers.
        share_bytes: bytes of masters and optimizer states of this rank.
    """

    rank: int
    world: int
    tensors: int
    share_bytes: int

    def save_to_memory(self) -> None:
        """Save into memory. Returns when training may go on."""

    def pending(self) -> bool:
        """Return whether a save into memory has not reached all hosts."""

    def confirmed(self) -> None:
        """Wait until the copies of all ranks are complete. Raises RuntimeError if a save failed."""

    def save_to_disk(self, place: Path) -> None:
        """Begin an asynchronous save to disk."""

    def finish_disk(self) -> None:
        """Wait for the save to disk."""

    def load_from_memory(self) -> None:
        """Load the newest generation."""

    def load_from_disk(self, place: Path) -> None:
        """Load what ``save_to_disk`` saved."""

    def moved(self, host: Path) -> MemoryJob:
        """Return the job after a restart, with this rank on a host with another folder in memory."""

    def steps(self, until: Callable[[], bool], at_least: int = 4) -> float:
        """Return the median seconds of a training step, until ``until()`` is true on all ranks."""

    def end(self) -> None:
        """End the process."""


class DeepSpeedMemory:
    """An engine that saves into memory, and with ``disk`` a second one that saves to disk. See ``MemoryJob``."""

    def __init__(self, job: EngineJob, stage: int, run: Path, host: Path, replicas: int, *, disk: bool) -> None:
        self._job, self._stage, self._run, self._replicas = job, stage, run, replicas
        self.rank, self.world, self.tensors = job.rank, job.world, job.layers
        host.mkdir(parents=True, exist_ok=True)
        self._engine = job.engine(stage, memory={"to_disk_every": ALWAYS_MEMORY, "folder": str(host), "replicas": replicas})
        self._disk = job.engine(stage) if disk else None
        self.share_bytes = job.share_bytes(self._engine)

    def _saves(self) -> list[Any]:
        savers = [known.saver for known in self._engine.checkpoint_engine.memory._folders.values()]
        return [save for saver in savers if saver is not None for save in saver.pending]

    def save_to_memory(self) -> None:
        self._engine.save_checkpoint(str(self._run))

    def pending(self) -> bool:
        return bool(self._saves())

    def confirmed(self) -> None:
        _wait(self._saves())

    def save_to_disk(self, place: Path) -> None:
        assert self._disk is not None
        self._disk.save_checkpoint(str(place), tag="t")

    def finish_disk(self) -> None:
        assert self._disk is not None
        self._disk.checkpoint_engine.saver.finish()

    def load_from_memory(self) -> None:
        self._engine.load_checkpoint(str(self._run))

    def load_from_disk(self, place: Path) -> None:
        assert self._disk is not None
        self._disk.load_checkpoint(str(place), tag="t")

    def moved(self, host: Path) -> DeepSpeedMemory:
        return DeepSpeedMemory(self._job, self._stage, self._run, host, self._replicas, disk=False)

    def steps(self, until: Callable[[], bool], at_least: int = 4) -> float:
        return self._job.steps(self._engine, until, at_least)

    def end(self) -> None:
        os._exit(0)  # gloo can abort while the interpreter shuts down


class MegatronMemory:
    """A GPT in bf16 with the distributed optimizer over all ranks, saved by ``megatron_unickpt.api``. See ``MemoryJob``."""

    def __init__(self, millions: int, run: Path, host: Path, replicas: int, *, job: Any = None) -> None:
        from megatron_unickpt.testing.jobs import Job  # isort: skip  before anything of megatron

        import torch.distributed as dist

        from megatron_unickpt.testing.layouts import Layout
        from unickpt.base.options.job import MemoryOptions

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._run, self._millions, self._replicas = run, millions, replicas
        host.mkdir(parents=True, exist_ok=True)
        self._options = MemoryOptions(to_disk_every=ALWAYS_MEMORY, folder=str(host), replicas=replicas)
        if job is None:
            width = max(64, int((millions * 1e6 / 40) ** 0.5) // 32 * 32)
            job = Job(Layout.parse(f"gpt-dp{self.world}-dist"), width=width)
            job.train(1)
        self._job = job
        parts = [part for group in job.optimizer.param_groups for part in group["params"]]
        self.tensors = max(1, len(parts))
        self.share_bytes = sum(part.numel() for part in parts) * 12
        self._save: Any = None
        self._disk_save: Any = None

    def _saved(self, place: Path, memory: Any) -> Any:
        from megatron_unickpt import api

        return api.save(
            place, self._job.modules, self._job.optimizer, iteration=self._job.step, asynchronous=True, memory=memory
        )

    def save_to_memory(self) -> None:
        self._save = self._saved(self._run / f"iter_{self._job.step:07d}", self._options)

    def pending(self) -> bool:
        return self._save is not None and not self._save.done

    def confirmed(self) -> None:
        save, self._save = self._save, None
        _wait([save.pending])

    def save_to_disk(self, place: Path) -> None:
        self._disk_save = self._saved(place / "t", None)

    def finish_disk(self) -> None:
        self._disk_save.conclude()

    def load_from_memory(self) -> None:
        from megatron_unickpt import api

        found = api.resume_or_start(self._run, self._job.modules, self._job.optimizer, memory=self._options)
        if found["iteration"] == 0:
            raise RuntimeError("no checkpoint was found in memory")

    def load_from_disk(self, place: Path) -> None:
        from megatron_unickpt import api

        api.load(place / "t", self._job.modules, self._job.optimizer)

    def moved(self, host: Path) -> MegatronMemory:
        from megatron_unickpt.edge import RUNTIME

        RUNTIME._memory = None  # a restarted process has no memory tier yet
        return MegatronMemory(self._millions, self._run, host, self._replicas, job=self._job)

    def steps(self, until: Callable[[], bool], at_least: int = 4) -> float:
        import torch
        import torch.distributed as dist

        found = []
        flag = torch.zeros(1)
        while True:
            begin = time.perf_counter()
            self._job.train(1)
            found.append(time.perf_counter() - begin)
            flag.fill_(float(until() and len(found) >= at_least))
            dist.all_reduce(flag, op=dist.ReduceOp.MIN)
            if flag.item():
                return statistics.median(found)

    def end(self) -> None:
        from megatron_unickpt.testing.truth import close
        from unickpt.testing.launch import leave

        close()
        leave()


def _wait(saves: list[Any]) -> None:
    import torch.distributed as dist

    for save in saves:
        save.wait()
        if not save.committed:
            raise RuntimeError(f"a save into memory failed: {save.cause()}")
    dist.barrier()
