"""The language: rules against an independent evaluation by numpy, and rules as they are written in practice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.translations import Array, carried_out, numbered
from unickpt.base.errors import LanguageError
from unickpt.checkpoint.format.boxes import Box
from unickpt.transform.dialects.arrangement import PADDING, Arrangement, Axis, Concatenation, Node, Product
from unickpt.transform.dialects.pieces import GridPiece, Link, check_cover
from unickpt.transform.dialects.rules import Rule
from unickpt.transform.dialects.translation import Translation, translate

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
        (at for at, node in enumerate(_all_factors(arrangement)) if isinstance(node, Concatenation)), None
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
        if isinstance(factor, Concatenation):
            factor = factor.options[option]
        leaves = factor.factors if isinstance(factor, Product) else (factor,)
        found.append([leaf.name for leaf in leaves if isinstance(leaf, Axis) and leaf.name != "1"])
    return found


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
def test_a_rule_equals_its_numpy_expression(made: tuple[Rule, dict[str, int], bool], chance: Any) -> None:
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


def compose(first: Mapping[str, Sequence[GridPiece]], second: Mapping[str, Sequence[GridPiece]]) -> dict[str, list[GridPiece]]:
    """Compose maps from a to b and from b to c. All maps are pieces by target name."""
    return {
        target: [made for two in pieces for one in first.get(two.source, ()) if (made := one.then(two)) is not None]
        for target, pieces in second.items()
    }


def outward_inverse(outward: Translation, arrays: Mapping[str, Array]) -> list[GridPiece]:
    return [piece.inverted() for name in arrays for piece in outward.pieces[name]]


def _box(shape: Sequence[int], chance: Any) -> Box:
    start = [chance.randrange(extent) for extent in shape]
    return Box(tuple(start), tuple(chance.randint(1, n - a) for a, n in zip(start, shape, strict=True)))


# ---------------------------------------------------------------- what is written in practice

SIZES = {"group": 2, "query": 3, "head": 4}


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
        with pytest.raises(LanguageError, match="cannot be separated into its terms"):
            translate([rule], {name: (4,) for name in given}, {"norm": (4,)}, {"tp": 3}, outward=True)
        return
    out = translate([rule], {name: (4,) for name in given}, {"norm": (4,)}, {"tp": 3}, outward=True)
    assert all(np.array_equal(carried_out(out, given, {"norm": want})[name], want.astype(int)) for name in given)


def test_each_side_has_its_own_padding() -> None:
    rule = Rule.parse("x [(heads (head | ~)) h]", "y [(heads (head | ~)) h]")
    given = numbered({"y": (12, 2)})
    found = translate([rule], {"x": (10, 2)}, {"y": (12, 2)}, {"heads": 2, "head": 4})
    made = carried_out(found, {"x": np.zeros((10, 2), int)}, given)["x"]
    assert np.array_equal(made.reshape(2, 5, 2)[:, :4], given["y"].reshape(2, 6, 2)[:, :4])
    assert not made.reshape(2, 5, 2)[:, 4].any()
    first = translate([Rule.parse("x [(~ | a)]", "y [(~ | a)]")], {"x": (5,)}, {"y": (8,)}, {"a": 3}).pieces["x"][0]
    assert (first.source_start, first.target_start) == ((5,), (2,))


@pytest.mark.parametrize(
    ("here", "there", "wanted", "given", "sizes", "message"),
    [
        (
            "w [((e f) | s) h]",
            ["m.{e} [f h]", "sh [s h]"],
            {"m.2": (2, 1)},
            {"w": (6, 1)},
            {"e": 2, "s": 2},
            "e is 2, expected 0 to 1",
        ),
        ("f [(a | b) h]", ["x [a h]", "y [b h]"], {"x": (2, 2), "y": (2, 2)}, {"f": (9, 2)}, {}, "the size of 'a' is 2"),
        ("b [h]", ["part{n}.b [h]"], {"part0.b": (3,)}, {"b": (3,)}, {"n": 2}, "cannot be separated into its terms"),
        ("w [n]", ["p.{n} []"], {"w": (1 << 40,)}, {"p.0": ()}, {}, "more than"),
    ],
)
def test_mismatching_tensors_are_refused(
    here: str, there: list[str], wanted: Any, given: Any, sizes: dict[str, int], message: str
) -> None:
    rule = Rule.parse(here, there, repeat={"n": "sum"} if "part" in there[0] else None)
    with pytest.raises(LanguageError, match=message):
        translate([rule], wanted, given, sizes, outward=here != "w [n]")


def test_the_remaining_part_of_a_tensor_is_reported() -> None:
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


def test_tensors_without_brackets_do_not_change() -> None:
    rule = Rule.parse("a.{*rest}", "b.{*rest}")
    found = translate([rule], {"a.x.y": (2, 3), "c": (1,)}, {"b.x.y": (2, 3), "b.z": ()}, {})
    assert found.pieces["a.x.y"][0].links == (Link(2, 0, 1, 0, 1), Link(3, 1, 1, 1, 1))
    assert (found.unmatched, found.unused) == (["c"], ["b.z"])
    with pytest.raises(LanguageError, match=r"a\.x has the shape \[3, 2\], b\.x has \[2, 3\]"):
        translate([rule], {"a.x": (3, 2)}, {"b.x": (2, 3)}, {})
