"""Predictions of ``unickpt.planning.replay`` whose answers can be computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.replay_traces import Made, made_trace, write_rings
from unickpt.base.errors import FormatError
from unickpt.cli.main import main
from unickpt.diagnosis.recording.records import Op
from unickpt.planning.replay import microbatches
from unickpt.planning.replay.edits import operations_of_transfers
from unickpt.planning.replay.graph import CALLED, graph_of
from unickpt.planning.replay.price import Questions, analyse
from unickpt.planning.replay.schedule import columns, schedule_of, simulate
from unickpt.planning.replay.trace import Trace, TraceGroup, window_of
from unickpt.testing.simulation import calls
from unickpt.testing.simulation.layout import ParallelLayout
from unickpt.testing.simulation.traces import simulated_trace


def answers(trace: Trace, **asked: Any) -> list[float]:
    """Return the predicted step times in nanoseconds."""
    return [each.step_s * 1e9 for each in analyse(trace, questions=Questions(**asked)).answers]


def two_sizes() -> Trace:
    """All-reduces of 100 and 300 bytes take 20 and 40 ns: 10 ns, and 0.1 ns for each byte. Ranks compute 5 ns before each."""
    made = [
        Made(rank, Op.ALL_REDUCE, 0, seq, at, at, end, size=size)
        for rank in (0, 1)
        for seq, at, end, size in ((1, 5, 25, 100), (2, 30, 70, 300))
    ]  # fmt: skip
    return made_trace([TraceGroup("data parallel", (0, 1))], made, [[70], [70]])


def test_another_speed_changes_the_part_that_depends_on_the_size() -> None:
    # twice as fast: 5 + 10 + 5 + 5 + 10 + 15; half as fast: 5 + 10 + 20 + 5 + 10 + 60
    asked = (("data parallel", 2.0), ("data parallel", 0.5), ("data parallel", 1.0))
    assert answers(two_sizes(), speeds=asked) == pytest.approx([50, 110, 70])


def test_the_error_grows_with_a_step_that_becomes_longer() -> None:
    trace = two_sizes()
    trace.calls["end_ns"][1] = 72  # rank 0 goes on 2 ns late
    trace.marks["end_ns"][0] = 72
    found = analyse(trace, questions=Questions(speeds=(("data parallel", 2.0), ("data parallel", 0.5))))
    fast, slow = found.answers
    assert found.error_s > 0
    assert fast.error_s == found.error_s
    assert slow.error_s == pytest.approx(found.error_s * slow.step_s / found.step_s)


def one_pair() -> Trace:
    """Rank 0 sends to rank 1 for 12 ns; both compute 1 ns before it and 2 ns after it in each step."""
    made = [
        Made(rank, op, 0, step, begin, begin, begin + 12, (0, 1))
        for rank, op in ((0, Op.SEND), (1, Op.RECEIVE))
        for step, begin in ((1, 1), (2, 16))
    ]  # fmt: skip
    return made_trace([TraceGroup("pipeline parallel", (0, 1))], made, [[15, 30], [15, 30]])


@pytest.mark.parametrize(("late", "expected"), [(4, (11 + 13) / 2), (28, (11 + 11 + 22) / 2)])
def test_members_that_go_on_later_have_a_part_of_the_transfer(late: int, expected: float) -> None:
    """A transfer of 12 ns becomes one of 6: a member that goes on 4 ns later does so 2 ns later, and one 28 ns later, 22."""
    made = [Made(rank, Op.ALL_REDUCE, 0, 1, 5, 5, end, size=100) for rank, end in ((0, 17), (1, 17 + late))]
    trace = made_trace([TraceGroup("data parallel", (0, 1))], made, [[17], [17 + late]])
    assert answers(trace, speeds=(("data parallel", 2.0),)) == pytest.approx([expected])


def test_one_size_has_no_constant_part() -> None:
    assert answers(one_pair(), speeds=(((1, 0), 3.0), ((0, 1), 0.5))) == pytest.approx([7, 27])


def test_unknown_links_are_refused() -> None:
    with pytest.raises(FormatError, match="link 0-2: the ranks make no point-to-point transfers"):
        analyse(one_pair(), questions=Questions(speeds=(((0, 2), 2.0),)))
    with pytest.raises(FormatError, match="'tensor parallel'; there are 'pipeline parallel'"):
        analyse(one_pair(), questions=Questions(speeds=(("tensor parallel", 2.0),)))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_microbatches_of_1f1b_have_the_closed_form(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With transfers of 1 ns, a step of even stages takes (m + p - 1) times one forward and one backward computation."""
    monkeypatch.setattr(calls, "TRANSFER_NS", 1)
    measured, wanted = 2 * stages, (stages + 1, 2 * stages, 4 * stages, 7 * stages)
    both = calls.FORWARD_NS + calls.BACKWARD_NS
    trace = simulated_trace(ParallelLayout(1, stages, 1), 3, measured)
    assert analyse(trace).step_s * 1e9 == pytest.approx((measured + stages - 1) * both, rel=1e-5)
    found = answers(trace, microbatches=wanted)
    assert found == pytest.approx([(count + stages - 1) * both for count in wanted], rel=1e-5)


