"""The language: rules against an independent evaluation by numpy, and what is refused when it is built."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.launch import REPO
from unickpt.errors import CoverageError, LanguageError, MismatchError
from unickpt.fragments import Box
from unickpt.language.arrangement import PADDING, Arrangement, Axis, Choice, Node, Product
from unickpt.language.dialect import parse
from unickpt.language.facts import FACTS, Model
from unickpt.language.names import Template
from unickpt.language.pieces import Link, Piece, check_cover, compose
from unickpt.language.rules import Item, Rule
from unickpt.language.shipped import choose, dialect
from unickpt.language.sizes import evaluate, names_in
from unickpt.language.translation import Translation, listed, translate

Array = npt.NDArray[Any]


# ---------------------------------------------------------------- an evaluation that knows nothing of steps and pieces


def filled(arrangement: Arrangement, option_arrays: Sequence[Mapping[str, Any]], sizes: Mapping[str, int]) -> Array:
    """A tensor from arrays with named axes, ``{"axes": [...], "data": array}``, one for each option (a padding has none)."""
    parts = []
    for at, option in enumerate(arrangement.options or (None,)):
        if option == Axis(PADDING):
            parts.append(None)
            continue
        order, shape = [], []
        for node in arrangement.dimensions:
            for names in _factors(node, at):
                order += names
                shape.append(math.prod(sizes[name] for name in names))
        given = option_arrays[len([part for part in parts if part is not None])]
        data = given["data"].transpose([given["axes"].index(name) for name in order])
        parts.append(data.reshape(shape))
    joint = next(
        (at for at, node in enumerate(_all_factors(arrangement)) if isinstance(node, Choice)), None
    )  # the factor that is a choice
    if joint is not None:
        sample = next(part for part in parts if part is not None)
        blank = np.zeros([sizes.get(PADDING, 0) if at == joint else n for at, n in enumerate(sample.shape)], sample.dtype)
        whole = np.concatenate([blank if part is None else part for part in parts], axis=joint)
    else:
        whole = parts[0]
    return whole.reshape(arrangement.shape(sizes))


def _all_factors(arrangement: Arrangement) -> list[Node]:
    found: list[Node] = []
    for node in arrangement.dimensions:
        found += node.factors if isinstance(node, Product) else [node]
    return found


def _factors(node: Node, option: int) -> list[list[str]]:
    """Names of the axes of every factor of a dimension."""
    factors = node.factors if isinstance(node, Product) else (node,)
    found = []
    for factor in factors:
        if isinstance(factor, Choice):
            factor = factor.options[option]
        leaves = factor.factors if isinstance(factor, Product) else (factor,)
        found.append([leaf.name for leaf in leaves if isinstance(leaf, Axis) and leaf.name != "1"])
    return found


def carried_out(found: Translation, wanted: Mapping[str, Array], given: Mapping[str, Array]) -> dict[str, Array]:
    """Targets, element by element as the pieces say; what no piece fills is 0."""
    made = {}
    for name, like in wanted.items():
        made[name] = np.zeros(like.shape, like.dtype)
        for piece in found.pieces[name]:
            for part in piece.reads():
                box = part.source_box
                data = given[part.source][box.slices()]
                view = np.lib.stride_tricks.as_strided(
                    made[name].reshape(-1)[_flat(part.target_start, like.shape) :],
                    data.shape,
                    [step * like.itemsize for step in part.strides(_strides(like.shape))],
                )
                view += (data * part.weight).astype(like.dtype)
    return made


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[at + 1 :]) for at in range(len(shape))]


def _flat(start: Sequence[int], shape: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(start, _strides(shape), strict=True))


NAMES = "abcdef"


@st.composite
def grouped(draw: Any, names: list[str], chosen: str = "") -> str:
    """An arrangement of these axes, in any order, in any dimensions."""
    order = draw(st.permutations([*names, *([chosen] if chosen else [])]))
    cuts = sorted(draw(st.sets(st.integers(1, len(order) - 1), max_size=2))) if len(order) > 1 else []
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    return " ".join(part[0] if len(part) == 1 else f"({' '.join(part)})" for part in parts)


@st.composite
def rules(draw: Any) -> tuple[Rule, dict[str, int], bool]:
    """A rule of one to three options, sizes of its axes, and whether it has padding."""
    common = list(NAMES[: draw(st.integers(1, 3))])
    count = draw(st.integers(1, 3))
    own = [[f"x{at}{n}" for n in range(draw(st.integers(0, 2)))] for at in range(count)]
    padded = draw(st.booleans())
    sizes = {name: draw(st.integers(1, 4)) for name in [*common, *itertools.chain(*own)]}
    if count > 1 or padded:
        options = [" ".join(draw(st.permutations(names))) if names else "1" for names in own]
        if padded:
            options.insert(draw(st.integers(0, count)), PADDING)
            sizes[PADDING] = draw(st.integers(0, 3))
        whole = draw(grouped(common, f"({' | '.join(options)})"))
    else:
        whole = draw(grouped([*common, *own[0]]))
    there = [f"t{at} [{draw(grouped([*common, *names]))}]" for at, names in enumerate(own)]
    return Rule.parse(f"w [{whole}]", there), sizes, padded


@settings(max_examples=300, deadline=None)
@given(rules(), st.randoms(use_true_random=False))
def test_a_rule_is_what_numpy_makes_of_it(made: tuple[Rule, dict[str, int], bool], chance: Any) -> None:
    """Both ways: the whole from its parts, and the parts from the whole."""
    rule, sizes, _ = made
    arrays: dict[str, Array] = {}
    options = []
    for at, item in enumerate(rule.there):
        assert item.arrangement is not None
        axes = item.axes(0)
        data = 1 + 1000 * at + np.arange(math.prod(sizes[name] for name in axes)).reshape([sizes[name] for name in axes])
        arrays[f"t{at}"] = filled(item.arrangement, [{"axes": axes, "data": data}], sizes)
        options.append({"axes": axes, "data": data})
    assert rule.here.arrangement is not None
    whole = {"w": filled(rule.here.arrangement, options, sizes)}
    known = {name: size for name, size in sizes.items() if name != PADDING}
    shapes = {name: array.shape for name, array in arrays.items()}
    inward = translate([rule], {"w": whole["w"].shape}, shapes, known)
    assert np.array_equal(carried_out(inward, whole, arrays)["w"], whole["w"])
    assert inward.padding.get("w", 0) == whole["w"].size - sum(array.size for array in arrays.values())
    outward = translate([rule], shapes, {"w": whole["w"].shape}, known, outward=True)
    again = carried_out(outward, arrays, whole)
    assert all(np.array_equal(again[name], array) for name, array in arrays.items())
    for name, array in arrays.items():  # inverted, it is the same map
        turned = Translation({name: [piece.inverted() for piece in inward.pieces["w"] if piece.source == name]})
        assert np.array_equal(carried_out(turned, {name: array}, whole)[name], array)
        round_trip = compose({"w": outward_inverse(outward, arrays)}, {name: outward.pieces[name]})[name]
        check_cover(name, array.shape, round_trip)
        assert all(piece.source_start == piece.target_start for piece in round_trip)
    box = _box(whole["w"].shape, chance)
    some = Translation({"w": [part for piece in inward.pieces["w"] if (part := piece.within(box))]})
    only = np.zeros(whole["w"].shape, whole["w"].dtype)
    only[box.slices()] = whole["w"][box.slices()]
    assert np.array_equal(carried_out(some, whole, arrays)["w"], only)


def outward_inverse(outward: Translation, arrays: Mapping[str, Array]) -> list[Piece]:
    return [piece.inverted() for name in arrays for piece in outward.pieces[name]]


def _box(shape: Sequence[int], chance: Any) -> Box:
    start = [chance.randrange(extent) for extent in shape]
    return Box(tuple(start), tuple(chance.randint(1, n - a) for a, n in zip(start, shape, strict=True)))


# ---------------------------------------------------------------- what is written in practice

SIZES = {"group": 2, "query": 3, "head": 4}


def numbered(shapes: Mapping[str, Sequence[int]]) -> dict[str, Array]:
    """Arrays with numbers that are in none of the others."""
    found, at = {}, 1
    for name, shape in shapes.items():
        size = math.prod(shape)
        found[name] = np.arange(at, at + size).reshape(shape)
        at += size
    return found


def test_grouped_queries() -> None:
    rule = Rule.parse(
        "decoder.layers.{layer}.linear_qkv.weight [(group (query | 1 | 1) head) hidden]",
        [
            "model.layers.{layer}.q_proj.weight [(group query head) hidden]",
            "model.layers.{layer}.k_proj.weight [(group head) hidden]",
            "model.layers.{layer}.v_proj.weight [(group head) hidden]",
        ],
    )
    given = numbered({f"model.layers.7.{name}_proj.weight": (rows, 5) for name, rows in (("q", 24), ("k", 8), ("v", 8))})
    name = "decoder.layers.7.linear_qkv.weight"
    found = translate([rule], {name: (40, 5)}, {key: array.shape for key, array in given.items()}, SIZES)
    q, k, v = given.values()
    per_group = [np.concatenate([q[g * 12 : g * 12 + 12], k[g * 4 : g * 4 + 4], v[g * 4 : g * 4 + 4]]) for g in range(2)]
    like = {name: np.zeros((40, 5), int)}
    assert np.array_equal(carried_out(found, like, given)[name], np.concatenate(per_group))
    assert len(found.pieces[name]) == 6  # one for each group and projection
    assert found.unused == []


def test_stacked_experts_with_gate_and_up() -> None:
    rule = Rule.parse(
        "layers.{layer}.experts.fc1 [expert hidden (gate | up)]",
        ["m.{layer + 1}.experts.{expert}.w1 [gate hidden]", "m.{layer + 1}.experts.{expert}.w3 [up hidden]"],
    )
    given = numbered({f"m.3.experts.{expert}.{name}": (5, 6) for expert in range(4) for name in ("w1", "w3")})
    shapes = {name: array.shape for name, array in given.items()}
    target = "layers.2.experts.fc1"
    found = translate([rule], {target: (4, 6, 10)}, shapes, {"gate": 5})
    want = np.stack(
        [np.concatenate([given[f"m.3.experts.{e}.w1"].T, given[f"m.3.experts.{e}.w3"].T], axis=1) for e in range(4)]
    )
    assert np.array_equal(carried_out(found, {target: want}, given)[target], want)
    back = translate([rule], shapes, {target: want.shape}, {"expert": 4}, outward=True)
    again = carried_out(back, given, {target: want})
    assert all(np.array_equal(again[name], array) for name, array in given.items())
    del shapes["m.3.experts.2.w3"]
    assert translate([rule], {target: (4, 6, 10)}, shapes, {"gate": 5}).without == {target: ["m.3.experts.2.w3"]}


@pytest.mark.parametrize("how", ["same", "mean", "sum"])
def test_copies(how: Any) -> None:
    """One on each rank, which are alike, or whose mean or sum counts."""
    rule = Rule.parse("norm [h]", "rank{tp}.norm [h]", repeat={"tp": how})
    given = numbered({f"rank{tp}.norm": (4,) for tp in range(3)})
    found = translate([rule], {"norm": (4,)}, {name: (4,) for name in given}, {"tp": 3})
    stack = np.stack(list(given.values())).astype(float)
    want = {"same": stack[0], "mean": stack.mean(0), "sum": stack.sum(0)}[how]
    made = carried_out(found, {"norm": np.zeros(4)}, {name: array.astype(float) for name, array in given.items()})["norm"]
    assert np.allclose(made, want)
    assert found.unused == []
    if how == "sum":
        with pytest.raises(LanguageError, match="cannot be told apart"):
            translate([rule], {name: (4,) for name in given}, {"norm": (4,)}, {"tp": 3}, outward=True)
        return
    out = translate([rule], {name: (4,) for name in given}, {"norm": (4,)}, {"tp": 3}, outward=True)
    assert all(np.array_equal(carried_out(out, given, {"norm": want})[name], want.astype(int)) for name in given)


def test_both_sides_have_padding_of_their_own() -> None:
    rule = Rule.parse("x [(heads (head | ~)) h]", "y [(heads (head | ~)) h]")
    given = numbered({"y": (12, 2)})
    found = translate([rule], {"x": (10, 2)}, {"y": (12, 2)}, {"heads": 2, "head": 4})
    made = carried_out(found, {"x": np.zeros((10, 2), int)}, given)["x"]
    assert np.array_equal(made.reshape(2, 5, 2)[:, :4], given["y"].reshape(2, 6, 2)[:, :4])
    assert not made.reshape(2, 5, 2)[:, 4].any()
    first = translate([Rule.parse("x [(~ | a)]", "y [(~ | a)]")], {"x": (5,)}, {"y": (8,)}, {"a": 3}).pieces["x"][0]
    assert (first.source_start, first.target_start) == ((5,), (2,))


@pytest.mark.parametrize(
    ("here", "there", "wanted", "given", "sizes", "told"),
    [
        ("w [((e f) | s) h]", ["m.{e} [f h]", "sh [s h]"], {"m.2": (2, 1)}, {"w": (6, 1)}, {"e": 2, "s": 2}, "e is 2, of 2"),
        ("f [(a | b) h]", ["x [a h]", "y [b h]"], {"x": (2, 2), "y": (2, 2)}, {"f": (9, 2)}, {}, "'a' would be 2"),
        ("b [h]", ["part{n}.b [h]"], {"part0.b": (3,)}, {"b": (3,)}, {"n": 2}, "cannot be told apart"),
        ("w [n]", ["p.{n} []"], {"w": (1 << 40,)}, {"p.0": ()}, {}, "more than"),
    ],
)
def test_what_does_not_fit_is_refused(
    here: str, there: list[str], wanted: Any, given: Any, sizes: dict[str, int], told: str
) -> None:
    rule = Rule.parse(here, there, repeat={"n": "sum"} if "part" in there[0] else None)
    with pytest.raises(LanguageError, match=told):
        translate([rule], wanted, given, sizes, outward=here != "w [n]")


def test_what_is_left_of_a_tensor_is_said() -> None:
    rule = Rule.parse("f [(a | b) h]", ["x [a h]", "y [b h]"])
    assert translate([rule], {"x": (2, 2)}, {"f": (9, 2)}, {}, outward=True).unused == ["f (4 of 18 elements)"]


def test_padding_is_nothing() -> None:
    rule = Rule.parse("embedding [(vocab | ~) hidden]", "embed [vocab hidden]")
    found = translate([rule], {"embedding": (8, 2)}, {"embed": (7, 2)}, {})
    assert found.padding == {"embedding": 2}
    back = translate([rule], {"embed": (7, 2)}, {"embedding": (8, 2)}, {}, outward=True)
    assert [piece.numel for piece in back.pieces["embed"]] == [14]
    with pytest.raises(LanguageError, match=r"embedding.*cannot have 6 elements"):
        translate([rule], {"embedding": (6, 2)}, {"embed": (7, 2)}, {})


def test_what_has_no_brackets_is_alike() -> None:
    rule = Rule.parse("a.{*rest}", "b.{*rest}")
    found = translate([rule], {"a.x.y": (2, 3), "c": (1,)}, {"b.x.y": (2, 3), "b.z": ()}, {})
    assert found.pieces["a.x.y"][0].links == (Link(2, 0, 1, 0, 1), Link(3, 1, 1, 1, 1))
    assert (found.unmatched, found.unused) == (["c"], ["b.z"])
    with pytest.raises(LanguageError, match=r"a\.x has the shape \[3, 2\], b\.x has \[2, 3\]"):
        translate([rule], {"a.x": (3, 2)}, {"b.x": (2, 3)}, {})


# ---------------------------------------------------------------- what is refused


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


def test_numbers_that_facts_tell() -> None:
    template = Template.parse("{= 2 * layers + 2}.{*kind}")
    assert template.facts == {"layers"}
    assert template.match("6.weight") is None  # before anything is known
    with pytest.raises(LanguageError, match="nothing has told it yet"):
        template.fill({"kind": "weight"})
    known = template.with_facts({"layers": 2, "heads": 3})
    assert known.match("6.weight") == {"kind": "weight"}
    assert known.match("7.weight") is None
    assert known.fill({"kind": "bias"}) == "6.bias"
    assert Template.parse(str(template)) == template
    rule = Rule.parse("{= layers}.w", "last.w")
    assert translate([rule.with_facts({"layers": 3})], {"3.w": (2,)}, {"last.w": (2,)}, {}).pieces.keys() == {"3.w"}
    with pytest.raises(LanguageError, match=r"rule \{= layers\}.w = last.w: .*'layers' is not known"):
        rule.with_facts({})
    made = parse(HEAD + RULE.replace("l.{layer}", "{= heads}.{layer}").replace("k.", "k"))
    assert made.of_model({"heads": 7}).rules[0].here.name.fill({"layer": 1}) == "7.1.w"
    for text in ("a{=}", "a{= 3}", "a{= x.y}", "{= layers}{n}", "{n}1{= layers}"):
        with pytest.raises(LanguageError):
            Template.parse(text)
    with pytest.raises(LanguageError, match=r"rule 1: .*'hoods' is no fact"):
        parse(HEAD + RULE.replace("l.{layer}", "{= hoods}.{layer}"))


def test_a_part_of_what_is_every_other_row() -> None:
    piece = Piece("a", "t", (1,), (10,), (Link(5, 0, 2, 0, 3),))  # 1, 3, 5, 7, 9 go to 10, 13, 16, 19, 22
    part = piece.within(Box((12,), (8,)))
    assert part == Piece("a", "t", (3,), (13,), (Link(3, 0, 2, 0, 3),))
    assert piece.within(Box((11,), (2,))) is None


def test_two_families_are_two_models() -> None:
    with pytest.raises(MismatchError, match="family 'gpt2'; this job's model is of 'qwen2'"):
        Model("qwen2").with_more(Model("gpt2"), "here")
    with pytest.raises(MismatchError, match="8 attention heads, of queries; this job's model has 4"):
        Model("", {"heads": 4}).with_more(Model("gpt2", {"heads": 8}), "here")


def test_an_element_from_two_tensors_is_refused() -> None:
    pieces = [Piece("a", "t", (0,), (0,), (Link(3, 0, 1, 0, 1),)), Piece("b", "t", (0,), (2,), (Link(2, 0, 1, 0, 1),))]
    with pytest.raises(CoverageError, match="elements come from a and from b"):
        check_cover("t", (5,), pieces)
    with pytest.raises(CoverageError, match="4 of 5 elements"):
        check_cover("t", (5,), [pieces[0], Piece("b", "t", (0,), (4,), ())])
    with pytest.raises(CoverageError, match="outside"):
        check_cover("t", (2,), [pieces[0]])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=4))
def test_overlaps_of_grids_are_found(grids: list[tuple[int, int, int]]) -> None:
    pieces = [Piece(str(at), "t", (0,), (start,), (Link(count, 0, 1, 0, step),) if count > 1 else ())
              for at, (start, step, count) in enumerate(grids)]  # fmt: skip
    hit = [start + n * step for start, step, count in grids for n in range(count)]
    size = max(hit) + 1
    try:
        check_cover("t", (size,), pieces, less=size - len(hit))
        assert len(set(hit)) == len(hit)
    except CoverageError:
        assert len(set(hit)) < len(hit)


@settings(max_examples=200, deadline=None)
@given(st.tuples(*[st.integers(0, 12), st.integers(1, 6), st.integers(1, 6)] * 2))
def test_two_grids_in_a_row(grid: tuple[int, ...]) -> None:
    """What goes through both is what is in both."""
    a, a_step, a_count, b, b_step, b_count = grid
    first = Piece("a", "b", (0,), (a,), (Link(a_count, 0, 1, 0, a_step),) if a_count > 1 else ())
    second = Piece("b", "c", (b,), (0,), (Link(b_count, 0, b_step, 0, 1),) if b_count > 1 else ())
    want = {(n, m) for n in range(a_count) for m in range(b_count) if a + n * a_step == b + m * b_step}
    made = first.then(second)
    found = set()
    if made is not None:
        link = made.links[0] if made.links else Link(1, 0, 0, 0, 0)
        found = {
            (made.source_start[0] + n * link.source_step, made.target_start[0] + n * link.target_step)
            for n in range(link.extent)
        }
    assert found == want


# ---------------------------------------------------------------- files

HEAD = '[dialect]\nname = "a"\nother = "b"\nfamilies = ["x"]\nstack = ["layer"]\n[sizes]\nn = "heads / 2"\n'
RULE = '[[rules]]\nhere = "l.{layer}.w [n m]"\nthere = "k.{layer}.w [m n]"\n'


def test_a_file() -> None:
    found = parse(HEAD + RULE)
    assert (found.name, found.other, found.families) == ("a", "b", ("x",))
    assert [str(rule.here) for rule in found.rules] == ["l.{layer}.w [n m]", "l.w [layer n m]"]
    assert found.sizes_of({"heads": 8}) == {"n": 4}
    assert found.sizes_of({}) == {}
    with pytest.raises(LanguageError, match=r"size of 'n'.*no whole number"):
        found.sizes_of({"heads": 7})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("not toml [", "not TOML"),
        (HEAD, "no rules"),
        (HEAD.replace("[dialect]", "[dialekt]") + RULE, "unknown key 'dialekt'"),
        (HEAD.replace('name = "a"\n', "") + RULE, r"\[dialect\] has no 'name'"),
        (HEAD.replace('["x"]', '"x"') + RULE, "'families' is 'x', not a list"),
        (HEAD.replace('["x"]', "[1]") + RULE, "not a list of texts"),
        (HEAD.replace("heads / 2", "heads.__class__") + RULE, "size of 'n'"),
        (HEAD.replace('"heads / 2"', "[1]") + RULE, "not a formula"),
        (HEAD + RULE + "code = 1\n", "rule 1: unknown key 'code'"),
        (HEAD + RULE + RULE.replace("[m n]", "[m o]"), "rule 2: .*'n' is an index here alone"),
        (HEAD + RULE.replace("there", "their"), "rule 1: unknown key 'their'"),
        (HEAD + RULE.replace(" [n m]", "").replace(" [m n]", ""), "an arrangement is wanted"),
        (HEAD + RULE.replace("l.{layer}", "l{layer}"), "stands behind no dot"),
        (HEAD + RULE + 'repeat = {z = "mean"}\n', "repeat of 'z'"),
        ("a = " + "[" * 5000, "not TOML"),
        (HEAD.replace("heads / 2", "hoods / 2") + RULE, "size of 'n'.*'hoods' is no fact"),
        (HEAD.replace('"heads / 2"', "-3") + RULE, "size of 'n'.*-3 is no size"),
        ("# " + "x" * (1 << 20), "too many for a dialect"),
    ],
)
def test_files_that_are_none(text: str, told: str) -> None:
    with pytest.raises(LanguageError, match=told):
        parse(text)


@pytest.mark.parametrize("path", sorted((REPO / "configs" / "dialects").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_dialects_are_as_their_schema_says(path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    tomllib = pytest.importorskip("tomllib")
    schema = json.loads((REPO / "configs" / "dialect.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(tomllib.loads(path.read_text()))
    made = parse(path.read_text(), where=path.name)
    assert all(dialect(made.name, family, other=made.other) for family in made.families)
    assert {fact for rule in made.rules for item in (rule.here, *rule.there) for fact in item.name.facts} <= set(FACTS)
    assert {name for formula in made.sizes.values() for name in names_in(formula)} <= set(FACTS)


def gpt2(layers: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of transformers' GPT-2 with a head of its own."""
    inner = {
        "ln_1.weight": (hidden,), "ln_1.bias": (hidden,), "ln_2.weight": (hidden,), "ln_2.bias": (hidden,),
        "attn.c_attn.weight": (hidden, 3 * hidden), "attn.c_attn.bias": (3 * hidden,), "attn.c_proj.bias": (hidden,),
        "attn.c_proj.weight": (hidden, hidden), "mlp.c_fc.weight": (hidden, 5), "mlp.c_fc.bias": (5,),
        "mlp.c_proj.weight": (5, hidden), "mlp.c_proj.bias": (hidden,),
    }  # fmt: skip
    outer = {"transformer.wte.weight": (23, hidden), "transformer.wpe.weight": (6, hidden), "lm_head.weight": (23, hidden),
             "transformer.ln_f.weight": (hidden,), "transformer.ln_f.bias": (hidden,)}  # fmt: skip
    return outer | {f"transformer.h.{at}.{name}": shape for at in range(layers) for name, shape in inner.items()}


