"""Sizes of the source and of the grown model, and the reasons against a growth. Pure functions of names and shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unickpt.base.errors import LanguageError
from unickpt.transform.dialects.dialect import Dialect
from unickpt.transform.dialects.growth import LAYER, STREAM, Flow, Growth
from unickpt.transform.dialects.model_facts import CONFIG_KEYS
from unickpt.transform.grow.origins import Heads
from unickpt.transform.grow.refusals import Refusal

HEADS, GROUPS, LAYERS = "heads", "groups", "layers"
_FACTS = (LAYERS, HEADS, GROUPS)
_RANKS = ("q_lora_rank", "kv_lora_rank")
_HEAD_SIZES = ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of the source with its growth rule.

    Attributes:
        name: name in the source.
        flow: rule.
        layer: number of its layer, or -1.
    """

    name: str
    flow: Flow
    layer: int


@dataclass(frozen=True)
class Sizes:
    """Sizes of both models.

    Attributes:
        old, new: sizes of axes, ``layers``, ``heads`` and ``groups``.
        place: number in the grown model of every layer of the source.
    """

    old: Mapping[str, int]
    new: Mapping[str, int]
    place: tuple[int, ...]

    @property
    def scale(self) -> float:
        """Factor of gains of norms over the stream. The epsilon has its square."""
        return math.sqrt(self.old[STREAM] / self.new[STREAM])

    @property
    def heads(self) -> Heads | None:
        """Attention heads in groups, or None without such an attention."""
        if "group" not in self.old:
            return None
        return Heads(self.old["group"], self.old.get("query", 1), self.new["group"], self.new.get("query", 1))

    def like(self, layer: int) -> int:
        """Return the layer of the source whose hyperparameters and statistics a layer of the grown model has."""
        return max((at for at, number in enumerate(self.place) if number <= layer), default=0)

    def is_new(self, layer: int) -> bool:
        return layer not in self.place


def flows_of(growth: Growth, names: Mapping[str, Sequence[str]]) -> tuple[dict[str, Placed], list[Refusal]]:
    """Return the rule of every tensor, and refusals of those without one.

    Args:
        growth: growth rules.
        names: all names of every stored name (tied tensors have several). A tensor that writes under one of its names and
            reads under another writes.
    """
    every = {each for some in names.values() for each in some}
    found, refused = {}, []
    for name, some in names.items():
        known = [(each, match) for each in some if (match := growth.flow_of(each, every)) is not None]
        if not known:
            refused.append(Refusal("no-rule", name))
            continue
        _, (flow, values) = next((each for each in known if each[1][0].role == "writes"), known[0])
        layer = values.get(LAYER, -1)
        found[name] = Placed(name, flow, layer if isinstance(layer, int) else -1)
    return found, refused