@pytest.mark.parametrize("layout", [ParallelLayout(1, 2, 1), ParallelLayout(2, 2, 2), ParallelLayout(2, 4, 1)])
def test_microbatches_are_predicted_as_the_simulation_of_that_job(layout: ParallelLayout) -> None:
    slow = {layout.world - 1: 1.3, 0: 1.1}
    trace = simulated_trace(layout, 3, 8, slow=slow)
    expected = [analyse(simulated_trace(layout, 3, count, slow=slow)).step_s * 1e9 for count in (6, 8, 16, 21)]
    assert answers(trace, microbatches=(6, 8, 16, 21)) == pytest.approx(expected, rel=1e-6)


def test_as_many_microbatches_leave_every_step_as_it_is() -> None:
    varied = np.random.default_rng(1)
    trace = simulated_trace(ParallelLayout(2, 2, 2), 4, 6, jitter=lambda: float(varied.uniform(0.8, 1.2)))
    graph = graph_of(window_of(trace))
    same = microbatches.with_microbatches(graph, 6)
    before, after = (
        simulate(each, schedule_of(each), columns([each.events.own_ns * 1.0]), columns([each.transfers.took_ns * 1.0]))
        for each in (graph, same)
    )
    assert after.tolist() == before.tolist()


def test_more_microbatches_repeat_each_measured_one() -> None:
    """Microbatches of a stage that differ are repeated in turn, so their mean stays."""
    varied = np.random.default_rng(2)
    trace = simulated_trace(ParallelLayout(1, 2, 1), 3, 12, jitter=lambda: float(varied.uniform(0.9, 1.1)))
    even = analyse(simulated_trace(ParallelLayout(1, 2, 1), 3, 48)).step_s * 1e9
    assert answers(trace, microbatches=(48,)) == pytest.approx([even], rel=0.05)


def one_way(*, late: bool = False) -> Trace:
    """Two steps of four microbatches of 25 ns: a message of 1 ns, and two all-reduces of 10 ns each, one after the other.

    With ``late``, rank 1 makes all its all-reduces at the end of the step, and no rank waits for them.
    """
    made = []
    for rank, op in ((0, Op.SEND), (1, Op.RECEIVE)):
        for step in (0, 1):
            seqs = range(4 * step, 4 * step + 4)
            pairs = [(seq, Made(rank, op, 0, seq + 1, 25 * seq + 1, 25 * seq + 1, 25 * seq + 2, (0, 1))) for seq in seqs]
            sums = [
                (
                    seq,
                    Made(rank, Op.ALL_REDUCE, 1, 2 * seq + 1, 25 * seq + 3, 0, 25 * seq + 13),
                    Made(rank, Op.ALL_REDUCE, 1, 2 * seq + 2, 25 * seq + 4, 0 if late else 25 * seq + 5, 25 * seq + 23),
                )
                for seq in seqs
            ]
            if late and rank:
                at = 100 * step + 90
                made += [pair for _, pair in pairs]
                made += [Made(1, Op.ALL_REDUCE, 1, 8 * step + each + 1, at + each, 0, at + 9) for each in range(8)]
            else:
                made += [each for pair, both in zip(pairs, sums, strict=True) for each in (pair[1], *both[1:])]
    groups = [TraceGroup("pipeline parallel", (0, 1)), TraceGroup("tensor parallel", (0, 1))]
    return made_trace(groups, made, [[100, 200], [100, 200]])


