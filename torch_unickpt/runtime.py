"""State of the adapter in one process. It is created once (``edge.RUNTIME``) and passed as an argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from unickpt.checkpoint.coordination.owners import Owner, Owners
    from unickpt.checkpoint.save.requests import SaveOptions
    from unickpt.checkpoint.save.saver import Saver


class Runtime:
    """Savers and models of this process.

    Attributes:
        owners: models that were saved or loaded; None before the first one.
        said: lines that were logged once.
    """

    def __init__(self) -> None:
        self.owners: Owners | None = None
        self.said: set[str] = set()
        self._savers: dict[SaveOptions, Saver] = {}
        self._owner_of: WeakKeyDictionary[Any, Owner] = WeakKeyDictionary()

    def saver(self, options: SaveOptions) -> Saver:
        """Return the saver of all saves with these options."""
        from unickpt.checkpoint.save.saver import Saver

        if options not in self._savers:
            self._savers[options] = Saver(options)
        return self._savers[options]

    def owner(self, model: Any) -> Owner:
        """Return the owner of a model's checkpoints."""
        from unickpt.checkpoint.coordination.owners import Owners

        self.owners = self.owners or Owners()
        if model not in self._owner_of:
            self._owner_of[model] = self.owners.add(type(model).__name__)
        return self._owner_of[model]

    def is_news(self, line: str) -> bool:
        """Return whether a line was not logged before, and note it."""
        if line in self.said:
            return False
        self.said.add(line)
        return True
