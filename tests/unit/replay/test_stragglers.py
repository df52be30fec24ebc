"""Traces in the format of ByteDance's straggler analysis: a handmade job of two stages, two replicas and two microbatches."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unickpt.base.errors import FormatError
from unickpt.base.installation import extra_command
from unickpt.cli.main import main
from unickpt.planning.replay.operations import graph_of_operations
from unickpt.planning.replay.parquet_traces import Columns, operations_of_columns, sizes_of
from unickpt.planning.replay.stragglers import Stragglers, find_stragglers

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

STEPS = (4, 5, 9)
TOOK_S = {
    "params-all-gather": 0.5, "forward-compute": 1.0, "backward-compute": 2.0, "forward-send": 0.125, "forward-recv": 0.125,
    "backward-send": 0.125, "backward-recv": 0.125, "gc": 0.0, "layernorm-grads-all-reduce": 0.0,
    "embedding-grads-all-reduce": 0.25, "grads-reduce-scatter": 0.375, "optimizer-clip-main-grad": 0.125, "optimizer": 0.0625,
    "separate-grads-all-reduce": 0.03125,
}  # fmt: skip
REST = "separate-grads-all-reduce"
END = (
    "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "grads-reduce-scatter", "optimizer-clip-main-grad", "optimizer",
)  # fmt: skip
# Order of the computations of each stage: two forward ones first in stage 0, then in turn.
PROGRAM = ((("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)),
           (("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)))  # fmt: skip
Name = tuple[int, int, str, int]  # replica, stage, kind, number
Took = Callable[[int, Name], float]


def usual(_step: int, name: Name) -> float:
    return TOOK_S[name[2]]


def slow(factors: dict[tuple[int, int], float], others: float = 1.0) -> Took:
    """Return durations with computation of some workers, by replica and stage, slower."""

    def took(_step: int, name: Name) -> float:
        factor = factors.get(name[:2], others) if name[2].endswith("compute") else 1.0
        return TOOK_S[name[2]] * factor

    return took


class Step:
    """Times of one step: each operation begins when what it needs has ended."""

    def __init__(self, number: int, took: Took, overlapped: bool = False) -> None:
        self.number, self.took, self.overlapped = number, took, overlapped
        self.begins: dict[Name, float] = {}
        self.ends: dict[Name, float] = {}

    def end(self, *name: Any) -> float:
        replica, stage, kind, number = name
        found: Name = (replica, stage, kind, number)
        if found not in self.ends:
            self.ends[found] = max(self.begin(each) for each in self.members(found)) + self.took(self.number, found)
        return self.ends[found]

    def begin(self, name: Name) -> float:
        if name not in self.begins:
            self.begins[name] = max((self.end(*each) for each in self.needs(name)), default=0.0)
        return self.begins[name]

    def members(self, name: Name) -> list[Name]:
        replica, stage, kind, number = name
        if kind in ("params-all-gather", "grads-reduce-scatter", REST):
            return [(each, stage, kind, number) for each in (0, 1)]
        if kind == "optimizer-clip-main-grad":
            return [(each, at, kind, number) for each in (0, 1) for at in (0, 1)]
        if kind == "embedding-grads-all-reduce":
            return [(replica, at, kind, number) for at in (0, 1)]
        if kind.endswith(("send", "recv")):
            other = kind.replace("send", "recv") if kind.endswith("send") else kind.replace("recv", "send")
            return [name, (replica, 1 - stage, other, number)]
        return [name]

    def needs(self, name: Name) -> list[Name]:
        replica, stage, kind, number = name
        program = PROGRAM[stage]
        before_end = (replica, stage, "gc", 0)
        if kind == "params-all-gather":
            return []
        if kind.endswith("compute"):
            direction = kind.removesuffix("-compute")
            at = program.index((direction, number))
            found = [(replica, stage, f"{program[at - 1][0]}-compute", program[at - 1][1])] if at else []
            if at == 0:
                found.append((replica, stage, "params-all-gather", 0))
            if (direction == "forward") == (stage == 1):
                found.append((replica, stage, f"{direction}-recv", number))
            return found
        if kind.endswith("send"):
            return [(replica, stage, kind.replace("send", "compute"), number)]
        if kind.endswith("recv"):
            if number:
                return [(replica, stage, kind.replace("recv", "compute"), number - 1)]
            return (
                [(0, 0, "forward-compute", 0)][:0] if kind.startswith("forward") else [(replica, stage, "forward-compute", 0)]
            )
        if kind == "gc":
            return [(replica, stage, "backward-compute", 1)]
        if self.overlapped and kind == "grads-reduce-scatter":
            return [(replica, stage, "backward-compute", 1)]
        program_end = self.program_end()
        at = program_end.index(kind)
        if at:
            return [(replica, stage, program_end[at - 1], 0)]
        return [before_end, (replica, stage, "grads-reduce-scatter", 0)] if self.overlapped else [before_end]

    def program_end(self) -> tuple[str, ...]:
        """Return the end of the step. Overlapped gradients have the rest of them in it."""
        return tuple(REST if kind == "grads-reduce-scatter" else kind for kind in END) if self.overlapped else END


def step_s(took: Took, overlapped: bool = False) -> float:
    step = Step(STEPS[0], took, overlapped)
    return max(step.end(replica, stage, "optimizer", 0) for replica in (0, 1) for stage in (0, 1))


def trace(took: Took, overlapped: bool = False) -> dict[str, list[Any]]:
    """Return the columns of a trace."""
    rows = []
    for number in STEPS:
        step = Step(number, took, overlapped)
        for replica in (0, 1):
            for stage in (0, 1):
                sent, received = ("forward", "backward") if stage == 0 else ("backward", "forward")
                names = [(f"{direction}-compute", at) for direction, at in PROGRAM[stage]]
                names += [(f"{sent}-send", at) for at in (0, 1)] + [(f"{received}-recv", at) for at in (0, 1)]
                names += [("params-all-gather", 0), ("gc", 0), *((kind, 0) for kind in step.program_end())]
                names += [("grads-reduce-scatter", 0)] * overlapped
                for kind, at in names:
                    end = step.end(replica, stage, kind, at)
                    begin = step.begin((replica, stage, kind, at))
                    rows.append((replica, stage, 10 * replica + stage, number, kind, begin, end - begin, at, 0, 0, stage))
    keys = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id", "gmc")
    return {key: list(column) for key, column in zip(keys, zip(*rows, strict=True), strict=True)}


def columns(took: Took, overlapped: bool = False) -> Columns:
    return {key: np.array(values) for key, values in trace(took, overlapped).items()}


def analysed(took: Took) -> Stragglers:
    return find_stragglers(operations_of_columns(columns(took), {"dp_size": 2, "pp_size": 2}))


def test_a_step_of_this_job_takes_what_a_hand_computes() -> None:
    # parameters, forward, message, stage 1: forward, backward, forward, backward, message, backward of stage 0, end
    assert step_s(usual) == 0.5 + 1 + 0.125 + (1 + 2 + 1 + 2) + 0.125 + 2 + 0.25 + 0.375 + 0.125 + 0.0625


def test_a_sound_job_is_replayed_exactly_and_has_no_slowdown() -> None:
    found = analysed(usual)
    assert found.step_s == pytest.approx(step_s(usual), rel=1e-12)
    assert found.replayed_s == pytest.approx(step_s(usual), rel=1e-9)
    assert found.slowdown == pytest.approx(1, rel=1e-9)
    assert set(found.by_rank) == {0, 1, 10, 11}
    assert max(found.by_kind.values()) == pytest.approx(1, rel=1e-9)
    assert found.steps == STEPS


def test_gradients_that_are_reduced_beside_the_backward_pass() -> None:
    took = slow({(0, 0): 1.5})
    found = find_stragglers(operations_of_columns(columns(took, overlapped=True), {}))
    assert found.replayed_s == pytest.approx(step_s(took, overlapped=True), rel=1e-9)
    ideal = step_s(slow({}, 1.125), overlapped=True)
    assert found.ideal_s == pytest.approx(ideal, rel=1e-9)
    assert ideal == pytest.approx(step_s(slow({}, 1.125)) + TOOK_S[REST], rel=1e-12)


def test_waits_for_others_are_no_part_of_a_transfer() -> None:
    found = operations_of_columns(columns(slow({(0, 1): 2.0})), {})
    took = graph_of_operations(found).without_waits(found)
    for at, kind in enumerate(found.kind):
        if not kind.endswith("compute"):
            assert took[at] == pytest.approx(TOOK_S[kind], abs=1e-9)


def test_the_slowdown_by_a_slow_worker_and_what_it_explains() -> None:
    found = analysed(slow({(0, 1): 2.0}))
    whole, ideal = step_s(slow({(0, 1): 2.0})), step_s(slow({}, 1.25))  # the mean of four workers
    assert found.replayed_s == pytest.approx(whole, rel=1e-9)
    assert found.ideal_s == pytest.approx(ideal, rel=1e-9)
    assert found.slowdown == pytest.approx(whole / ideal, rel=1e-9)
    assert found.by_step == pytest.approx(dict.fromkeys(STEPS, whole / ideal), rel=1e-9)
    stage = step_s(slow({(0, 1): 2.0, (1, 1): 1.0}, 1.25)) / ideal
    replica = step_s(slow({(0, 1): 2.0, (0, 0): 1.0}, 1.25)) / ideal
    assert found.by_stage[1] == pytest.approx(stage, rel=1e-9)
    assert found.by_replica[0] == pytest.approx(replica, rel=1e-9)
    assert found.by_rank[1] == pytest.approx(min(stage, replica), rel=1e-9)
    assert found.by_kind["optimizer"] == pytest.approx(1, rel=1e-9)
    assert found.worst_ranks == (1,)
    without = step_s(slow({(0, 1): 1.25}))
    alone = step_s(slow({(0, 1): 2.0}, 1.25))
    assert found.worst.removed == pytest.approx((whole - without) / (whole - ideal), rel=1e-6)
    assert found.worst.added == pytest.approx((alone - ideal) / (whole - ideal), rel=1e-6)
    last = step_s(slow({(0, 1): 1.25, (1, 1): 1.25}))
    assert found.last_stage.removed == pytest.approx((whole - last) / (whole - ideal), rel=1e-6)


def test_one_slow_message_does_not_change_the_ideal() -> None:
    def took(step: int, name: Name) -> float:
        return 3.0 if (step, *name[1:]) in ((5, 0, "forward-send", 0), (5, 1, "forward-recv", 0)) else usual(step, name)

    found = analysed(took)
    assert found.ideal_s == pytest.approx(step_s(usual), rel=1e-9)
    assert found.by_step[5] == pytest.approx((step_s(usual) + 3.0 - 0.125) / step_s(usual), rel=1e-9)
    assert found.by_step[4] == pytest.approx(1, rel=1e-9)
    assert found.by_kind["forward messages"] == pytest.approx(found.slowdown, rel=1e-9)
    assert found.by_kind["forward-compute"] == pytest.approx(1, rel=1e-9)


def test_messages_that_nobody_sent_are_left_alone() -> None:
    """The recorder also writes some that were never started: here stage 0 receives before its first computation ends."""
    table = trace(usual)
    for number in STEPS:
        for replica in (0, 1):
            row = (replica, 0, 10 * replica, number, "forward-recv", 11.0, 0.0, 0, 0, 0, 0)
            for column, value in zip(table.values(), row, strict=True):
                column.append(value)
    found = find_stragglers(operations_of_columns({key: np.array(values) for key, values in table.items()}, {}))
    assert found.replayed_s == pytest.approx(step_s(usual), rel=1e-9)


def test_chosen_steps() -> None:
    found = operations_of_columns(columns(usual), {}, (5, 9))
    assert found.steps.tolist() == [5, 9]
    with pytest.raises(FormatError, match="no steps from 6 to 8"):
        operations_of_columns(columns(usual), {}, (6, 8))


def test_traces_that_cannot_be_analysed_say_why() -> None:
    table = trace(usual)
    for column in table.values():
        column.pop()
    short = {key: np.array(values) for key, values in table.items()}
    with pytest.raises(FormatError, match="step 9 has 0 operations optimizer number 0 of replica 1 in stage 1"):
        operations_of_columns(short, {})
    with pytest.raises(FormatError, match="pp_size is 4 in the description of the job, and 2 in the trace"):
        operations_of_columns(columns(usual), {"pp_size": 4})
    other = dict(columns(usual))
    other["optype"] = np.where(other["optype"] == "gc", "coffee", other["optype"])
    with pytest.raises(FormatError, match="unknown operations coffee"):
        operations_of_columns(other, {})
    deaf = {key: values[columns(usual)["optype"] != "backward-recv"] for key, values in columns(usual).items()}
    with pytest.raises(FormatError, match="stage 1 sends 2 messages backward, and 0 are received"):
        graph_of_operations(operations_of_columns(deaf, {}))
    with pytest.raises(FormatError, match="pp_size is '0'"):
        sizes_of("trial_name: AR\npp_size: 0\n")


def test_the_command_reads_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, meta = tmp_path / "trace.parquet", tmp_path / "meta.yaml"
    table = arrow.table(trace(slow({(0, 1): 2.0})))
    kinds = table["optype"].dictionary_encode()
    parquet.write_table(table.set_column(4, "optype", kinds), file)
    meta.write_text("trial_name: handmade\ndp_size: 2\npp_size: 2\ndsp_size: 1\n")
    assert main(["whatif", str(file), "--meta", str(meta), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["slowdown"] == pytest.approx(step_s(slow({(0, 1): 2.0})) / step_s(slow({}, 1.25)), rel=1e-9)
    assert found["worst_ranks"] == [1]
    assert main(["whatif", str(file)]) == 0
    said = capsys.readouterr().out
    assert "slowdown 1.293" in said
    assert "the worst workers (1)" in said
    assert main(["whatif", str(file), "--order", "1,0"]) == 2
    assert "--order cannot be predicted" in capsys.readouterr().err
    assert main(["whatif", str(file), str(file)]) == 2
    capsys.readouterr()
    parquet.write_table(table.drop_columns(["gmc"]), file)
    assert main(["whatif", str(file)]) == 2
    assert "no columns gmc" in capsys.readouterr().err
    file.write_text("no trace")
    assert main(["whatif", str(file)]) == 2
    assert "not a Parquet file" in capsys.readouterr().err


def test_without_pyarrow_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["whatif", str(tmp_path / "trace.parquet")]) == 2
    assert extra_command("traces") in capsys.readouterr().err
