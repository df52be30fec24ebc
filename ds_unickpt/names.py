"""Names of parameters and buffers. A compiled module has the same names as the module that is not compiled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ds_unickpt import internals
from unickpt.errors import UnsupportedLayoutError

_COMPILED = "_orig_mod"


def plain(name: str) -> str:
    """Return a name without the parts that ``torch.compile`` adds to the names of a module or submodule."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def spelled_plainly(names: Iterable[str]) -> dict[str, str]:
    """Return the plain form of each name. A name keeps its own form if another tensor has the plain one."""
    names = list(names)
    taken = {name for name in names if plain(name) == name}
    spelled = {}
    for name in names:
        spelled[name] = plain(name) if name == plain(name) or plain(name) not in taken else name
        taken.add(spelled[name])
    return spelled


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The parameters of a module by name.

    Attributes:
        of: id(parameter) -> stored name, the first of its names.
        parameters: stored name -> parameter, in module order.
        aliases: further names of tied parameters -> stored name.
        own: stored name or alias -> name in the module.
    """

    of: dict[int, str]
    parameters: dict[str, torch.nn.Parameter]
    aliases: dict[str, str]
    own: dict[str, str]

    @classmethod
    def read(cls, module: torch.nn.Module) -> ModuleNames:
        found = dict(module.named_parameters(remove_duplicate=False))
        spelled = spelled_plainly(found)
        of: dict[int, str] = {}
        parameters: dict[str, torch.nn.Parameter] = {}
        aliases: dict[str, str] = {}
        for own, parameter in found.items():
            name = spelled[own]
            if id(parameter) in of:
                aliases[name] = of[id(parameter)]
            else:
                of[id(parameter)] = name
                parameters[name] = parameter
        return cls(of, parameters, aliases, {name: own for own, name in spelled.items()})

    def name(self, parameter: torch.nn.Parameter) -> str:
        """Return the stored name of a parameter. Raises UnsupportedLayoutError if the module does not have the parameter."""
        try:
            return self.of[id(parameter)]
        except KeyError:
            shape = internals.shape_of(parameter)
            raise UnsupportedLayoutError(f"the optimizer holds a parameter of shape {shape} that the module lacks") from None


def buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield ``(name, buffer, persistent)`` for every distinct buffer."""
    volatile = internals.non_persistent_names(module)
    found = dict(module.named_buffers())
    spelled = spelled_plainly(found)
    for name, buffer in found.items():
        yield spelled[name], buffer, name not in volatile
