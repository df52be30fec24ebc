"""Growth rules in dialect files: which tensors write to the residual stream, and which read from it.

    [growth]
    norm = "rms"                                     # norm of the stream: rms or layer
    include = ["huggingface.llama.toml"]             # files whose tensors follow the own ones

    [growth.set]                                     # sizes that can grow, with their keys in the configuration
    hidden = ["hidden_size"]

    [[growth.tensors]]
    tensor = "model.layers.{layer}.self_attn.o_proj.weight [hidden (group query head)]"
    role = "writes"

The axis ``hidden`` is the residual stream, and the hole ``layer`` is the number of a layer. A tensor uses the first entry that
matches its name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from unickpt.base.errors import LanguageError
from unickpt.transform.dialects.name_templates import Template
from unickpt.transform.dialects.rules import TensorPattern

STREAM, LAYER = "hidden", "layer"
Role = Literal["reads", "writes", "gain", "bias", "inner"]
Norm = Literal["rms", "layer"]
_KEYS = {"norm", "include", "set", "tensors", "refuse", "square_heads", "upcycle"}
_UPCYCLE_KEYS = {"dense": list, "family": str, "architecture": str, "experts": str, "ffn": str, "config": dict}
_TENSOR_KEYS = {"tensor", "role", "epsilon", "when"}


@dataclass(frozen=True, slots=True)
class Flow:
    """How a tensor is connected to the residual stream.

    Attributes:
        pattern: name and arrangement.
        role: ``reads``: new elements are free. ``writes``: new elements are zero, so that new heads, neurons and layers add
            nothing. ``gain``: gain of a norm over the stream. ``bias``: new elements are zero.
            ``inner``: gain of a norm inside a layer, which does not grow.
        epsilon: whether a norm with the epsilon of the stream's norm follows. The tensor is scaled as the epsilon's root.
        when: the entry applies only if this tensor exists; None: always.
    """

    pattern: TensorPattern
    role: Role
    epsilon: bool = False
    when: Template | None = None

    def match(self, name: str, names: Collection[str]) -> dict[str, int | str] | None:
        """Return the values of the holes in a name, or None. ``names`` are all names of the checkpoint."""
        found = self.pattern.name.match(name)
        return None if found is None or (self.when is not None and self.when.fill(found) not in names) else found


@dataclass(frozen=True)
class Upcycling:
    """A family with experts that dense models become.

    Attributes:
        dense: dense families. Their other tensors have the same names and meaning.
        family, architecture: ``model_type`` and class of the model with experts.
        experts, ffn: keys in its configuration of the number of experts and of their size.
        config: further entries of its configuration. With them, the router takes the softmax over the chosen experts alone.
    """

    dense: tuple[str, ...]
    family: str
    architecture: str
    experts: str
    ffn: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Growth:
    """Growth rules of some families.

    Attributes:
        norm: norm of the residual stream.
        settings: keys in the configuration by size. Each size is an axis or a fact. The first key is always written, the
            others where they exist.
        flows: tensors, in order.
        include: names of files whose flows follow.
        refuse: reason why these families cannot grow, or ''.
        square_heads: whether the elements of a head are the width divided by the heads, and cannot be configured.
        upcycling: dense families that become one of these families, or None.
    """

    norm: Norm = "rms"
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    flows: tuple[Flow, ...] = ()
    include: tuple[str, ...] = ()
    refuse: str = ""
    square_heads: bool = False
    upcycling: Upcycling | None = None

    def flow_of(self, name: str, names: Collection[str]) -> tuple[Flow, dict[str, int | str]] | None:
        """Return the entry of a tensor and the values of its holes."""
        for flow in self.flows:
            found = flow.match(name, names)
            if found is not None:
                return flow, found
        return None


def parse_growth(table: Mapping[str, Any], where: str) -> Growth:
    """Return the growth rules in the section of a dialect file. Raises LanguageError."""
    where = f"{where}: [growth]"
    _known(table, _KEYS, where)
    norm, refuse = table.get("norm", "rms"), table.get("refuse", "")
    square, include = table.get("square_heads", False), table.get("include", [])
    if norm not in get_args(Norm) or not isinstance(refuse, str) or not isinstance(square, bool) or not _is_texts(include):
        raise LanguageError(f"{where}: norm is rms or layer, refuse is a text, square_heads is a boolean, include is a list")
    settings = table.get("set", {})
    if not isinstance(settings, dict) or not all(_is_texts(keys) and keys for keys in settings.values()):
        raise LanguageError(f"{where}: set has a list of keys for each size")
    entries = table.get("tensors", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise LanguageError(f"{where}: tensors is a list of tables")
    flows = tuple(_flow(entry, f"{where}: tensor {at}") for at, entry in enumerate(entries, start=1))
    sizes = {size: tuple(keys) for size, keys in settings.items()}
    return Growth(norm, sizes, flows, tuple(include), refuse, square, _upcycling(table.get("upcycle"), f"{where}: upcycle"))


def _upcycling(table: Any, where: str) -> Upcycling | None:
    if table is None:
        return None
    if not isinstance(table, dict) or table.keys() != _UPCYCLE_KEYS.keys():
        raise LanguageError(f"{where}: expected a table with {', '.join(_UPCYCLE_KEYS)}")
    wrong = [key for key, kind in _UPCYCLE_KEYS.items() if not isinstance(table[key], kind)]
    if wrong or not _is_texts(table["dense"]):
        raise LanguageError(f"{where}: {wrong[0] if wrong else 'dense'} has a wrong type")
    return Upcycling(**{**table, "dense": tuple(table["dense"])})


def _flow(entry: Mapping[str, Any], where: str) -> Flow:
    _known(entry, _TENSOR_KEYS, where)
    role, epsilon, text, when = (entry.get(key) for key in ("role", "epsilon", "tensor", "when"))
    if role not in get_args(Role) or not isinstance(text, str) or epsilon not in (None, True, False):
        raise LanguageError(f"{where}: needs 'tensor', and a 'role' of {', '.join(get_args(Role))}; 'epsilon' is a boolean")
    if not isinstance(when, str | None):
        raise LanguageError(f"{where}: 'when' is {when!r}, expected a name")
    pattern = TensorPattern.parse(text)
    if pattern.arrangement is None:
        raise LanguageError(f"{where}: {text!r} needs an arrangement")
    return Flow(pattern, cast("Role", role), bool(epsilon), None if when is None else Template.parse(when))


def _known(table: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(table.keys() - known)
    if unknown:
        raise LanguageError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
