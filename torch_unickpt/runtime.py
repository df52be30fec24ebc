"""State of the adapter in one process. It is created once (``edge.RUNTIME``) and passed as an argument."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

if TYPE_CHECKING:
    from torch_unickpt.held_state.known_training import KnownTraining
    from unickpt.api.acting import Recorded
    from unickpt.base.options.job import MemoryOptions
    from unickpt.checkpoint.coordination.owners import Owner, Owners
    from unickpt.checkpoint.format.witnessed import Passed
    from unickpt.checkpoint.memory.tier import MemoryTier
    from unickpt.checkpoint.memory.tiers import MemoryTiers
    from unickpt.checkpoint.save.requests import SaveOptions
    from unickpt.checkpoint.save.saver import Saver
    from unickpt.checkpoint.witness_faults import FaultFolders
    from unickpt.training.witness.replay.recorder import Recorder


class Runtime:
    """Savers and models of this process.

    Attributes:
        owners: models that were saved or loaded; None before the first one.
        said: lines that were logged once.
        replay: what ``unickpt replay-step`` has asked this process to record; None otherwise.
        saving: held by the thread that saves a state dict of DCP, which may be one of torch.
    """

    def __init__(self) -> None:
        self.owners: Owners | None = None
        self.said: set[str] = set()
        self.replay: Recorder | None = None
        self.saving = threading.Lock()
        self._savers: dict[tuple[str, SaveOptions], Saver] = {}
        self._owner_of: WeakKeyDictionary[Any, Owner] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[Any, KnownTraining] = WeakKeyDictionary()
        self._recorded: WeakKeyDictionary[Any, ref[Recorded]] = WeakKeyDictionary()
        self._folders: WeakKeyDictionary[Any, FaultFolders] = WeakKeyDictionary()
        self._memory: MemoryTiers | None = None

    def saver(self, options: SaveOptions, purpose: str = "training") -> Saver:
        """Return the saver of all saves of a purpose with these options. One thread at a time makes those of a purpose."""
        from unickpt.checkpoint.save.saver import Saver

        if (purpose, options) not in self._savers:
            self._savers[purpose, options] = Saver(options)
        return self._savers[purpose, options]

    def memory(self, options: MemoryOptions | None, save_options: SaveOptions, save_dir: str) -> MemoryTier | None:
        """Return the memory tier of a save directory; None if the options do not ask for one."""
        from unickpt.checkpoint.memory.tiers import MemoryTiers
        from unickpt.diagnosis import session

        if options is None or not options.to_disk_every:
            return None
        self._memory = self._memory or MemoryTiers(session.memory_status)
        return self._memory.of(options, save_options, save_dir)

    def saved_to_disk(self, folder: str, seconds: float) -> None:
        """Note that a checkpoint is on disk, and how long ago its save began."""
        if self._memory is not None:
            self._memory.saved_to_disk(folder, seconds)

    def owner(self, model: Any) -> Owner:
        """Return the owner of a model's checkpoints."""
        from unickpt.checkpoint.coordination.owners import Owners

        self.owners = self.owners or Owners()
        if model not in self._owner_of:
            self._owner_of[model] = self.owners.add(type(model).__name__)
        return self._owner_of[model]

    def known(self, model: Any) -> KnownTraining:
        """Return what the saves of a model keep for each other."""
        from torch_unickpt.held_state.known_training import KnownTraining

        if model not in self._known:
            self._known[model] = KnownTraining()
        return self._known[model]

    def watch(self, model: Any, recorded: Recorded | None) -> None:
        """Note what checkpoints say of the witness of a model; None: nobody watches it. The object is not kept."""
        if recorded is None:
            self._recorded.pop(model, None)
        else:
            self._recorded[model] = ref(recorded)

    def passed(self, model: Any, save_dir: str) -> Passed | None:
        """Return what a model has passed, for a checkpoint in a folder; None without a witness."""
        recorded = self._recorded[model]() if model in self._recorded else None
        return None if recorded is None else recorded.passed(save_dir)

    def folders(self, model: Any) -> FaultFolders:
        """Return the folders into which a model is saved."""
        from unickpt.checkpoint.witness_faults import FaultFolders

        if model not in self._folders:
            self._folders[model] = FaultFolders()
        return self._folders[model]

    def is_news(self, line: str) -> bool:
        """Return whether a line was not logged before, and note it."""
        if line in self.said:
            return False
        self.said.add(line)
        return True