def sizes_of(
    dialect: Dialect, facts: Mapping[str, int], flows: Mapping[str, Placed], shapes: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """Return the sizes of all axes and facts of the source.

    Raises:
        LanguageError: shapes contradict each other or the facts, or a size is unknown.
    """
    known = {**dialect.sizes_of(facts), **{name: facts[name] for name in _FACTS if name in facts}}
    for _ in range(2):  # the second time, sizes of the first one determine those of products
        for name, each in flows.items():
            arrangement = each.flow.pattern.arrangement
            if arrangement is not None:
                try:
                    known |= arrangement.solve(shapes[name], known)
                except LanguageError as err:
                    raise LanguageError(f"{name}: {err}") from None
    for name, each in flows.items():
        unknown = sorted(each.flow.pattern.arrangement.axes() - known.keys()) if each.flow.pattern.arrangement else []
        if unknown:
            raise LanguageError(f"{name}: the size of {unknown[0]!r} is unknown; --config FOLDER gives the configuration")
    layers = {each.layer for each in flows.values() if each.layer >= 0}
    known.setdefault(LAYERS, max(layers, default=-1) + 1)
    if layers - set(range(known[LAYERS])):
        raise LanguageError(f"the model has {known[LAYERS]} layers, but tensors of layer {max(layers)}")
    return known


def planned(
    dialect: Dialect, facts: Mapping[str, int], old: Mapping[str, int], changes: Mapping[str, int], place: Sequence[int] | None
) -> tuple[Sizes | None, list[Refusal]]:
    """Return the sizes of the grown model, or refusals.

    Args:
        dialect: dialect with growth rules.
        facts: facts about the source.
        old: sizes of the source.
        changes: new values by keys of the configuration.
        place: number in the grown model of every layer of the source; None: at equal distances.
    """
    growth = dialect.growth or Growth()
    new_values, refused = _changed(growth, facts, old, changes)
    if HEADS in new_values and GROUPS not in new_values and old.get(GROUPS) == old.get(HEADS) and GROUPS in growth.settings:
        new_values[GROUPS] = new_values[HEADS]  # every head has a key and a value of its own
    for name, value in new_values.items():
        if value < old[name]:
            refused.append(Refusal("smaller", growth.settings[name][0], old[name], value))
    values = {**old, **new_values}
    refused += _heads(growth, facts, old, values)
    layers = values[LAYERS]
    if place is None:
        place = tuple(at * layers // old[LAYERS] for at in range(old[LAYERS]))
    if len(place) != old[LAYERS] or any(not a < b for a, b in zip((-1, *place), (*place, layers), strict=True)):
        refused.append(Refusal("place", old=old[LAYERS], new=layers, more=",".join(map(str, place))))
    if refused:
        return None, refused
    new_facts = {**facts, **{name: values[name] for name in _FACTS if name in values}}
    new = {**values, **{name: size for name, size in dialect.sizes_of(new_facts).items() if name in old}}
    return Sizes(old, new, tuple(place)), []


def _changed(
    growth: Growth, facts: Mapping[str, int], old: Mapping[str, int], changes: Mapping[str, int]
) -> tuple[dict[str, int], list[Refusal]]:
    """Return the changes by size, and refusals of settings that cannot change."""
    found: dict[str, int] = {}
    refused = []
    for key, value in changes.items():
        name = next((name for name, keys in growth.settings.items() if key in keys or key == name), "")
        fact = next((facts[each] for each, keys in CONFIG_KEYS.items() if key in keys and each in facts), 0)
        if name in old:
            found[name] = value
        elif fact == value:
            continue
        elif key in CONFIG_KEYS["experts"]:
            refused.append(Refusal("experts", key, fact, value))
        elif key in CONFIG_KEYS["vocab"]:
            refused.append(Refusal("vocabulary", key, fact, value))
        elif key in _RANKS:
            refused.append(Refusal("latent-rank", key, fact, value))
        elif key in _HEAD_SIZES:
            refused.append(Refusal("head-dim", key, fact, value))
        else:
            known = ", ".join(keys[0] for name, keys in growth.settings.items() if name in old)
            refused.append(Refusal("unknown-size", key, more=known))
    return found, refused


def _heads(growth: Growth, facts: Mapping[str, int], old: Mapping[str, int], new: Mapping[str, int]) -> list[Refusal]:
    """Return refusals of numbers of heads."""
    if growth.square_heads:
        size = facts.get("head_dim", 0)
        if new[STREAM] == new[HEADS] * size:
            return []
        more = f"width {new[HEADS] * size}" + ("" if new[STREAM] % size else f" or {new[STREAM] // size} heads")
        return [Refusal("square-heads", old=size, more=more)]
    if GROUPS not in growth.settings:
        return []
    if new[HEADS] % new[GROUPS]:
        return [Refusal("divide", old=new[HEADS], new=new[GROUPS])]
    queries = old[HEADS] // old[GROUPS]
    heads = Heads(old[GROUPS], queries, new[GROUPS], new[HEADS] // new[GROUPS])
    least = old[GROUPS] * heads.repeats
    return (
        [Refusal("kv-heads", old=old[GROUPS], new=new[GROUPS], least=least, more=str(queries))] if new[GROUPS] < least else []
    )
