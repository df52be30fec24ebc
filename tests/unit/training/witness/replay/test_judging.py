"""What the repetitions of a step say: equal, one rank, an operator, the input, or the original run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from unickpt.base.errors import ConfigError
from unickpt.training.witness.replay import records, texts
from unickpt.training.witness.replay.judging import Judgement, Meaning, judge
from unickpt.training.witness.replay.records import Phase, Record, Row

STEP, UNTIL = 4, 5
Change = Callable[[Row], bool]


def rows() -> list[Row]:
    found = [Row(STEP, Phase.HELD, -1, "w", 11), Row(STEP, Phase.HELD, -1, "exp_avg of w", 12)]
    for at in range(2):
        found += [
            Row(UNTIL, Phase.RANDOM, at, "random states", 20 + at),
            Row(UNTIL, Phase.INPUT, at, "the input of the model", 30 + at),
            Row(UNTIL, Phase.OUTPUT, at, "first", 40 + at),
            Row(UNTIL, Phase.OUTPUT, at, "second", 50 + at),
            Row(UNTIL, Phase.OUTPUT_GRADIENT, at, "first", 60 + at),
            Row(UNTIL, Phase.GRADIENT, at, "w", 70 + at),
        ]
    return [
        *found,
        Row(UNTIL, Phase.REDUCED, -1, "w", 80),
        Row(UNTIL, Phase.HELD, -1, "w", 90),
        Row(UNTIL, Phase.HELD, -1, "late", 91, moving=True),
    ]


def run(changes: dict[int, Change] | None = None, *, hosts: Sequence[str] = "abcd", parallel: int = 1) -> dict[int, Record]:
    """Return what four ranks record. ``changes``: which rows of a rank have another value."""
    found = {}
    for rank, host in enumerate(hosts):
        change = (changes or {}).get(rank)
        own = [replace(row, value=row.value + 1000 * (change is not None and change(row))) for row in rows()]
        found[rank] = Record(rank, len(hosts), host, parallel, facts={"device": "cpu"}, rows=own)
    return found


def after(phase: Phase, micro_batch: int = 0, what: str = "") -> Change:
    """Return the rows that are wrong if one of this phase is, and those that follow from it on the same rank."""
    order = list(Phase)

    def change(row: Row) -> bool:
        if row.step == STEP or row.phase is Phase.RANDOM:
            return False
        if not row.phase.local:
            return True
        return row.micro_batch == micro_batch and (order.index(row.phase), row.what) >= (order.index(phase), what)

    return change


REDUCED = after(Phase.REDUCED)


def told(*runs: dict[int, Record], **options: object) -> Judgement:
    return judge(runs, STEP, UNTIL, **options)  # type: ignore[arg-type]


def test_equal_runs_are_equal() -> None:
    found = told(run(), run())
    assert (found.meaning, found.ranks, found.values, found.equal) == (Meaning.EQUAL, (), 4 * 15, True)
    assert texts.heading(found).startswith(
        "EQUAL: step 5, computed 2 times from the checkpoint of step 4 on 4 ranks: all 60 values"
    )


def test_a_fault_of_one_rank_is_named_although_all_have_its_gradient() -> None:
    wrong = {rank: REDUCED for rank in range(4)} | {2: after(Phase.OUTPUT, 1, "second")}
    found = told(run(), run(wrong))
    assert (found.meaning, found.origin, len(found.ranks)) == (Meaning.SDC_COMPUTE, (2,), 4)
    first = found.ranks[2].first
    assert (first.step, first.phase, first.micro_batch, first.what) == (5, Phase.OUTPUT, 1, "second")
    said = "SDC_COMPUTE step 5, micro-batch 1: rank 2 (on c): the output of second differs between the runs"
    assert texts.heading(found) == said
    assert "test the memory and the GPU of c" in texts.next_steps(found)
    assert texts.details(found)[1] == (
        "  in that step: 1 of 4 outputs of layers, 1 of 2 gradients of these outputs, 1 of 2 gradients of parameters before "
        "reduction, 1 of 1 gradients of parameters as the optimizer uses them, 2 of 2 weights, masters and states"
    )


def test_an_operator_that_is_not_repeatable_differs_on_most_ranks() -> None:
    found = told(run(), run({rank: after(Phase.OUTPUT, 0, "first") for rank in range(4)}))
    assert (found.meaning, found.origin) == (Meaning.NONDETERMINISTIC, (0, 1, 2, 3))
    assert "all ranks: the output of first differs between the runs" in texts.heading(found)
    half = told(run(), run({0: after(Phase.OUTPUT), 1: after(Phase.GRADIENT), 2: REDUCED, 3: REDUCED}))
    assert (half.meaning, half.origin) == (Meaning.NONDETERMINISTIC, (0, 1))


def test_all_ranks_of_one_host_speak_for_the_host() -> None:
    wrong = {0: after(Phase.OUTPUT), 1: after(Phase.OUTPUT), 2: REDUCED, 3: REDUCED}
    found = told(run(hosts="aabb"), run(wrong, hosts="aabb"))
    assert (found.meaning, found.origin) == (Meaning.SDC_COMPUTE, (0, 1))
    alone = told(run(wrong, hosts="aaaa"), run(hosts="aaaa"))
    assert alone.meaning is Meaning.NONDETERMINISTIC


def test_reduced_gradients_alone_speak_for_a_collective() -> None:
    found = told(run(), run({rank: REDUCED for rank in range(4)}))
    assert (found.meaning, found.ranks[0].first.phase) == (Meaning.NONDETERMINISTIC, Phase.REDUCED)
    assert "a collective, or what follows it" in texts.next_steps(found)


def test_another_input_is_no_fault_of_the_model() -> None:
    found = told(run(), run({rank: after(Phase.INPUT) for rank in range(4)}))
    assert (found.meaning, found.origin) == (Meaning.INPUT, (0, 1, 2, 3))
    assert "let the script give the same data after a resume" in texts.next_steps(found)


def test_what_was_loaded_comes_first() -> None:
    wrong = {rank: after(Phase.OUTPUT) for rank in range(4)} | {3: lambda row: row.what == "w"}
    found = told(run(), run(wrong))
    assert (found.meaning, found.origin) == (Meaning.SDC_COMPUTE, (3,))
    assert texts.heading(found) == "SDC_COMPUTE step 4: rank 3 (on d): w, as it was loaded, differs between the runs"
    assert "unickpt verify" in texts.next_steps(found)


def test_too_few_ranks_cannot_say() -> None:
    one = {0: after(Phase.OUTPUT)}
    assert told(run(hosts="a"), run(one, hosts="a")).meaning is Meaning.NO_MAJORITY
    eight = told(run(hosts="abcdefgh"), run({1: after(Phase.OUTPUT), 5: after(Phase.OUTPUT)}, hosts="abcdefgh"))
    assert (eight.meaning, eight.origin) == (Meaning.NO_MAJORITY, (1, 5))


def test_model_parallelism_names_the_earliest_rank_and_blames_nobody() -> None:
    wrong = {0: after(Phase.OUTPUT, 0, "second"), 1: after(Phase.OUTPUT, 0, "first")}
    found = told(run(parallel=2), run(wrong, parallel=2))
    assert (found.meaning, found.origin) == (Meaning.NO_MAJORITY, (1,))


def test_of_several_runs_it_says_which_are_equal() -> None:
    wrong = {1: after(Phase.GRADIENT)}
    found = told(run(), run(), run(wrong), run())
    assert found.ranks[0].first.alike == ((1, 2, 4), (3,))
    assert texts.details(found)[0].endswith("; equal in runs 1 and 2 and 4, and in 3")


def test_the_original_run_may_be_what_is_wrong() -> None:
    saved = run({rank: lambda row: row.step == UNTIL and row.phase is Phase.HELD for rank in (1, 2)})
    found = told(run(), run(), saved=saved)
    assert (found.meaning, found.equal, found.against.equal) == (Meaning.ORIGINAL, False, ())
    assert [(each.rank, each.names) for each in found.against.ranks] == [(1, ("w",)), (2, ("w",))]  # what moves does not count
    assert "the checkpoint of step 5 has others" in texts.heading(found)
    assert texts.details(found)[0] == "2 of 4 tensors differ, on 2 ranks of 4"
    same = told(run(), run(), saved=run())
    assert (same.meaning, same.against.equal) == (Meaning.EQUAL, (1, 2))


def test_where_a_start_adds_in_another_order_the_original_run_accuses_nobody() -> None:
    saved = run({rank: lambda row: row.step == UNTIL and row.phase is Phase.HELD for rank in range(4)})
    again = run()
    for each in again.values():
        each.inexact = "buckets"
    found = told(again, again, saved=saved)
    assert (found.meaning, found.against.reason) == (Meaning.EQUAL, "buckets")
    assert told(again, again, saved=run()).against.equal == (1, 2)


def test_it_says_which_run_ends_as_the_original_did() -> None:
    found = told(run(), run({1: after(Phase.GRADIENT)}), saved=run())
    assert (found.meaning, found.against.equal) == (Meaning.SDC_COMPUTE, (1,))
    assert "run 1 ends with the values of the checkpoint of step 5" in texts.details(found)


def test_random_states_explain_and_are_no_difference() -> None:
    def random(row: Row) -> bool:
        return row.phase is Phase.RANDOM

    assert told(run(), run({rank: random for rank in range(4)})).equal
    first = after(Phase.OUTPUT)
    found = told(run(), run({rank: lambda row: random(row) or first(row) for rank in range(4)}))
    assert found.random == (0, 1, 2, 3)
    assert "rank 0, 1, 2, 3: torch's random generators have other states before that" in texts.details(found)


def test_runs_on_other_hosts_are_said() -> None:
    found = told(run(), run(hosts="abce"))
    assert found.facts == ("rank 3: host d, then e",)


def test_a_row_that_is_missing_differs() -> None:
    short = run()
    del short[1].rows[5]
    assert told(run(), short).origin == (1,)


def test_runs_that_are_not_whole_are_refused() -> None:
    with pytest.raises(ConfigError, match="fewer than two"):
        told(run())
    with pytest.raises(ConfigError, match="run 2 has 2 ranks, and run 1 has 4"):
        told(run(), run(hosts="ab"))
    early = run()
    early[3].rows = early[3].rows[:2]
    with pytest.raises(ConfigError, match="run 2: rank 3 has not come to step 5"):
        told(run(), early)


def test_files_of_ranks_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = run()
    for each in written.values():
        records.write(str(tmp_path), each)
    assert records.read(tmp_path) == written
    assert records.read(tmp_path / "none") == {}
    (tmp_path / "rank-00002.json").unlink()
    with pytest.raises(ConfigError, match="rank 2 of 4 has written nothing"):
        records.read(tmp_path)
    (tmp_path / "rank-00002.json").write_text('{"schema": 1}')
    with pytest.raises(ConfigError, match=r"rank-00002\.json: damaged"):
        records.read(tmp_path)
