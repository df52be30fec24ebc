"""Votes name a rank only against two others that agree, and blame a host only against two other hosts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt.training.witness.vote import Ballot, Kind, Subject, changed_at_rest, vote
from unickpt.training.witness.words import next_steps, text

SUBJECT = Subject("blocks.0.up.weight", step=12)
CHECKS = (Kind.SDC_COMPUTE, Kind.SDC_REPLICA, Kind.SDC_AT_REST, Kind.SDC_UPDATE)
values = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)
ballots = st.lists(st.tuples(st.sampled_from("abcd"), values), max_size=9).map(
    lambda each: [Ballot(rank, host, values) for rank, (host, values) in enumerate(each)]
)


def told(*values: int, hosts: str = "") -> list[Ballot]:
    return [Ballot(rank, (hosts or "abcdefg")[rank], (value,)) for rank, value in enumerate(values)]


@settings(max_examples=500, deadline=None)
@given(ballots, st.sampled_from(CHECKS))
def test_nobody_is_named_or_blamed_without_two_others_that_agree(given: list[Ballot], check: Kind) -> None:
    verdict = vote(check, SUBJECT, given)
    if verdict is None:
        assert len({each.values[0] for each in given}) <= 1
        return
    if verdict.kind in (Kind.NO_MAJORITY, Kind.NONDETERMINISTIC):
        assert verdict.blamed == ()
        return
    sound = [each for each in given if each.rank not in verdict.ranks]
    assert len(sound) == verdict.agreeing_ranks >= 2
    assert len({each.values for each in sound}) == 1 or len({set(each.values).pop() for each in sound}) == 1
    assert 2 * len(sound) > len(given)
    for host in verdict.blamed:
        assert len({each.host for each in sound} - {host}) >= 2
        assert any(each.host == host for each in given if each.rank in verdict.ranks)


@settings(max_examples=200, deadline=None)
@given(ballots, st.randoms())
def test_the_order_of_the_ballots_does_not_count(given: list[Ballot], random: object) -> None:
    mixed = list(given)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert vote(Kind.SDC_REPLICA, SUBJECT, mixed) == vote(Kind.SDC_REPLICA, SUBJECT, given)


@pytest.mark.parametrize(
    ("values", "hosts", "kind", "ranks", "blamed"),
    [
        ((5, 5, 5), "abc", None, (), ()),
        ((5, 6, 5), "abc", Kind.SDC_REPLICA, (1,), ("b",)),
        ((5, 6, 5), "aba", Kind.SDC_REPLICA, (1,), ()),  # the two others are one host
        ((5, 6, 5), "aaa", Kind.SDC_REPLICA, (1,), ()),
        ((5, 6), "ab", Kind.NO_MAJORITY, (0, 1), ()),
        ((5, 5, 6, 6), "abcd", Kind.NO_MAJORITY, (0, 1, 2, 3), ()),
        ((5, 5, 6, 7), "abcd", Kind.NO_MAJORITY, (0, 1, 2, 3), ()),  # two of four are no majority
        ((5, 5, 5, 6, 7), "abcde", Kind.SDC_REPLICA, (3, 4), ("d", "e")),
    ],
)
def test_majorities(
    values: tuple[int, ...], hosts: str, kind: Kind | None, ranks: tuple[int, ...], blamed: tuple[str, ...]
) -> None:
    verdict = vote(Kind.SDC_REPLICA, SUBJECT, told(*values, hosts=hosts))
    if kind is None:
        assert verdict is None
        return
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.blamed) == (kind, ranks, blamed)


def test_a_rank_that_differs_with_itself_is_no_verdict_about_others() -> None:
    given = [Ballot(0, "a", (1, 1, 1)), Ballot(1, "b", (1, 2, 1)), Ballot(2, "c", (3, 3, 3))]
    verdict = vote(Kind.SDC_COMPUTE, Subject("layers.3", 7, 2), given)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.blamed) == (Kind.NONDETERMINISTIC, (1,), ())
    assert text(verdict) == "NONDETERMINISTIC step 7, micro-batch 2: rank 1 (on b) finds another value of layers.3 each time"


@pytest.mark.parametrize(
    ("world", "changed", "kind", "ranks"),
    [
        (3, (), None, ()),
        (3, (2,), Kind.SDC_AT_REST, (2,)),
        (3, (0, 1, 2), None, ()),  # the program wrote to it
        (4, (1, 3), None, ()),
        (5, (1, 3), Kind.SDC_AT_REST, (1, 3)),
        (3, (7, 8, 9), None, ()),  # other parts of it
        (3, (1, 7, 8, 9), None, ()),
        (3, (1, 7), Kind.SDC_AT_REST, (1,)),
        (1, (0, 7), Kind.NO_MAJORITY, (0,)),
        (2, (1,), Kind.NO_MAJORITY, (1,)),
        (1, (0,), Kind.NO_MAJORITY, (0,)),
    ],
)
def test_changes_between_steps(world: int, changed: tuple[int, ...], kind: Kind | None, ranks: tuple[int, ...]) -> None:
    verdict = changed_at_rest(SUBJECT, told(*range(world)), changed=changed, ranks=world if max(changed, default=0) < 7 else 8)
    assert (None if verdict is None else (verdict.kind, verdict.ranks)) == (None if kind is None else (kind, ranks))


def test_texts() -> None:
    one = vote(Kind.SDC_REPLICA, SUBJECT, told(5, 6, 5))
    assert one is not None
    assert text(one) == ("SDC_REPLICA step 12: rank 1 (on b) holds another value of blocks.0.up.weight than 2 other ranks")
    assert "test the memory and the GPU of b; go back to a checkpoint" in next_steps(one)
    two = vote(Kind.SDC_REPLICA, SUBJECT, told(5, 6))
    assert two is not None
    assert text(two) == (
        "NO_MAJORITY step 12: rank 0 (on a) and rank 1 (on b) hold different values of blocks.0.up.weight; too few others "
        "agree to say who is wrong"
    )
    rest = changed_at_rest(SUBJECT, told(0), changed=(0,), ranks=1)
    assert rest is not None
    assert "rank 0 (on a) found blocks.0.up.weight changed between two steps of the optimizer" in text(rest)
    assert "leave out the check rest" in next_steps(rest)
