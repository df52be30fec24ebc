"""Arrangements, rules, formulas and names: what they say, and what is none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt.base.errors import LanguageError
from unickpt.transform.dialects.arrangement import PADDING, Arrangement
from unickpt.transform.dialects.name_templates import Template
from unickpt.transform.dialects.rules import Rule, TensorPattern
from unickpt.transform.dialects.sizes import evaluate


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(a", "')' is missing"),
        ("a a", "appears twice"),
        ("((a | b) a)", "appears twice"),
        ("(a a | b)", "appears twice"),
        ("~", "padding must be an option of its own"),
        ("(a ~ | b)", "padding must be an option of its own"),
        ("(~)", "padding must be an option of its own"),
        ("2 a", "the only number that can be an axis is 1"),
        ("(| a)", "an option is empty"),
        ("()", "an option is empty"),
        ("a)", "expected an axis"),
        ("(a | b) (c | d)", "only one concatenation"),
        ("((a | b) | c)", "only one concatenation"),
        ("a-b", "'-' is not allowed"),
        ("(" * 600 + "a" + ")" * 600, "characters"),
    ],
)
def test_arrangements_that_are_none(text: str, message: str) -> None:
    with pytest.raises(LanguageError) as caught:
        Arrangement.parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("here", "there", "message"),
    [
        ("w [a b]", ["p [a]"], "'b' is an index only here"),
        ("w [a]", ["p [a b]"], "'b' is an index only there"),
        ("w.{n} [a]", ["p [a]"], "'n' is an index only here"),
        ("w [(a | b)]", ["p [a]"], "has 2 options, 'there' has 1 tensors"),
        ("w [a]", ["p [a]", "q [a]"], "has 1 options, 'there' has 2 tensors"),
        ("w [a]", ["p"], "on both sides"),
        ("w", ["p", "q"], "on both sides"),
        ("w.{a} [a]", ["p.{a} [a]"], "is both a hole and an axis"),
        ("w.{*t}", ["p"], "any text must be in the names on both sides"),
        ("w.{t", ["p"], "a hole is"),
        ("w.{a}.{a}", ["p.{a}"], "appears twice"),
        ("w.{a}{b} [h]", ["p [a b h]"], "two holes must be separated"),
        ("w.{a}.{b}{c} [h]", ["p [a b c h]"], "two holes must be separated"),
        ("w [(a | b)]", ["p [a]", "p [b]"], "has a tensor twice"),
        ("w.{*a + 1}", ["p.{*a}"], "cannot have an offset"),
        ("w", [], "is empty"),
        ("", ["p"], "expected NAME"),
    ],
)
def test_rules_that_are_none(here: str, there: list[str], message: str) -> None:
    with pytest.raises(LanguageError) as caught:
        Rule.parse(here, there)
    assert message in str(caught.value)


def test_a_repetition_of_nothing_is_refused() -> None:
    with pytest.raises(LanguageError, match="not an index of only one side"):
        Rule.parse("w [a]", "p [a]", repeat={"a": "mean"})
    with pytest.raises(LanguageError, match="not an index of only one side"):
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
    assert TensorPattern.parse("a.{layer + 1} [b  (c d)]").name.fill({"layer": 1}) == "a.2"


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
