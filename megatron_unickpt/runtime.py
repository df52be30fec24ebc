"""State of the adapter in one process. It is created once (``edge.RUNTIME``) and passed as an argument."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, ref

from unickpt.base.round_folder import ends_of_job
from unickpt.checkpoint.coordination.message_exchange import MessageExchange

if TYPE_CHECKING:  # imported when they are used: hooks are also installed in jobs that never use unickpt
    from megatron_unickpt.held_state.foreign_state import Receiver
    from megatron_unickpt.held_state.kept_description import KnownDescription
    from megatron_unickpt.tracker import Diverted, Trackers
    from unickpt.api.acting import Recorded
    from unickpt.api.preemption import Preemption
    from unickpt.base.options.job import MemoryOptions
    from unickpt.checkpoint.coordination.owners import Owner, Owners
    from unickpt.checkpoint.load.checkpoint import Checkpoint
    from unickpt.checkpoint.load.report import LoadReport
    from unickpt.checkpoint.memory.tier import MemoryTier, MemoryTurn
    from unickpt.checkpoint.memory.tiers import MemoryTiers
    from unickpt.checkpoint.save.requests import SaveOptions, SaveResult
    from unickpt.checkpoint.save.saver import Saver
    from unickpt.training.witness.settings import Settings


class Purpose(enum.Enum):
    """Purpose of a call of a function of Megatron's training scripts."""

    SAVE = "save as unickpt"
    LOAD = "load a unickpt checkpoint"
    NATIVE = "save or load in Megatron's own format"


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """A call of the training scripts' ``save_checkpoint`` or ``load_checkpoint`` that is in progress.

    Megatron calls further hooked functions during the call, and does not pass them its purpose.

    Attributes:
        purpose: which format is saved or loaded; None outside of a call.
        source: opened checkpoint, for ``Purpose.LOAD``.
        receiver: objects of the job that receive the state of another framework's checkpoint, for ``Purpose.LOAD``.
        directory: directory by which Megatron's functions name ``source``. It need not exist if the checkpoint is in memory.
        complete: every parameter of the checkpoint must be loaded, for ``Purpose.LOAD``.
        memory: the checkpoint goes into memory, for ``Purpose.SAVE``.
        memory_folder: folder in which checkpoints in memory would be on disk, for ``Purpose.SAVE``.
        order: of this save in the job, for ``Purpose.SAVE``.
        replaces: the checkpoint takes the place of the one that the tracker file names, for ``Purpose.SAVE``.
        hidden: folder whose tracker file Megatron's function takes for missing, because it names no checkpoint, for
            ``Purpose.NATIVE``.
        diverted: Megatron's function writes no tracker file, because unickpt does. For a save to disk.
    """

    purpose: Purpose | None = None
    source: Checkpoint | None = None
    receiver: Receiver | None = None
    directory: str = ""
    complete: bool = False
    memory: MemoryTurn | None = None
    memory_folder: str = ""
    order: int = 0
    replaces: bool = True
    hidden: str = ""
    diverted: Diverted | None = None


class Witnessing(Protocol):
    """What hooks tell the witness of an optimizer (``OptimizerWitness``), and what checkpoints say of it."""

    @property
    def recorded(self) -> Recorded: ...
    def watches(self, parameter: Any) -> bool: ...
    def before(self) -> None: ...
    def after(self, result: Any) -> None: ...


class Replaying(Protocol):
    """What hooks tell of the steps of an optimizer that ``unickpt replay-step`` repeats (``OptimizerReplay``)."""

    def before(self) -> None: ...
    def after(self, result: Any) -> None: ...


@dataclass
class AskedWitness:
    """A witness that the arguments of a training script ask for, until its first step.

    Attributes:
        settings: its settings.
        folders: returns the folders into which the script saves.
        chunks: the model of this rank, as its forward passes show it.
    """

    settings: Settings
    folders: Callable[[], Sequence[str]]
    chunks: list[Any] = field(default_factory=list)


