"""State of the adapter in one process. It is created once (``edge.RUNTIME``) and passed as an argument."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:  # imported when it is used: hooks are also installed in jobs without the ``unickpt`` key
    import torch

    from unickpt.api.acting import Recorded
    from unickpt.checkpoint.coordination.message_exchange import MessageExchange
    from unickpt.checkpoint.coordination.owners import Owners
    from unickpt.checkpoint.memory.tier import MemoryTier


class Compressed(Protocol):
    """What hooks ask the compression of an engine's gradients (``CompressedEngine``)."""

    def bucket_of_zero(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]: ...
    def exchanged_bucket(self) -> bool: ...
    def exchanged(self, gradients: Sequence[torch.Tensor]) -> bool: ...


class Choosing(Protocol):
    """What hooks tell the choice of a compression (``Automatic``)."""

    def stepped(self, engine: Any) -> None: ...


class Witnessing(Protocol):
    """What hooks tell the witness of an engine (``EngineWitness``), and what checkpoints say of it."""

    @property
    def recorded(self) -> Recorded: ...
    def before(self, engine: Any) -> None: ...
    def after(self, engine: Any) -> None: ...
    def forget(self) -> None: ...


class Replaying(Protocol):
    """What hooks tell of the steps of an engine that ``unickpt replay-step`` repeats (``EngineReplay``)."""

    def before(self, engine: Any) -> None: ...
    def after(self, engine: Any) -> None: ...


class EngineRuntime:
    """Makes the message exchanges of this process. Each has its own keys in the job's store.

    Every rank of a job makes the same sequence of exchanges, so the ranks agree on the keys.

    Attributes:
        engines: number of engines that use unickpt.
        resumes: number of times that ``Trainer.train`` looked for a checkpoint.
        reads_batch: whether ranks of this job have looked for the batch of a checkpoint, each by itself.
        said: lines about the batch that were logged.
        memory: memory tier of the next engine, in which Trainer has looked for a checkpoint; None: it makes its own.
        compressed: compression of the gradients that an engine, or its ZeRO optimizer, reduces.
        choosing: engines whose job chooses a compression by itself.
        witnesses: witness of an engine.
        replays: what records the steps of an engine for ``unickpt replay-step``.
        owners: models of the engines that use unickpt; None before the first one.
        readers: checkpoint engines that load unickpt checkpoints into engines without the ``unickpt`` key.
        script_found: folder that ``get_last_checkpoint`` last returned to a script; None before.
    """

    def __init__(self) -> None:
        self.engines = 0
        self.resumes = 0
        self.reads_batch = False
        self.said: set[str] = set()
        self.memory: MemoryTier | None = None
        self.compressed: WeakKeyDictionary[Any, Compressed] = WeakKeyDictionary()
        self.choosing: WeakKeyDictionary[Any, Choosing] = WeakKeyDictionary()
        self.witnesses: WeakKeyDictionary[Any, Witnessing] = WeakKeyDictionary()
        self.replays: WeakKeyDictionary[Any, Replaying] = WeakKeyDictionary()
        self.owners: Owners | None = None
        self.readers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self.script_found: str | None = None

    def engine_exchange(self, engine: Any, *, timeout_s: float) -> MessageExchange:
        """Return the message exchange of a new engine, whose ranks wait for each other up to ``timeout_s``."""
        from ds_unickpt.framework import internals
        from unickpt.base.round_folder import ends_of_job
        from unickpt.checkpoint.coordination.message_exchange import MessageExchange

        world, prefix = int(engine.world_size), f"unickpt/{self.engines}"
        self.engines += 1
        store, rank = internals.default_store() if world > 1 else None, int(engine.global_rank)
        ended = ends_of_job(rank, world)
        return MessageExchange(store, rank=rank, world=world, prefix=prefix, timeout_s=timeout_s, ended=ended)

    def trainer_exchange(self) -> MessageExchange:
        """Return the message exchange of one call of ``Trainer.train``. Without a process group the job has one rank."""
        import torch

        from ds_unickpt.framework import internals
        from unickpt.checkpoint.coordination.message_exchange import MessageExchange

        initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if initialized else (0, 1)
        prefix = f"unickpt/trainer/{self.resumes}"
        self.resumes += 1
        return MessageExchange(internals.default_store() if world > 1 else None, rank=rank, world=world, prefix=prefix)
