"""Names of parameters, buffers and modules in a checkpoint.

A compiled module has the same names as the module that is not compiled. The names of a pipeline do not depend on the number of
stages: DeepSpeed counts the layers of the whole pipeline (``3.weight``) and names tied modules by their key
(``tied_modules.embed.weight``). Parameters of a tied module that DeepSpeed does not synchronize have their own values on each
stage with the module. They get the number of the stage's first layer that uses the module: ``tied_modules.embed@7.bias``.

Every expert-parallel rank counts its experts from 0. In a checkpoint an expert has its number among all experts of its layer:
``deepspeed_moe.experts.deepspeed_experts.5.weight``. AutoEP has all experts of a rank in one parameter, and so does the
checkpoint: ``mlp.experts.w1``.

A parameter to average (``universal_checkpoint_info``) has values of its own on each tensor-parallel rank. Those of the first
rank have its name, and those of the others end with the number of the rank: ``3.norm.weight@tp1``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ds_unickpt.framework import internals
from ds_unickpt.framework.fallbacks import UNKNOWN_BUFFERS
from ds_unickpt.framework.internals import ExpertLayer, Submodules, TiedCopy, plain
from ds_unickpt.placing.slices import RankValues, local_shape
from unickpt.checkpoint.save.kept import KeptFacts
from unickpt.checkpoint.save.module_tree import ModuleTree
from unickpt.checkpoint.state.own_entries import of_module

_TIED = "tied_modules"
_OF_TIED = re.compile(rf"{_TIED}\.([^.@]+)(?:@(\d+))?(\..+)")
_OF_A_RANK = re.compile(r"(.+)@tp([1-9]\d*)")
Naming = Callable[[torch.nn.Parameter], str]  # the name of a parameter


def spelled_plainly(names: Iterable[str]) -> dict[str, str]:
    """Return the plain form of each name. A name keeps its own form if another tensor has the plain one."""
    names = list(names)
    taken = {name for name in names if plain(name) == name}
    spelled = {}
    for name in names:
        spelled[name] = plain(name) if name == plain(name) or plain(name) not in taken else name
        taken.add(spelled[name])
    return spelled


def stored_name(name: str, copies: Sequence[TiedCopy]) -> str:
    """Return the stored name of a parameter, buffer or module. It differs from ``name`` in copies of tied modules."""
    for copy in copies:
        module = f"{_TIED}.{copy.key}"
        if name == module or (name.startswith(f"{module}.") and name[len(module) + 1 :] not in copy.shared):
            return f"{module}@{copy.layer}{name[len(module) :]}"
    return name


def expert_name(name: str, layers: Mapping[str, ExpertLayer]) -> str:
    """Return a name with the global number of an expert in place of the number on this rank. ``layers``: by name."""
    found = internals.OF_EXPERT.fullmatch(name)
    layer = None if found is None else layers.get(found[1])
    return name if found is None or layer is None else f"{found[1]}.{layer.first + int(found[2])}{found[3] or ''}"


def holders(name: str, layers: Mapping[str, ExpertLayer]) -> tuple[int, ...] | None:
    """Return the global ranks that have an expert, by the stored name of something in it; None outside of experts.

    A parameter with the experts of several ranks (AutoEP) belongs to the ranks with the same experts as this one.
    """
    layer = internals.layer_of(name, layers)
    return None if layer is None else layer.ranks


@dataclass(frozen=True, slots=True)
class _Spelling:
    """Stored names of a module's parameters, buffers and submodules."""

    copies: tuple[TiedCopy, ...]
    experts: dict[str, ExpertLayer]

    @classmethod
    def of(cls, module: torch.nn.Module, children: Submodules) -> _Spelling:
        return cls(internals.tied_copies(module), {plain(layer.name): layer for layer in internals.expert_layers(children)})

    def stored(self, name: str) -> str:
        if not self.experts and not self.copies:
            return name
        return stored_name(expert_name(name, self.experts), self.copies)


def copied_from(name: str, known: Iterable[str]) -> str:
    """Return the stored parameter that a pipeline with other stages used in place of a parameter of a tied module; '' if none.

    A stage is a range of layers. So layer 7 (``tied_modules.embed@7.bias``) used the copy with the largest number up to 7, and
    without one the original. ``known``: names in the checkpoint.
    """
    own = _OF_TIED.fullmatch(name)
    if own is None:
        return ""
    layer = int(own[2] or 0)
    others = (other for other in map(_OF_TIED.fullmatch, known) if other and (other[1], other[3]) == (own[1], own[3]))
    found = {int(other[2] or 0): other[0] for other in others}
    return next((found[at] for at in sorted(found, reverse=True) if at <= layer), "")