def test_transfers_that_no_rank_waits_for_stay_in_order() -> None:
    assert answers(one_way(), microbatches=(2, 4, 8)) == pytest.approx([50, 100, 200])


def test_fewer_microbatches_than_stages_are_refused() -> None:
    """No rank of this pipeline fills it with microbatches first, so its calls alone allow any number."""
    with pytest.raises(FormatError, match="1 microbatches do not fill the pipeline: it has 2 stages"):
        answers(one_way(), microbatches=(1,))


def test_collectives_that_members_would_make_in_different_numbers_are_refused() -> None:
    with pytest.raises(FormatError, match="different numbers of its calls"):
        answers(one_way(late=True), microbatches=(8,))


@pytest.mark.parametrize(
    ("layout", "measured", "wanted", "text"),
    [
        (ParallelLayout(1, 4, 1), 8, 3, "3 microbatches do not fill the pipeline: it has 4 stages"),
        (ParallelLayout(1, 4, 1), 4, 8, "do not repeat from microbatch to microbatch"),
        (ParallelLayout(2, 1, 2), 4, 8, "the job has no pipeline"),
    ],
)
def test_other_schedules_are_refused(layout: ParallelLayout, measured: int, wanted: int, text: str) -> None:
    with pytest.raises(FormatError, match=text):
        answers(simulated_trace(layout, 2, measured), microbatches=(wanted,))