class Runtime:
    """State of the adapter that outlives a call.

    Attributes:
        last_save: result of the last save that ended; None before.
        last_report: report of the last load; None before.
        saves_begun: number of saves that this process began to agree on.
        loads_begun: number of loads that this process began to agree on.
        call: call of the training scripts that is in progress; an empty one outside of one.
        preemption: what lets all ranks of a script stop together; None before its first iteration has ended.
        witnesses: witness of an optimizer.
        replays: what records the steps of an optimizer for ``unickpt replay-step``.
        asked_witness: what a training script asks for, until it has begun; None otherwise.
        resumed: folders from which ``resume_or_start`` has loaded the models of a program, each with one of its parameters.
        boundaries: ends of iterations that it has looked at.
        timeout_s: how long a rank waits for the others, in seconds; None: ``--unickpt-timeout-seconds``. Takes effect before
            the first save or load.
    """

    def __init__(self, *, timeout_s: float | None = None) -> None:
        self.timeout_s = timeout_s
        self.last_save: SaveResult | None = None
        self.last_report: LoadReport | None = None
        self.saves_begun = 0
        self.loads_begun = 0
        self.call = ScriptCall()
        self.preemption: Preemption | None = None
        self.witnesses: WeakKeyDictionary[Any, Witnessing] = WeakKeyDictionary()
        self.replays: WeakKeyDictionary[Any, Replaying] = WeakKeyDictionary()
        self.asked_witness: AskedWitness | None = None
        self.resumed: list[tuple[ref[Any], str]] = []
        self.boundaries = 0
        self._known: KnownDescription | None = None
        self._trackers: Trackers | None = None
        self._exchanges: dict[str, tuple[Any, MessageExchange]] = {}
        self._group: Any = None
        self._saver: Saver | None = None
        self._memory: MemoryTiers | None = None
        self._said: set[str] = set()
        self._owners: Owners | None = None
        self._owned: Any = None  # owner of each first parameter

    @property
    def known(self) -> KnownDescription:
        """What the saves of this process keep for each other."""
        from megatron_unickpt.held_state.kept_description import KnownDescription

        if self._known is None:
            self._known = KnownDescription()
        return self._known

    @property
    def owners(self) -> Owners:
        """Models of this process that were saved or loaded."""
        from torch.utils.weak import WeakIdKeyDictionary

        from unickpt.checkpoint.coordination.owners import Owners

        if self._owners is None:
            self._owners, self._owned = Owners(), WeakIdKeyDictionary()
        return self._owners

    def owner(self, state: Any) -> Owner | None:
        """Return the model of a sharded state dict, known by its first parameter; None without parameters."""
        key, held = _first_parameter(state)
        if held is None:
            return None
        owners = self.owners
        if held not in self._owned:
            self._owned[held] = owners.add(f"a model with {key}")
        owner: Owner = self._owned[held]
        return owner

    def recorded(self, state: Any) -> Recorded | None:
        """Return what checkpoints say of the witness of the model of a sharded state dict; None without one."""
        held = _first_parameter(state)[1] if self.witnesses else None
        found = (own.recorded for own in self.witnesses.values() if held is not None and own.watches(held))
        return next(found, None)

    def exchange(self) -> MessageExchange:
        """Return the message exchange of the ranks: of the job, or inside ``among`` of a group. A new store gets a new one."""
        import torch.distributed as dist

        world, name = dist.get_world_size(self._group), "" if self._group is None else f"/{self._group.group_name}"
        store = dist.distributed_c10d._get_default_store() if world > 1 else None
        found = self._exchanges.get(name)
        if found is None or found[0] is not store or found[1].world != world:
            found = store, self._exchange_of(store, f"unickpt/megatron{name}")
            self._exchanges[name] = found
            self._memory = None
        return found[1]

    def _exchange_of(self, store: Any, prefix: str) -> MessageExchange:
        import torch.distributed as dist

        from megatron_unickpt.framework import internals
        from unickpt.checkpoint.coordination.ends import Ends

        rank, world = dist.get_rank(self._group), dist.get_world_size(self._group)
        timeout_s = internals.options().timeout_seconds if self.timeout_s is None else self.timeout_s
        members = dist.get_process_group_ranks(self._group) if self._group is not None else list(range(world))
        of_round = ends_of_job(dist.get_rank(), dist.get_world_size())
        of_group = Ends(store, rank=rank, prefix=prefix) if store is not None else frozenset

        def ended() -> frozenset[int]:
            return of_group() | frozenset(members.index(each) for each in of_round() if each in members)

        return MessageExchange(store, rank=rank, world=world, prefix=prefix, timeout_s=timeout_s, ended=ended)

    @contextmanager
    def among(self, group: Any = None, timeout_s: float | None = None) -> Iterator[None]:
        """Let saves and loads that begin inside this block be those of a process group, or have another time limit.

        Args:
            group: process group; None for all ranks of the job.
            timeout_s: how long a rank waits for the others; None: as otherwise.

        Raises:
            ConfigError: this process is not a member of the group, or the time limit is not positive.
        """
        import torch.distributed as dist

        from unickpt.base.errors import ConfigError

        if group is not None and dist.get_rank(group) < 0:
            raise ConfigError("this process is not a member of the process group that was passed as group")
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s!r}: expected a positive number of seconds")
        before, self._group = self._group, group
        exchange = None
        try:
            exchange = self.exchange()
            limit = exchange.timeout_s
            exchange.timeout_s = limit if timeout_s is None else timeout_s
            yield
        finally:
            if exchange is not None:
                exchange.timeout_s = limit
            self._group = before

    def saver(self, options: SaveOptions | None = None) -> Saver:
        """Return the saver of this process, which keeps its staging memory between saves.

        Args:
            options: None leaves them as they are. A change waits for pending saves, and makes a new saver.
        """
        from unickpt.checkpoint.save.saver import Saver

        if self._saver is None or (options is not None and options != self._saver.options):
            if self._saver is not None:
                self._saver.finish()
            self._saver = Saver(options)
        return self._saver

    def memory(self, options: MemoryOptions, save_options: SaveOptions, save_dir: str = "") -> MemoryTier:
        """Return the memory tier of this job with these options.

        Args:
            options: options of the tier.
            save_options: options of saves to disk.
            save_dir: the directory that the tier is for; '' if it has no other options anywhere.
        """
        from unickpt.checkpoint.memory.tiers import MemoryTiers
        from unickpt.diagnosis import session

        self.exchange()
        self._memory = self._memory or MemoryTiers(session.memory_status)
        return self._memory.of(options, save_options, save_dir)

    def saved_to_disk(self, folder: str, seconds: float) -> None:
        """Note that a checkpoint is on disk, so that the end of the job does not write an older one from memory.

        Args:
            folder: folder in which checkpoints in memory would be on disk.
            seconds: how long ago its save began.
        """
        if self._memory is not None:
            self._memory.saved_to_disk(folder, seconds)

    @property
    def trackers(self) -> Trackers:
        """The tracker files of the scripts' save folders."""
        from megatron_unickpt.tracker import Trackers

        if self._trackers is None:
            self._trackers = Trackers()
        return self._trackers

    @contextmanager
    def during(self, call: ScriptCall) -> Iterator[None]:
        """Set ``call`` inside this block."""
        before, self.call = self.call, call
        try:
            yield
        finally:
            self.call = before

    def opened(self, directory: str | Path) -> Checkpoint:
        """Return the checkpoint that the scripts have opened, or open it if they have not opened this directory.

        Raises:
            UnickptError: see ``Checkpoint.open``.
        """
        from unickpt.checkpoint.load.checkpoint import Checkpoint

        source = self.call.source
        if source is not None and self.call.directory == str(directory):
            return source
        return Checkpoint.open(str(directory))

    def recognises(self, directory: str | Path | None) -> bool:
        """Return whether a directory holds a unickpt checkpoint, or names the one that the scripts are loading."""
        from megatron_unickpt.framework import marks

        return (self.call.source is not None and self.call.directory == str(directory)) or marks.recognises(directory)

    def is_news(self, text: str) -> bool:
        """Return whether this is the first call with this text."""
        news = text not in self._said
        self._said.add(text)
        return news


def _first_parameter(state: Any) -> tuple[str, Any]:
    """Return the parameter of a sharded state dict whose key comes first, and this key; None without one."""
    import torch

    from megatron_unickpt.held_state import sharded_tensors

    found = sharded_tensors.walk(state, later=False)
    leaves = (leaf for leaf in found if isinstance(getattr(leaf, "data", None), torch.nn.Parameter))
    first = min(leaves, key=lambda leaf: str(leaf.key), default=None)
    return ("", None) if first is None else (str(first.key), first.data)
