"""The names of a module's parameters and buffers, as the plain module has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from unickpt.base.errors import UnsupportedLayoutError
from unickpt.transform.dialects.model_facts import Model

# torch.compile; torch.utils.checkpoint wrappers; FSDP1 (with ``fully_shard`` modules keep their names)
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def plain(name: str) -> str:
    """Return a name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True, slots=True)
class Names:
    """Parameters and persistent buffers of a module.

    Attributes:
        parameters: by the first of their names.
        buffers: persistent buffers, by name.
        aliases: further names of tied parameters and shared buffers, to the first one.
        of: name of a parameter by its ``id``.
    """

    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    aliases: dict[str, str]
    of: dict[int, str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes of parameters and buffers, under each of their names."""
        found = {name: tuple(tensor.shape) for name, tensor in {**self.parameters, **self.buffers}.items()}
        return found | {alias: found[name] for alias, name in self.aliases.items()}


def names_of(module: torch.nn.Module) -> Names:
    """Return the parameters and persistent buffers of a module.

    Raises:
        UnsupportedLayoutError: the module is wrapped by FSDP1, whose flat parameters hold parts of several parameters.
    """
    while isinstance(module, DistributedDataParallel):
        module = module.module
    if any(type(child).__name__ == "FullyShardedDataParallel" for child in module.modules()):
        raise UnsupportedLayoutError(
            "the module is wrapped by FullyShardedDataParallel (FSDP1), whose parameters are flat. Use fully_shard (FSDP2), or "
            "torch.distributed.checkpoint with get_state_dict, which unickpt writes as well"
        )
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()  # after a forward alone, the root still holds whole parameters, which the optimizer does not know
    parameters: dict[str, torch.nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    of: dict[int, str] = {}
    volatile = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules(remove_duplicate=False)
        for name in child._non_persistent_buffers_set
    }
    for own, parameter in module.named_parameters(remove_duplicate=False):
        name = plain(own)
        if id(parameter) in of:
            aliases[name] = of[id(parameter)]
        else:
            of[id(parameter)] = name
            parameters[name] = parameter
    first: dict[int, str] = {}
    for own, buffer in module.named_buffers(remove_duplicate=False):
        if own in volatile:
            continue
        name = plain(own)
        if id(buffer) in first:
            aliases[name] = first[id(buffer)]
        else:
            first[id(buffer)] = name
            buffers[name] = buffer
    return Names(parameters, buffers, aliases, of)


def facts_of(module: Any) -> Model:
    """Return what is known of a model, such as its family, without wrappers."""
    while isinstance(inner := getattr(module, "_orig_mod", getattr(module, "module", None)), torch.nn.Module):
        module = inner
    return Model.of_module(module)