def without_rank(name: str) -> str:
    """Return the stored name of the first tensor-parallel rank's values, of the name of any rank's values."""
    found = _OF_A_RANK.fullmatch(name)
    return name if found is None else found[1]


def of_all_ranks(name: str, known: Container[str]) -> tuple[str, ...]:
    """Return the names of a parameter's values by tensor-parallel rank. More than one only for a parameter to average.

    ``name`` is that of the first rank's values, ``known`` are the names in the checkpoint.
    """
    others = itertools.takewhile(known.__contains__, (f"{name}@tp{rank}" for rank in itertools.count(1)))
    return (name, *others)


def original_of(name: str) -> str:
    """Return the name on the first stage for a parameter of a copy of a tied module; '' for any other name."""
    found = _OF_TIED.fullmatch(name)
    return f"{_TIED}.{found[1]}{found[3]}" if found is not None and found[2] else ""


def _layer_prefixes(module: torch.nn.Module, children: Submodules) -> Iterator[tuple[str, str]]:
    """Yield ``(name of a submodule, its name in a pipeline)`` for a module with a method ``unickpt_pipeline_layers``.

    The method returns the layers of the pipeline in order: a submodule, a pair ``(key, submodule)`` for a tied layer, or
    anything else for a layer without parameters.
    """
    layers = getattr(module, "unickpt_pipeline_layers", None)
    names: dict[int, str] = {}
    for name, child in children if callable(layers) else ():
        names.setdefault(id(child), plain(name))
    for number, layer in enumerate(layers() if callable(layers) else ()):
        key, child = (f"{_TIED}.{layer[0]}", layer[1]) if isinstance(layer, tuple) else (str(number), layer)
        if names.get(id(child)):
            yield names[id(child)], key


class OwnBuffer(NamedTuple):
    """A distinct buffer of a module by its stored name."""

    name: str
    tensor: torch.Tensor
    persistent: bool


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The parameters, buffers and submodules of a module by name. It is read once per save or load.

    Attributes:
        of: id(parameter) -> stored name, the first of its names.
        parameters: stored name -> parameter, in module order.
        aliases: further names of tied parameters, and names of a plain module's parameters in a pipeline -> stored name.
        own: stored name or alias -> name in the module.
        elsewhere: stored names of tied parameters that an earlier pipeline stage also has, and stores.
        experts: expert layers by name.
        averaged: the parameters to average.
        buffers: the buffers, in module order.
        volatile: stored names of the buffers that are registered with ``persistent=False``.
        modules: the module and its distinct submodules by stored name, and again under their names in a pipeline, if any.
    """

    of: dict[int, str]
    parameters: dict[str, torch.nn.Parameter]
    aliases: dict[str, str]
    own: dict[str, str]
    elsewhere: frozenset[str]
    experts: dict[str, ExpertLayer]
    averaged: RankValues
    buffers: tuple[OwnBuffer, ...]
    volatile: frozenset[str]
    modules: tuple[tuple[str, torch.nn.Module], ...]

    @classmethod
    def read(cls, module: torch.nn.Module, averaged: RankValues | None = None) -> ModuleNames:
        """Return the names of a module's parameters. Without ``averaged`` they are those of the first tensor-parallel rank."""
        averaged = averaged or RankValues()
        children = internals.submodules(module)
        found = internals.parameters_of(children)
        spelling = _Spelling.of(module, children)
        spelled = {own: averaged.stored(spelling.stored(name), found[own]) for own, name in spelled_plainly(found).items()}
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
        volatile = internals.non_persistent_names(children)
        held = internals.buffers_of(children)
        spelled_held = spelled_plainly(held)
        buffers = tuple(OwnBuffer(spelling.stored(spelled_held[own]), held[own], own not in volatile) for own in held)
        stored = {**{name: name for name in parameters}, **aliases, **{b.name: b.name for b in buffers if b.persistent}}
        prefixes = list(_layer_prefixes(module, children))
        for prefix, layer in prefixes:
            under = {f"{layer}{name[len(prefix) :]}": to for name, to in stored.items() if name.startswith(f"{prefix}.")}
            aliases |= {alias: to for alias, to in under.items() if alias not in stored}
        shared = frozenset(f"{_TIED}.{copy.key}.{name}" for copy in spelling.copies for name in copy.shared)
        elsewhere = frozenset(name for name in spelled.values() if without_rank(name) in shared)
        return cls(
            of, parameters, aliases, {name: own for own, name in spelled.items()}, elsewhere, spelling.experts, averaged,
            buffers, frozenset(spelling.stored(plain(name)) for name in volatile),
            tuple(_modules(children, spelling, prefixes)),
        )  # fmt: skip

    def name(self, parameter: torch.nn.Parameter) -> str:
        """Return the stored name of a parameter. Raises UnsupportedLayoutError if the module does not have the parameter."""
        try:
            return self.of[id(parameter)]
        except KeyError:
            shape = local_shape(parameter)
            raise UNKNOWN_BUFFERS.error(f"the optimizer holds a parameter of shape {shape} that the module lacks") from None

    @property
    def uniform(self) -> bool:
        """Whether all ranks of the stage have the same elements of every tensor, apart from ZeRO's partitions."""
        return not self.experts and not self.averaged.rank

    def having(self, name: str) -> tuple[int, ...] | None:
        """Return the global ranks that have a part of a tensor, by its stored name; None if all ranks of the stage have.

        Of those with other slices of an expert, the ones of ``ExpertLayer.having``.
        """
        if self.uniform:
            return None
        layer = internals.layer_of(name, self.experts)
        return self.holders(name) if layer is None else layer.having

    def holders(self, name: str) -> tuple[int, ...] | None:
        """Return the global ranks that have the same elements of a tensor, by its stored name; None as for ``having``."""
        if self.uniform:
            return None
        own = self.averaged.rank and name in self.parameters and id(self.parameters[name]) in self.averaged.parameters
        return self.averaged.holders if own else holders(name, self.experts)


