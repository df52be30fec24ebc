"""Every rank computes the same schedule, and in it each rank has one buddy."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt.training.witness.schedule import Layout, buddies, is_checked, seconds


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    replicas, size, per_host = draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 8))
    ranks = draw(st.permutations(range(replicas * size)))
    groups = tuple(tuple(ranks[at * size : (at + 1) * size]) for at in range(replicas))
    return Layout(groups, tuple(f"host{rank // per_host}" for rank in range(replicas * size)))


def test_steps() -> None:
    assert [step for step in range(12) if is_checked(step, 4)] == [4, 8]
    assert [step for step in range(4) if is_checked(step, 1)] == [1, 2, 3]


@settings(max_examples=200, deadline=None)
@given(layouts(), st.integers(0, 1000), st.integers(0, 9))
def test_each_rank_repeats_one_other_in_the_same_place(layout: Layout, turn: int, seed: int) -> None:
    found = buddies(layout, turn, seed)
    again = Layout(layout.replicas, layout.hosts)  # of another rank
    assert buddies(again, turn, seed) == found
    if len(layout.replicas) == 1:
        assert found == {}
        return
    assert sorted(found) == sorted(found.values()) == sorted(rank for group in layout.replicas for rank in group)
    for rank, buddy in found.items():
        (own, place), (other, same) = layout.places[rank], layout.places[buddy]
        assert own != other
        assert place == same


def test_buddies_are_on_other_hosts_and_change() -> None:
    layout = Layout(tuple((rank,) for rank in range(6)), ("a", "a", "a", "b", "b", "b"))
    assert {buddies(layout, turn)[0] for turn in range(6)} == {3}
    spread = Layout(tuple((rank,) for rank in range(5)), tuple("abcde"))
    assert [buddies(spread, turn)[0] for turn in range(5)] == [1, 2, 3, 4, 1]
    assert buddies(spread, 0, seed=2)[0] == 3


def test_seconds_are_on_a_third_host_where_there_is_one() -> None:
    layout = Layout(tuple((rank,) for rank in range(6)), ("a", "a", "b", "b", "c", "c"))
    assert (buddies(layout, 0)[0], seconds(layout, 0)[0]) == (2, 4)
    alone = Layout(((0,), (1,), (2,)), ("a", "a", "a"))
    assert (buddies(alone, 0)[1], seconds(alone, 0)[1]) == (2, 0)
    assert seconds(Layout(((0,), (1,)), ("a", "b")), 0) == seconds(Layout(((0, 1),), ("a", "b")), 0) == {}


@settings(max_examples=100, deadline=None)
@given(layouts(), st.integers(0, 100), st.integers(0, 9))
def test_seconds_are_neither_the_rank_nor_its_buddy(layout: Layout, turn: int, seed: int) -> None:
    first, second = buddies(layout, turn, seed), seconds(layout, turn, seed)
    if len(layout.replicas) > 2:
        assert sorted(second) == sorted(second.values()) == sorted(first)
    for rank, other in second.items():
        assert len({rank, first[rank], other}) == 3
        assert layout.places[rank][1] == layout.places[other][1]
