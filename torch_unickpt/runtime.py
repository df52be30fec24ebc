"""State of the adapter in one process. It is created once (``edge.RUNTIME``) and passed as an argument."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakMethod

if TYPE_CHECKING:
    from torch_unickpt.held_state.known_training import KnownTraining
    from unickpt.base.options.job import MemoryOptions
    from unickpt.checkpoint.coordination.owners import Owner, Owners
    from unickpt.checkpoint.format.witnessed import Passed
    from unickpt.checkpoint.memory.tier import MemoryTier
    from unickpt.checkpoint.save.requests import SaveOptions
    from unickpt.checkpoint.save.saver import Saver


class Runtime:
    """Savers and models of this process.

    Attributes:
        owners: models that were saved or loaded; None before the first one.
        said: lines that were logged once.
        saving: held by the thread that saves a state dict of DCP, which may be one of torch.
    """

    def __init__(self) -> None:
        self.owners: Owners | None = None
        self.said: set[str] = set()
        self.saving = threading.Lock()
        self._savers: dict[tuple[str, SaveOptions], Saver] = {}
        self._owner_of: WeakKeyDictionary[Any, Owner] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[Any, KnownTraining] = WeakKeyDictionary()
        self._passed: WeakKeyDictionary[Any, WeakMethod[Callable[[], Passed]]] = WeakKeyDictionary()
        self._faults: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()
        self._memory: MemoryTier | None = None

    def saver(self, options: SaveOptions, purpose: str = "training") -> Saver:
        """Return the saver of all saves of a purpose with these options. One thread at a time makes those of a purpose."""
        from unickpt.checkpoint.save.saver import Saver

        if (purpose, options) not in self._savers:
            self._savers[purpose, options] = Saver(options)
        return self._savers[purpose, options]

    def memory(self, options: MemoryOptions | None, save_options: SaveOptions) -> MemoryTier | None:
        """Return the memory tier of this job; None if its options do not ask for one. Other options make a new one."""
        from unickpt.checkpoint.memory.tier import MemoryTier
        from unickpt.diagnosis import session

        if options is None or not options.to_disk_every:
            return None
        if self._memory is None or self._memory.options != options:
            self._memory = MemoryTier(options, save_options, session.memory_status)
        return self._memory

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

    def watch(self, model: Any, passed: Callable[[], Passed] | None) -> None:
        """Note the method that tells what a model has passed; None: nobody watches it. The method's object is not kept."""
        if passed is None:
            self._passed.pop(model, None)
        else:
            self._passed[model] = WeakMethod(passed)

    def passed(self, model: Any, save_dir: str) -> Passed | None:
        """Return what a model has passed, for a checkpoint in a folder; None without a witness."""
        told = self._passed[model]() if model in self._passed else None
        return None if told is None else replace(told(), faults=self.faults_of(model, save_dir))

    def faults_of(self, model: Any, save_dir: str) -> int:
        """Return from how many faults of a folder the state of a model has gone back: those that it had at first."""
        from unickpt.base.errors import UnickptError
        from unickpt.base.logs import logger
        from unickpt.checkpoint.witness_faults import read_faults

        known = self._faults.setdefault(model, {})
        if save_dir not in known:
            known[save_dir] = 0
            try:
                known[save_dir] = len(read_faults(save_dir))
            except UnickptError as err:
                logger.warning(
                    "unickpt: witness: checkpoints of this run do not say that it has gone back from a fault: %s", err
                )
        return known[save_dir]

    def save_dirs(self, model: Any) -> list[str]:
        """Return the folders into which a watched model has been saved."""
        return list(self._faults.get(model, ()))

    def is_news(self, line: str) -> bool:
        """Return whether a line was not logged before, and note it."""
        if line in self.said:
            return False
        self.said.add(line)
        return True
