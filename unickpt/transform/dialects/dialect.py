"""Dialect files (TOML): arrangement of the parameters of model families in one framework, relative to another framework.

    [dialect]
    name = "megatron-core"
    other = "huggingface"
    families = ["llama", "mistral"]
    stack = ["layer", "expert"]     # holes of names on this side that can also be leading axes
    unread = ["pipe.{stage}.copy"]  # names on this side of tensors that no model reads

    [sizes]
    group = "groups"
    query = "heads / groups"

    [[rules]]
    here = "decoder.layers.{layer}.self_attention.linear_proj.weight [out in]"
    there = "model.layers.{layer}.self_attn.o_proj.weight [out in]"

Formulas of sizes use the facts about a model (``model_facts.py``). The file contains only data and no code.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.base.errors import LanguageError
from unickpt.transform.dialects.arrangement import Arrangement
from unickpt.transform.dialects.growth import Growth, parse_growth
from unickpt.transform.dialects.model_facts import FACTS
from unickpt.transform.dialects.name_templates import Hole, Template
from unickpt.transform.dialects.rules import Rule, TensorPattern
from unickpt.transform.dialects.sizes import evaluate, names_in

MAX_BYTES, _MOST_STACKED = 1 << 20, 3
_RULE_KEYS = {"here": (str,), "there": (str, list), "repeat": (dict,)}
_DIALECT_KEYS = {"name": (str,), "other": (str,), "families": (list,), "stack": (list,), "unread": (list,)}


@dataclass(frozen=True)
class Dialect:
    """Rules between two dialects.

    Attributes:
        name, other: names of the dialects, *here* and *there* in the rules.
        families: model families that the rules apply to.
        sizes: sizes of axes, as formulas of facts.
        rules: rules in order. The first one that matches a tensor and whose other side exists is used.
        where: file name, for messages.
        growth: growth rules of the side *here*, or None.
        unread: names *here* of tensors that no model reads, such as copies in a pipeline.
    """

    name: str
    other: str
    families: tuple[str, ...]
    sizes: Mapping[str, str | int]
    rules: tuple[Rule, ...]
    where: str = "dialect"
    growth: Growth | None = None
    unread: tuple[Template, ...] = ()

    def of_model(self, facts: Mapping[str, int]) -> Dialect:
        """Return the dialect with the numbers in names that depend on facts (``{= layers + 2}``).

        Raises:
            LanguageError: a fact is unknown; the message names the rule.
        """
        try:
            return dataclasses.replace(self, rules=tuple(rule.with_facts(facts) for rule in self.rules))
        except LanguageError as err:
            raise LanguageError(f"{self.where}: {err}") from None

    def sizes_of(self, facts: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes of axes for a model. Sizes with unknown facts are omitted; shapes can determine them.

        Args:
            facts: facts about the model.

        Raises:
            LanguageError: a size is not a whole number; the message names the formula.
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
        LanguageError: the text is not TOML, a key is unknown or has a wrong type, or a rule is malformed.
    """
    if len(text) > MAX_BYTES:
        raise LanguageError(f"{where}: {len(text):,} characters are too many for a dialect")
    try:
        found = _toml(text)
    except ValueError as err:
        raise LanguageError(f"{where}: not TOML: {err}") from None
    except RecursionError:
        raise LanguageError(f"{where}: not TOML: nested too deeply") from None
    _only(found, {"dialect": (dict,), "sizes": (dict,), "rules": (list,), "growth": (dict,)}, where)
    head = found.get("dialect", {})
    _only(head, _DIALECT_KEYS, f"{where}: [dialect]")
    families, stack, names = (_texts(head.get(key, []), f"{where}: [dialect] {key}") for key in ("families", "stack", "unread"))
    for key in ("name", "other"):
        if key not in head:
            raise LanguageError(f"{where}: [dialect] has no {key!r}")
    try:
        unread = tuple(Template.parse(name) for name in names)
    except LanguageError as err:
        raise LanguageError(f"{where}: [dialect] unread: {err}") from None
    sizes = found.get("sizes", {})
    for name, formula in sizes.items():
        if not isinstance(formula, (str, int)) or isinstance(formula, bool):
            raise LanguageError(f"{where}: size of {name!r} is {formula!r}, expected a formula or a number")
        try:
            unknown = names_in(formula) - FACTS.keys()
            if unknown or not name.isidentifier() or (isinstance(formula, int) and not 0 < formula < 1 << 40):
                known = f"{min(unknown)!r} is not a fact; known are {', '.join(FACTS)}" if unknown else ""
                raise LanguageError(known or f"{formula!r} is not a valid size")
        except LanguageError as err:
            raise LanguageError(f"{where}: size of {name!r}: {err}") from None
    rules = []
    for at, entry in enumerate(found.get("rules", []), start=1):
        place = f"{where}: rule {at}"
        if not isinstance(entry, dict):
            raise LanguageError(f"{place} is not a table")
        _only(entry, _RULE_KEYS, place)
        if "here" not in entry or "there" not in entry:
            raise LanguageError(f"{place}: needs 'here' and 'there'")
        there = entry["there"] if isinstance(entry["there"], str) else _texts(entry["there"], f"{place}: there")
        try:
            rule = Rule.parse(entry["here"], there, repeat=entry.get("repeat"))
            unknown = set().union(*(item.name.facts for item in (rule.here, *rule.there))) - FACTS.keys()
            if unknown:
                raise LanguageError(f"{rule}: {min(unknown)!r} is not a fact; known are {', '.join(FACTS)}")
            rules += stacked(rule, stack)
        except LanguageError as err:
            raise LanguageError(f"{place}: {err}") from None
    growth = parse_growth(found["growth"], where) if "growth" in found else None
    if not rules and growth is None:
        raise LanguageError(f"{where}: has no rules")
    return Dialect(head["name"], head["other"], tuple(families), sizes, tuple(rules), where, growth, unread)


def stacked(rule: Rule, holes: Sequence[str]) -> list[Rule]:
    """Return a rule and its variants in which holes of the name *here* are leading axes.

    Args:
        rule: a rule, with an arrangement if it has one of the holes.
        holes: holes that can be axes.

    Raises:
        LanguageError: the rule has no arrangement, or too many such holes.
    """
    found = [rule]
    own = [hole.name for hole in rule.here.name.holes if hole.name in holes and not hole.text]
    if len(own) > _MOST_STACKED:
        raise LanguageError(f"{rule}: {len(own)} holes can be stacked, the limit is {_MOST_STACKED}")
    for count in range(1, len(own) + 1):
        for some in itertools.combinations(own, count):
            if rule.here.arrangement is None:
                raise LanguageError(f"{rule}: needs an arrangement, because {', '.join(some)} can be stacked")
            name, text = rule.here.name, str(rule.here.arrangement)
            for hole in reversed(some):
                name, text = _without(name, hole), f"{hole} {text}"
            found.append(Rule(TensorPattern(name, Arrangement.parse(text)), rule.there, rule.repeat))
    return found


def _without(name: Template, hole: str) -> Template:
    """Return a name without a hole and without the dot before it."""
    parts: list[str] = []
    for part in name.parts:
        if isinstance(part, Hole) and part.name == hole:
            if not parts or not parts[-1].endswith("."):
                raise LanguageError(f"{name}: {hole!r} cannot be stacked, because it does not follow a dot")
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
            expected = " or ".join(kind.__name__ for kind in known[key])
            raise LanguageError(f"{where}: {key!r} is {value!r}, expected {expected}")


def _texts(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise LanguageError(f"{where} is {value!r}, expected a list of strings")
    return value