def _modules(
    children: Submodules, spelling: _Spelling, prefixes: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, torch.nn.Module]]:
    known: set[int] = set()
    for own, child in children:
        if id(child) in known:
            continue
        known.add(id(child))
        name = plain(own)
        yield spelling.stored(name), child
        for prefix, layer in prefixes:
            if name == prefix or name.startswith(f"{prefix}."):
                yield f"{layer}{name[len(prefix) :]}", child


def own_entries(module: torch.nn.Module) -> list[str]:
    """Return the entries of the module's state dict that neither parameters nor buffers nor extra states have, by name.

    Frozen modules do not count: a job makes those of a quantized base model again. Their parameters cannot change.
    """
    children = internals.submodules(module)
    volatile = internals.non_persistent_names(children)
    found = {
        **internals.parameters_of(children),
        **{k: v for k, v in internals.buffers_of(children).items() if k not in volatile},
    }
    with_extra = {id(child) for _, child in children if type(child).get_extra_state is not torch.nn.Module.get_extra_state}
    return of_module(module, {plain(name): each for name, each in found.items()}, with_extra, plain, _is_frozen)


def _is_frozen(module: torch.nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(each.requires_grad for each in parameters)


class KnownNames:
    """The names of a module at an earlier save. They are read again where the module is another."""

    def __init__(self) -> None:
        self._facts: KeptFacts | None = None
        self._names: ModuleNames | None = None  # without modules, parameters and buffers
        self._places: tuple[list[int], list[int], list[int]] = ([], [], [])  # of these in the tree
        self._listed: tuple[list[str], list[tuple[str, bool]], list[str]] = ([], [], [])
        self.reads = 0  # how often the names were read

    def read(self, module: torch.nn.Module, averaged: RankValues) -> ModuleNames:
        """As ``ModuleNames.read``."""
        if averaged.parameters or internals.tied_copies(module) or callable(getattr(module, "unickpt_pipeline_layers", None)):
            self._facts = None
            return self._anew(module, averaged)
        tree = ModuleTree.of(module)
        if self._facts is None or self._names is None or not self._facts.fit(tree.facts):
            found = self._anew(module, averaged)
            self._facts = None if found.experts else self._kept(found, tree)
            return found
        parameters, buffers, modules = self._places
        names, held, children = self._listed
        return replace(
            self._names,
            parameters=dict(zip(names, map(tree.parameters.__getitem__, parameters), strict=True)),  # type: ignore[arg-type]
            buffers=tuple(OwnBuffer(name, tree.buffers[at], kept) for at, (name, kept) in zip(buffers, held, strict=True)),  # type: ignore[arg-type]
            modules=tuple(zip(children, map(tree.modules.__getitem__, modules), strict=True)),
        )

    def _anew(self, module: torch.nn.Module, averaged: RankValues) -> ModuleNames:
        self.reads += 1
        return ModuleNames.read(module, averaged)

    def _kept(self, found: ModuleNames, tree: ModuleTree) -> KeptFacts:
        self._places = (
            _positions(found.parameters.values(), tree.parameters),
            _positions((each.tensor for each in found.buffers), tree.buffers),
            _positions((child for _, child in found.modules), tree.modules),
        )
        held = [(each.name, each.persistent) for each in found.buffers]
        self._listed = (list(found.parameters), held, [name for name, _ in found.modules])
        self._names = replace(found, parameters={}, buffers=(), modules=())
        return KeptFacts(tree.facts)


def _positions(wanted: Iterable[Any], among: Sequence[Any]) -> list[int]:
    places = {id(each): at for at, each in enumerate(among)}
    return [places[id(each)] for each in wanted]
