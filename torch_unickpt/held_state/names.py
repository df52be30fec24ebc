"""The names of a module's parameters and buffers, as the plain module has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from unickpt.api.dtensors import is_dtensor
from unickpt.base.errors import ConfigError, UnsupportedLayoutError
from unickpt.base.listing import some
from unickpt.checkpoint.save.kept import KeptFacts
from unickpt.checkpoint.save.module_tree import ModuleTree
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
        extra: modules with a ``get_extra_state`` of their own, by name.
    """

    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    aliases: dict[str, str]
    of: dict[int, str]
    extra: dict[str, torch.nn.Module] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes of parameters and buffers, under each of their names."""
        found = {name: tuple(tensor.shape) for name, tensor in {**self.parameters, **self.buffers}.items()}
        return found | {alias: found[name] for alias, name in self.aliases.items()}


def topology_of(names: Names, world: int) -> dict[str, Any]:
    """Return the layout of a job, for the manifest: its ranks, and the device mesh of its parameters."""
    parameters: list[Any] = list(names.parameters.values())
    divided = any(issubclass(kind, DTensor) for kind in set(map(type, parameters)))  # of thousands, most are of one type
    mesh = next((each.device_mesh for each in parameters if is_dtensor(each)), None) if divided else None
    topology: dict[str, Any] = {"world_size": world}
    if mesh is not None:
        dims = mesh.mesh_dim_names or tuple(f"dim{at}" for at in range(mesh.ndim))
        topology["mesh"] = dict(zip(dims, mesh.shape, strict=True))
    return topology


def without_ddp(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that DistributedDataParallel wraps, or the module itself."""
    while isinstance(module, DistributedDataParallel):
        module = module.module
    return module


def _reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Free whole parameters: after a forward alone, the root still holds them, and the optimizer does not know them."""
    for child in modules:
        if isinstance(child, FSDPModule):
            child.reshard()


def names_of(module: torch.nn.Module) -> Names:
    """Return the parameters and persistent buffers of a module.

    Raises:
        UnsupportedLayoutError: the module is wrapped by FSDP1, whose flat parameters hold parts of several parameters.
        ConfigError: parameters have no shape before the first call of the module.
    """
    module = without_ddp(module)
    if any(type(child).__name__ == "FullyShardedDataParallel" for child in module.modules()):
        raise UnsupportedLayoutError(
            "the module is wrapped by FullyShardedDataParallel (FSDP1), whose parameters are flat. Use fully_shard (FSDP2), or "
            "torch.distributed.checkpoint with get_state_dict, which unickpt writes as well"
        )
    _reshard(module.modules())
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
    lazy = [name for name, each in {**parameters, **buffers}.items() if is_lazy(each)]
    if lazy:
        raise ConfigError(f"{some(lazy)}: no shape yet (torch.nn.Lazy...). Call the model once before, as in training")
    extra = {plain(name): child for name, child in module.named_modules() if _has_extra_state(child)}
    return Names(parameters, buffers, aliases, of, extra)


def _has_extra_state(module: torch.nn.Module) -> bool:
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


class KnownNames:
    """The names of a module at an earlier save. They are read again where the module is another."""

    def __init__(self) -> None:
        self._facts: KeptFacts | None = None
        self._aliases: dict[str, str] = {}
        self._of: dict[int, str] = {}
        self._parameters: list[tuple[str, int]] = []  # name and position in the tree
        self._buffers: list[tuple[str, int]] = []
        self._extra: list[tuple[str, int]] = []

    def read(self, module: torch.nn.Module) -> Names:
        """As ``names_of``."""
        tree = ModuleTree.of(without_ddp(module))
        if self._facts is not None and any(issubclass(kind, FSDPModule) for kind in set(map(type, tree.modules))):
            _reshard(tree.modules)
            tree = ModuleTree.of(without_ddp(module))
        if self._facts is None or not self._facts.fit(tree.facts):
            found = names_of(module)
            tree = ModuleTree.of(without_ddp(module))  # resharding has put other parameters into the modules
            self._facts, self._aliases, self._of = KeptFacts(tree.facts), found.aliases, found.of
            self._parameters, self._buffers = _places(found.parameters, tree.parameters), _places(found.buffers, tree.buffers)
            self._extra = _places(found.extra, tree.modules)
            return found
        parameters: Any = {name: tree.parameters[at] for name, at in self._parameters}
        buffers: Any = {name: tree.buffers[at] for name, at in self._buffers}
        extra = {name: tree.modules[at] for name, at in self._extra}
        return Names(parameters, buffers, self._aliases, self._of, extra)


def _places(named: Mapping[str, Any], among: Sequence[Any]) -> list[tuple[str, int]]:
    places = {id(each): at for at, each in enumerate(among)}
    return [(name, places[id(each)]) for name, each in named.items()]


def facts_of(module: Any) -> Model:
    """Return what is known of a model, such as its family, without wrappers."""
    while isinstance(inner := getattr(module, "_orig_mod", getattr(module, "module", None)), torch.nn.Module):
        module = inner
    return Model.of_module(module)