def test_the_command_takes_speeds_microbatches_and_orders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rings = write_rings(simulated_trace(ParallelLayout(1, 2, 1), 3, 4), tmp_path / "rings")
    asked = ["--link-speed", "0-1=2", "--link-speed", "pipeline parallel=0.5", "--microbatches", "8", "--order", "1,0"]
    assert main(["whatif", str(rings), "--json", *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["question"] for each in found["answers"]] == [
        "link 0-1 at 2 times its speed", "pipeline parallel at 0.5 times its speed", "order 1,0", "8 microbatches instead of 4",
    ]  # fmt: skip
    assert all(each["step_s"] == pytest.approx(found["step_s"] - each["gain_s"]) for each in found["answers"])
    fast, slow, other, more = (each["gain_s"] for each in found["answers"])
    assert fast > 0 > slow > more
    assert other == pytest.approx(0.0, abs=1e-9)


def test_the_command_predicts_another_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = two_pairs()
    for table, names in ((trace.calls, ("call_ns", "wait_ns", "end_ns")), (trace.marks, ("begin_ns", "end_ns"))):
        for name in names:
            table[name] *= 1_000_000  # milliseconds
    rings = write_rings(replace(trace, hosts=("a",) * 4), tmp_path / "rings")
    assert main(["whatif", str(rings), "--json", "--order", "0,2,1,3", "--order", "1,0,3,2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["question"] for each in found["answers"]] == ["order 0,2,1,3", "order 1,0,3,2"]
    assert [each["step_s"] for each in found["answers"]] == pytest.approx([0.080, 0.115], rel=1e-3)
    for order, text in (("0,1,2", "each of the 4 ranks of the job once"), ("0,1,2,2", "each of the 4 ranks of the job once")):
        assert main(["whatif", str(rings), "--order", order]) == 2
        assert text in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["whatif", str(rings), "--order", "0;1"])
    assert "is not a list of ranks, such as 0,2,1,3" in capsys.readouterr().err


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_slow_place_among_few_ranks_is_slow_by_its_own_measure(count: int) -> None:
    """Rank 0 computes 60 ns, its peers 20 ns, and the ranks of another stage 10 ns. A place of a peer is not fast."""
    own = [60, *[20] * (count - 1), *[10] * count]
    made = [Made(rank, Op.ALL_REDUCE, 0, 1, each, each, 65) for rank, each in enumerate(own)]
    places = [{"pp": rank // count} for rank in range(2 * count)]
    trace = made_trace([TraceGroup("world", tuple(range(2 * count)))], made, [[65]] * (2 * count), places=places)
    order = list(range(2 * count))
    order[0], order[count] = count, 0  # rank 0 runs at the place of a rank of the other stage, which is sound
    assert answers(trace, orders=(tuple(order),)) == pytest.approx([30 + 5])


@pytest.mark.parametrize("asked", [["--link-speed", "0-1=0"], ["--link-speed", "2"], ["--microbatches", "0"]])
def test_wrong_options_are_refused(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["whatif", "rings", *asked])
    assert "is not" in capsys.readouterr().err


def two_pairs() -> Trace:
    """Hosts a (ranks 0, 1) and b (ranks 2, 3). Rank 3 computes 30 ns, the others 10 ns.

    Then the ranks of a host make one transfer of 5 ns, and ranks 0 and 2, and 1 and 3, two transfers of 40 ns.
    """
    groups = [TraceGroup("data parallel", (0, 2)), TraceGroup("data parallel", (1, 3)), TraceGroup("tensor parallel", (0, 1))]
    groups.append(TraceGroup("tensor parallel", (2, 3)))
    made = []
    for rank, own in enumerate((10, 10, 10, 30)):
        tensor = 35 if rank > 1 else 15
        made.append(Made(rank, Op.ALL_REDUCE, 2 + rank // 2, 1, own, own, tensor))
        made.append(Made(rank, Op.ALL_REDUCE, rank % 2, 1, tensor, tensor, 75))
        made.append(Made(rank, Op.ALL_REDUCE, rank % 2, 2, 75, 75, 115))
    return made_trace(groups, made, [[115]] * 4, hosts=["a", "a", "b", "b"])


def test_another_order_moves_groups_to_other_links_and_work_to_other_places() -> None:
    """Where ranks 1 and 2 exchange places, the data parallel groups are on one host and the tensor parallel groups on two.

    The rank at the slow place of rank 3 computes 30 ns, and the transfers take 40, 5 and 5 ns.
    """
    orders = ((0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 2, 0), (1, 0, 3, 2))
    assert answers(two_pairs(), orders=orders) == pytest.approx([115, 80, 80, 115])


def test_a_place_without_transfers_of_this_size_on_as_many_hosts_is_refused() -> None:
    trace = two_pairs()
    trace.calls["bytes"][trace.calls["comm"] < 2] = 16  # the two kinds of groups have other sizes
    with pytest.raises(FormatError, match="no transfer like those of ranks"):
        answers(trace, orders=((0, 2, 1, 3),))


def test_the_slow_place_slows_the_rank_that_takes_it() -> None:
    """Ranks 0 to 3 have 20 ns of work in one stage, place 2 is three times as slow; ranks 4 to 7 have 50 ns in another."""
    groups = [TraceGroup("data parallel", tuple(range(8)))]
    work = (20, 20, 60, 20, 50, 50, 50, 50)
    made = [Made(rank, Op.ALL_REDUCE, 0, 1, own, own, 65) for rank, own in enumerate(work)]
    trace = made_trace(groups, made, [[65]] * 8, places=[{"pp": rank // 4} for rank in range(8)])
    # 60 + 5; the slow place for a rank of the second stage: 150 + 5
    orders = ((2, 1, 0, 3, 4, 5, 6, 7), (0, 1, 4, 3, 2, 5, 6, 7))
    assert answers(trace, orders=orders) == pytest.approx([65, 155])


def test_a_pair_takes_the_time_of_its_new_places() -> None:
    """Three messages of ranks 0 and 1 take 12 ns each, one of ranks 2 and 3 takes 4 ns; a collective of 1 ns follows."""
    made = []
    for rank in range(4):
        pair, each = ((0, 1), 12) if rank < 2 else ((2, 3), 4)
        op = Op.RECEIVE if rank % 2 else Op.SEND
        for at in range(3 if rank < 2 else 1):
            made.append(Made(rank, op, 0, at + 1, 1 + at * each, 1 + at * each, 1 + (at + 1) * each, pair))
        own = 1 + (36 if rank < 2 else 4)
        made.append(Made(rank, Op.ALL_REDUCE, 1, 1, own, own, 38))
    groups = [TraceGroup("pipeline parallel", tuple(range(4))), TraceGroup("world", tuple(range(4)))]
    trace = made_trace(groups, made, [[38]] * 4)
    # the three messages at the fast link: 1 + 3 * 4 + 1; the single one at the slow link: 1 + 12 + 1
    assert answers(trace, orders=((2, 3, 0, 1), (1, 0, 2, 3))) == pytest.approx([14, 38])


def early_senders(*slow_ns: int) -> Trace:
    """Messages of ranks 0 to 1, 2 to 3, ... take ``slow_ns`` until they are received. Senders go on 1 ns after their call."""
    made = []
    for pair, took in enumerate(slow_ns):
        source, target = 2 * pair, 2 * pair + 1
        for seq, at in ((1, 1), (2, 2)):
            made.append(Made(source, Op.SEND, 0, seq, at, at, at + 1, (source, target)))
        for seq in (1, 2):
            begin = 1 + (seq - 1) * took
            made.append(Made(target, Op.RECEIVE, 0, seq, begin, begin, begin + took, (source, target)))
    last = 1 + 2 * max(slow_ns)
    for rank in range(2 * len(slow_ns)):
        own = 3 if rank % 2 == 0 else 1 + 2 * slow_ns[rank // 2]
        made.append(Made(rank, Op.ALL_REDUCE, 1, 1, own, own, last + 1))
    world = tuple(range(2 * len(slow_ns)))
    return made_trace([TraceGroup("pipeline parallel", world), TraceGroup("world", world)], made, [[last + 1]] * len(world))


def test_a_slow_link_whose_senders_do_not_wait_has_its_price() -> None:
    trace = early_senders(4, 4, 12)
    found = analyse(trace, questions=Questions(links=((4, 5),), like_peers=(5,)))
    assert found.replayed_s * 1e9 == pytest.approx(26)
    assert found.by_link == pytest.approx({"0-1": 0, "2-3": 0, "4-5": 16e-9})
    assert [each.step_s * 1e9 for each in found.answers] == pytest.approx([26, 10])  # the rank itself is sound
    assert found.by_rank[5] == 0
    assert found.error_s == pytest.approx(0, abs=1e-12)


def test_a_sender_that_went_on_early_is_not_held_up_by_a_slower_link() -> None:
    trace = early_senders(4, 4)
    graph = graph_of(window_of(trace))
    slower = np.where(operations_of_transfers(graph) == Op.RECEIVE, 3.0, 1.0)[:, None] * graph.transfers.took_ns[:, None]
    own = graph.events.own_ns.astype(np.float64)[:, None]
    assert simulate(graph, schedule_of(graph), own, slower)[:, 0, 0].tolist() == [26.0] * 4
    sender = np.flatnonzero((graph.events.rank == 0) & (graph.events.kind == CALLED))[-1]
    assert graph.events.at_ns[sender] == 3


def test_an_early_sender_needs_a_receiver_that_had_called() -> None:
    """The receiver calls at 9, the sender goes on at 10 and computes 5 ns, the receiver goes on at 11; a collective of 1 ns."""
    made = [
        Made(0, Op.SEND, 0, 1, 1, 1, 10, (0, 1)), Made(1, Op.RECEIVE, 0, 1, 9, 9, 11, (0, 1)),
        Made(0, Op.ALL_REDUCE, 1, 1, 15, 15, 16), Made(1, Op.ALL_REDUCE, 1, 1, 11, 11, 16),
    ]  # fmt: skip
    trace = made_trace([TraceGroup("pipeline parallel", (0, 1)), TraceGroup("world", (0, 1))], made, [[16], [16]])
    assert answers(trace, without_ranks=(1,)) == pytest.approx([8])


def test_an_order_names_each_rank_once() -> None:
    for order in ((0, 1, 2), (0, 1, 2, 2)):
        with pytest.raises(FormatError, match="each of the 4 ranks"):
            answers(two_pairs(), orders=(order,))
