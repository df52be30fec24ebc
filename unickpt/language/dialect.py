"""Dialects: how one framework arranges the parameters of some model families, said by how another one does. A TOML file.

    [dialect]
    name = "megatron-core"
    other = "huggingface"
    families = ["llama", "mistral"]
    stack = ["layer", "expert"]     # holes that may be leading axes instead, in names on this side

    [sizes]
    group = "groups"
    query = "heads / groups"

    [[rules]]
    here = "decoder.layers.{layer}.self_attention.linear_proj.weight [out in]"
    there = "model.layers.{layer}.self_attn.o_proj.weight [out in]"

Formulas of sizes are of the facts that are known of a model (``facts.py``). The file holds data alone; nothing of it is run.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.errors import LanguageError
from unickpt.language.arrangement import Arrangement
from unickpt.language.facts import FACTS
from unickpt.language.names import Hole, Template
from unickpt.language.rules import Item, Rule
from unickpt.language.sizes import evaluate, names_in

MAX_BYTES, _MOST_STACKED = 1 << 20, 3
_RULE_KEYS = {"here": (str,), "there": (str, list), "repeat": (dict,)}
_DIALECT_KEYS = {"name": (str,), "other": (str,), "families": (list,), "stack": (list,)}


@dataclass(frozen=True)
class Dialect:
    """How ``name`` arranges what ``other`` arranges in its way.

    Attributes:
        name, other: of the dialects: *here* and *there* of the rules.
        families: kinds of models that it holds for.
        sizes: of axes, formulas of facts.
        rules: the first one that knows a tensor, and whose other side is there, counts.
        where: it was read from, for messages.
    """

    name: str
    other: str
    families: tuple[str, ...]
    sizes: Mapping[str, str | int]
    rules: tuple[Rule, ...]
    where: str = "dialect"

    def of_model(self, facts: Mapping[str, int]) -> Dialect:
        """The same with the numbers in names that facts of a model tell (``{= layers + 2}``).

        Raises:
            LanguageError: one of them is not known; names the rule.
        """
        try:
            return dataclasses.replace(self, rules=tuple(rule.with_facts(facts) for rule in self.rules))
        except LanguageError as err:
            raise LanguageError(f"{self.where}: {err}") from None

    def sizes_of(self, facts: Mapping[str, int]) -> dict[str, int]:
        """Sizes of axes for a model; those whose facts are not known are left out, and asked of shapes.

        Args:
            facts: numbers that are known of the model.

        Raises:
            LanguageError: a size would be no whole number; names the formula.
        """
        found = {}
        for name, formula in self.sizes.items():
            if names_in(formula) <= facts.keys():
                try:
                    found[name] = evaluate(formula, facts)
                except LanguageError as err:
                    raise LanguageError(f"{self.where}: size of {name!r}: {err}") from None
        return found


def parse(text: str, *, where: str = "dialect") -> Dialect:
    """Read a dialect from the text of its file.

    Args:
        text: TOML.
        where: it is from, for messages.

    Raises:
        LanguageError: it is not TOML, has a key that is not known or of the wrong type, or a rule that is none.
    """
    if len(text) > MAX_BYTES:
        raise LanguageError(f"{where}: {len(text):,} characters are too many for a dialect")
    try:
        found = _toml(text)
    except ValueError as err:
        raise LanguageError(f"{where}: not TOML: {err}") from None
    except RecursionError:
        raise LanguageError(f"{where}: not TOML: nested too deeply") from None
    _only(found, {"dialect": (dict,), "sizes": (dict,), "rules": (list,)}, where)
    head = found.get("dialect", {})
    _only(head, _DIALECT_KEYS, f"{where}: [dialect]")
    families, stack = (_texts(head.get(key, []), f"{where}: [dialect] {key}") for key in ("families", "stack"))
    for key in ("name", "other"):
        if key not in head:
            raise LanguageError(f"{where}: [dialect] has no {key!r}")
    sizes = found.get("sizes", {})
    for name, formula in sizes.items():
        if not isinstance(formula, (str, int)) or isinstance(formula, bool):
            raise LanguageError(f"{where}: size of {name!r} is {formula!r}, not a formula or a number")
        try:
            unknown = names_in(formula) - FACTS.keys()
            if unknown or not name.isidentifier() or (isinstance(formula, int) and not 0 < formula < 1 << 40):
                told = f"{min(unknown)!r} is no fact; there are {', '.join(FACTS)}" if unknown else f"{formula!r} is no size"
                raise LanguageError(told)
        except LanguageError as err:
            raise LanguageError(f"{where}: size of {name!r}: {err}") from None
    rules = []
    for at, entry in enumerate(found.get("rules", []), start=1):
        place = f"{where}: rule {at}"
        if not isinstance(entry, dict):
            raise LanguageError(f"{place} is no table")
        _only(entry, _RULE_KEYS, place)
        if "here" not in entry or "there" not in entry:
            raise LanguageError(f"{place}: 'here' and 'there' are wanted")
        there = entry["there"] if isinstance(entry["there"], str) else _texts(entry["there"], f"{place}: there")
        try:
            rule = Rule.parse(entry["here"], there, repeat=entry.get("repeat"))
            unknown = set().union(*(item.name.facts for item in (rule.here, *rule.there))) - FACTS.keys()
            if unknown:
                raise LanguageError(f"{rule}: {min(unknown)!r} is no fact; there are {', '.join(FACTS)}")
            rules += stacked(rule, stack)
        except LanguageError as err:
            raise LanguageError(f"{place}: {err}") from None
    if not rules:
        raise LanguageError(f"{where}: no rules")
    return Dialect(head["name"], head["other"], tuple(families), sizes, tuple(rules), where)


def stacked(rule: Rule, holes: Sequence[str]) -> list[Rule]:
    """A rule, and those in which some holes of the name here are leading axes instead.

    Args:
        rule: with an arrangement, if it has one of the holes.
        holes: that may be axes.
    """
    found = [rule]
    own = [hole.name for hole in rule.here.name.holes if hole.name in holes and not hole.text]
    if len(own) > _MOST_STACKED:
        raise LanguageError(f"{rule}: {len(own)} holes that may be stacked; {_MOST_STACKED} are enough")
    for count in range(1, len(own) + 1):
        for some in itertools.combinations(own, count):
            if rule.here.arrangement is None:
                raise LanguageError(f"{rule}: {', '.join(some)} may be stacked, so that an arrangement is wanted")
            name, text = rule.here.name, str(rule.here.arrangement)
            for hole in reversed(some):
                name, text = _without(name, hole), f"{hole} {text}"
            found.append(Rule(Item(name, Arrangement.parse(text)), rule.there, rule.repeat))
    return found


def _without(name: Template, hole: str) -> Template:
    """The name without the hole, and without the dot before it."""
    parts: list[str] = []
    for part in name.parts:
        if isinstance(part, Hole) and part.name == hole:
            if not parts or not parts[-1].endswith("."):
                raise LanguageError(f"{name}: {hole!r} stands behind no dot, and cannot be left out")
            parts[-1] = parts[-1][:-1]
        else:
            parts.append(str(part))
    return Template.parse("".join(parts))


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def _only(table: Mapping[str, Any], known: Mapping[str, tuple[type, ...]], where: str) -> None:
    for key, value in table.items():
        if key not in known:
            raise LanguageError(f"{where}: unknown key {key!r}; known are {', '.join(map(repr, sorted(known)))}")
        if not isinstance(value, known[key]) or isinstance(value, bool):
            wanted = " or ".join(kind.__name__ for kind in known[key])
            raise LanguageError(f"{where}: {key!r} is {value!r}, not a {wanted}")


def _texts(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise LanguageError(f"{where} is {value!r}, not a list of texts")
    return value
