"""Arrangements, rules, formulas and names: what they say, and what is none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt.errors import LanguageError
from unickpt.language.arrangement import PADDING, Arrangement
from unickpt.language.names import Template
from unickpt.language.rules import Item, Rule
from unickpt.language.sizes import evaluate


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("(a", "')' is missing"),
        ("a a", "in it twice"),
        ("((a | b) a)", "in it twice"),
        ("(a a | b)", "in it twice"),
        ("~", "padding stands for itself"),
        ("(a ~ | b)", "padding stands for itself"),
        ("(~)", "padding stands for itself"),
        ("2 a", "of numbers only 1"),
        ("(| a)", "nothing is between"),
        ("()", "nothing is between"),
        ("a)", "is expected"),
        ("(a | b) (c | d)", "more than one choice"),
        ("((a | b) | c)", "more than one choice"),
        ("a-b", "'-' cannot be in it"),
        ("(" * 600 + "a" + ")" * 600, "characters"),
    ],
)
def test_arrangements_that_are_none(text: str, told: str) -> None:
    with pytest.raises(LanguageError) as caught:
        Arrangement.parse(text)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("here", "there", "told"),
    [
        ("w [a b]", ["p [a]"], "'b' is an index here alone"),
        ("w [a]", ["p [a b]"], "'b' is an index there alone"),
        ("w.{n} [a]", ["p [a]"], "'n' is an index here alone"),
        ("w [(a | b)]", ["p [a]"], "2 options here are 1 tensors"),
        ("w [a]", ["p [a]", "q [a]"], "1 options here are 2 tensors"),
        ("w [a]", ["p"], "on both sides"),
        ("w", ["p", "q"], "on both sides"),
        ("w.{a} [a]", ["p.{a} [a]"], "is a hole and an axis"),
        ("w.{*t}", ["p"], "any text has to be in the names on both sides"),
        ("w.{t", ["p"], "a hole is"),
        ("w.{a}.{a}", ["p.{a}"], "in it twice"),
        ("w.{a}{b} [h]", ["p [a b h]"], "between two holes"),
        ("w [(a | b)]", ["p [a]", "p [b]"], "is there twice"),
        ("w.{*a + 1}", ["p.{*a}"], "nothing can be added"),
        ("w", [], "nothing is there"),
        ("", ["p"], "is not a name"),
    ],
)
def test_rules_that_are_none(here: str, there: list[str], told: str) -> None:
    with pytest.raises(LanguageError) as caught:
        Rule.parse(here, there)
    assert told in str(caught.value)


def test_a_repetition_of_nothing_is_refused() -> None:
    with pytest.raises(LanguageError, match="no index on one side alone"):
        Rule.parse("w [a]", "p [a]", repeat={"a": "mean"})
    with pytest.raises(LanguageError, match="no index on one side alone"):
        Rule.parse("w [a]", "p.{b} [a]", repeat={"b": "median"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "text", ["a/3", "a/0", "b", "__import__('os')", "a**9", "1-2", "a.x", "", "a if a else 1", "1.5", "True", "9" * 300]
)
def test_formulas_that_are_none(text: str) -> None:
    with pytest.raises(LanguageError):
        evaluate(text, {"a": 4})


def test_a_formula() -> None:
    assert evaluate("(heads - 2) / groups + 3 * one", {"heads": 10, "groups": 2, "one": 1}) == 7
    assert evaluate(12, {}) == 12


def test_names() -> None:
    template = Template.parse("m.{layer + 2}.x.{*rest}")
    assert template.match("m.5.x.a.b") == {"layer": 3, "rest": "a.b"}
    assert template.fill({"layer": 3, "rest": "a.b"}) == "m.5.x.a.b"
    assert template.match("m.1.x.a") is None  # layer -1
    assert template.match("m.05.x.a") is None  # no framework writes that, and two names would be one
    assert Template.parse(str(template)) == template
    assert Item.parse("a.{layer + 1} [b  (c d)]").name.fill({"layer": 1}) == "a.2"


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab1~|() ", max_size=30))
def test_any_text_is_an_arrangement_or_an_error(text: str) -> None:
    try:
        found = Arrangement.parse(text)
    except LanguageError:
        return
    assert Arrangement.parse(str(found)).dimensions == found.dimensions
    sizes = dict.fromkeys(found.axes(), 2)
    assert found.solve(found.shape(sizes), sizes) in ({}, {PADDING: 0})