def llama(layers: int, hidden: int, queries: int, keys: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of transformers' Llama; of queries and keys, the rows."""
    inner = {
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,), "self_attn.q_proj.weight":
        (queries, hidden), "self_attn.k_proj.weight": (keys, hidden), "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries), "mlp.gate_proj.weight": (5, hidden), "mlp.up_proj.weight": (5, hidden),
        "mlp.down_proj.weight": (hidden, 5),
    }  # fmt: skip
    outer = {"model.embed_tokens.weight": (23, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (23, hidden)}
    return outer | {f"model.layers.{at}.{name}": shape for at in range(layers) for name, shape in inner.items()}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("name", ["megatron-deepspeed", "megatron-deepspeed-pipe"])
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.booleans())
def test_megatron_deepspeed_there_and_back(
    name: str, family: str, layers: int, groups: int, query: int, head: int, thirds: bool
) -> None:
    """Every element once, in both directions; rows of queries, keys and values are where the code of a job looks for them."""
    groups, heads = (groups, groups * query) if family == "llama" and not thirds else (groups * query, groups * query)
    facts = {"layers": layers, "heads": heads, "groups": groups, "head_dim": head, "vocab": 23}
    facts["qkv_blocks"] = 1 if thirds else groups
    hidden = heads * head
    there = gpt2(layers, hidden) if family == "gpt2" else llama(layers, hidden + 1, hidden, groups * head)
    found = dialect(name, family).of_model(facts)
    sizes = found.sizes_of(facts)
    arrays = numbered(there)
    here = listed(found.rules, there, sizes)
    assert len(here) == len(there) - (3 * layers if family == "llama" else 0)
    padded = {key: (26, *shape[1:]) if shape[0] == 23 else shape for key, shape in here.items()}
    inward = translate(found.rules, padded, there, sizes)
    assert (inward.unmatched, inward.without, inward.unused) == ([], {}, [])
    whole = carried_out(inward, numbered(padded), arrays)
    back = translate(found.rules, there, padded, sizes, outward=True)
    assert (back.unmatched, back.without, back.unused) == ([], {}, [])
    again = carried_out(back, arrays, whole)
    assert all(np.array_equal(again[key], arrays[key]) for key in there)
    first = "2." if name.endswith("pipe") else "language_model.encoder.layers.0."
    assert f"{layers + 2}.weight" in here or first != "2."
    fused = whole[f"{first}self_attention.query_key_value.weight"]
    if family == "gpt2":
        q, k, v = np.split(arrays["transformer.h.0.attn.c_attn.weight"].T, 3)
    else:
        q, k, v = (arrays[f"model.layers.0.self_attn.{each}_proj.weight"] for each in "qkv")
    if thirds:
        assert np.array_equal(fused, np.concatenate([q, k, v]))
    else:  # transformer.py before FPDT: view(groups, heads / groups + 2, head), split_tensor
        mixed = fused.reshape(groups, heads // groups + 2, head, -1)
        assert np.array_equal(mixed[:, :-2].reshape(q.shape), q)
        assert np.array_equal(mixed[:, -2].reshape(k.shape), k)
        assert np.array_equal(mixed[:, -1].reshape(v.shape), v)


def test_a_family_that_nobody_knows() -> None:
    with pytest.raises(LanguageError, match=r"for the family 'bert'; there are .*llama"):
        dialect("megatron-core", "bert")
    with pytest.raises(LanguageError, match="nothing tells of which family"):
        choose("megatron-core", "huggingface", "", "", where="here", option="--dialect")
    with pytest.raises(LanguageError, match="cannot be read"):
        choose("megatron-core", "huggingface", "/nowhere.toml", "", where="here", option="--dialect")
    with pytest.raises(LanguageError, match=r"for the family '/nowhere.toml'"):  # what a checkpoint says is no path
        choose("megatron-core", "huggingface", "", "/nowhere.toml", where="here", option="--dialect")


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
