"""The tree of a module, read in the time that a comparison with an earlier read may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from unickpt.checkpoint.save.kept import Facts

_tables = attrgetter("_modules", "_parameters", "_buffers")
_not_persistent = attrgetter("_non_persistent_buffers_set")


@dataclass(frozen=True, slots=True)
class ModuleTree:
    """The modules of a module, level by level, under each of their names, with what they hold.

    Attributes:
        modules: the module itself first.
        parameters, buffers: of the modules in this order; None where one is registered as None.
        names: names of modules, parameters and buffers in each module, and of the buffers that are not persistent.
    """

    modules: Sequence[torch.nn.Module]
    parameters: Sequence[torch.nn.Parameter | None]
    buffers: Sequence[torch.Tensor | None]
    names: tuple[object, ...]

    @classmethod
    def of(cls, module: torch.nn.Module) -> ModuleTree:
        modules = [module]
        for each in modules:  # it grows
            modules += [child for child in each._modules.values() if child is not None]
        tables = list(map(_tables, modules))
        parameters = [parameter for _, held, _ in tables for parameter in held.values()]
        buffers = [buffer for _, _, held in tables for buffer in held.values()]
        sets = enumerate(map(_not_persistent, modules))
        absent = [(at, set(found)) for at, found in sets if found]
        names = ([(*map(tuple, table),) for table in tables], absent, list(map(type, modules)))
        return cls(modules, parameters, buffers, names)

    @property
    def facts(self) -> Facts:
        """The tree alone, without the memory of its tensors."""
        return Facts(objects=[*self.modules, *self.parameters, *self.buffers], values=self.names)
