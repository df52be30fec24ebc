"""The extension records a call as the code in Python does, and leaves to it what it does not know."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unickpt.diagnosis.recording import fast_path
from unickpt.diagnosis.recording.process_group_hooks import _METHODS
from unickpt.diagnosis.recording.recorder import DTYPE_CODES, CallRecorder
from unickpt.diagnosis.recording.records import Flag
from unickpt.diagnosis.recording.ring import Identity, RingReader, RingWriter

RANKS = (4, 7, 9)  # global ranks of the members


class Group:
    """Stands where a process group stands as the first argument of a method. Nothing is asked of it but its name."""

    group_name = "three"


class Work:
    def is_completed(self) -> bool:
        return False


class Options(dist.AllreduceOptions):
    rootRank = 0  # noqa: N815  (torch's name)


def options(**values: Any) -> Options:
    found = Options()
    for name, value in values.items():
        setattr(found, name, value)
    return found


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[CallRecorder]:
    assert fast_path.available(), "install with a compiler: pip install --editable ."
    ring = RingWriter(tmp_path / "rings" / "00007.ring", Identity.here(7, 10, "fast"), capacity=64)
    found = CallRecorder(ring, lambda _group: {"ranks": RANKS, "label": "", "backend": "gloo"})
    found.state.blocked = found.state.waits_blocked = 0
    yield found
    found.close()


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("not recorded by the extension")


def records(recorder: CallRecorder) -> list[dict[str, int]]:
    found = RingReader(recorder.ring.path).read().records
    return [{name: int(record[name]) for name in found.dtype.names} for record in found]


X, WIDE = torch.ones(6), torch.ones(3, 6, dtype=torch.bfloat16)
CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "all_reduce": ("allreduce", ([X], options())),
    "all_reduce, async": ("allreduce", ([WIDE], options(asyncOp=True))),
    "all_reduce of complex numbers": ("allreduce", ([torch.ones(2, dtype=torch.complex64)], options())),
    "all_reduce of a type that records do not have": ("allreduce", ([torch.ones(2, dtype=torch.complex128)], options())),
    "broadcast": ("broadcast", ([X], options(rootRank=2))),
    "reduce": ("reduce", ([X], options(rootRank=1))),
    "all_gather": ("_allgather_base", (WIDE, X, options())),
    "reduce_scatter": ("_reduce_scatter_base", (X, WIDE, options(asyncOp=True))),
    "all_to_all": ("alltoall_base", (X, WIDE, [], [], options())),
    "send": ("send", ([X], 2, 17)),
    "recv": ("recv", ([WIDE], 0, -3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_the_same_record_in_c_and_in_python(name: str, recorder: CallRecorder) -> None:
    method, arguments = CALLS[name]
    group: Any = Group()
    recorder.state.step, recorder.state.phase = 12, 3
    number = recorder.call(group, _METHODS[method](*arguments))
    done = Work()
    made = fast_path.method(recorder.state, method, lambda *_: done, refused)
    assert made(group, *arguments) is done
    python, c = records(recorder)
    assert (c["begun"], c["written"]) == (2, 2)
    assert c["seq"] == python["seq"] + 1
    assert c["call_ns"] >= python["call_ns"] > 0
    assert (c["wait_ns"] == c["call_ns"]) == (python["wait_ns"] == python["call_ns"])
    changing = ("begun", "written", "seq", "call_ns", "wait_ns")
    assert {k: v for k, v in c.items() if k not in changing} == {k: v for k, v in python.items() if k not in changing}
    assert recorder.state.pending[id(done)] == (done, 2, c["flags"])
    assert number == 1


def test_a_backward_pass_is_seen(recorder: CallRecorder) -> None:
    group = Group()
    made = fast_path.method(recorder.state, "allreduce", lambda *_: None, refused)
    recorder._communicator(group)

    class Reducing(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, gradient: Any) -> Any:
            made(group, [gradient], options())
            return gradient

    made(group, [X], options())
    Reducing.apply(torch.ones(2, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
    assert [record["phase"] for record in records(recorder)] == [0, 2]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ([X],),
        ([X, X], options()),
        ([], options()),
        (X, options()),
        ([X], None),
        ([3], options()),
        ([[X]], options()),
        ([X], options(), "more"),
    ],
    ids=lambda found: str(len(found)),
)
def test_unusual_arguments_go_to_python_and_leave_no_record(arguments: tuple[Any, ...], recorder: CallRecorder) -> None:
    group = Group()
    recorder._communicator(group)
    made = fast_path.method(recorder.state, "allreduce", refused, lambda *given, **named: (given, named))
    assert made(group, *arguments) == ((group, *arguments), {})
    assert records(recorder) == []
    assert made(group, tensors=[X]) == ((group,), {"tensors": [X]})
    assert recorder.state.last == 0
    assert next(recorder._of_group[id(group)].sequence) == 1


def test_unknown_groups_ranks_and_blocked_recorders_go_to_python(recorder: CallRecorder) -> None:
    group = Group()
    send = fast_path.method(recorder.state, "send", refused, lambda *_: "python")
    assert send(group, [X], 1, 0) == "python"
    recorder._communicator(group)
    assert send(group, [X], 3, 0) == "python"  # of three ranks
    assert send(group, [X], 1 << 40, 0) == "python"
    recorder.state.blocked += 1
    assert send(group, [X], 1, 0) == "python"
    assert recorder.state.last == 0
    assert fast_path.method(recorder.state, "barrier", refused, send) is send


def test_an_error_of_the_call_is_raised_and_recorded(recorder: CallRecorder) -> None:
    group = Group()
    recorder._communicator(group)

    def raising(*_: Any) -> None:
        raise KeyError("torch's")

    with pytest.raises(KeyError, match="torch's"):
        fast_path.method(recorder.state, "allreduce", raising, refused)(group, [X], options())
    work = Work()
    fast_path.method(recorder.state, "allreduce", lambda *_: work, refused)(group, [X], options())
    with pytest.raises(KeyError, match="torch's"):
        fast_path.wait_method(recorder.state, raising, refused)(work)
    assert [(record["flags"], record["end_ns"]) for record in records(recorder)] == [(int(Flag.FAILED), 0)] * 2
    assert recorder.state.pending == {}


def test_waits_are_recorded(recorder: CallRecorder) -> None:
    group, works = Group(), [Work() for _ in range(3)]
    recorder._communicator(group)
    given = iter(works)
    made = fast_path.method(recorder.state, "allreduce", lambda *_: next(given), refused)
    for asynchronous in (False, True):
        made(group, [X], options(asyncOp=asynchronous))
    wait = fast_path.wait_method(recorder.state, lambda *given: given, lambda *given: ("python", *given))
    assert wait(works[0]) == (works[0],)
    assert wait(works[1], 5) == (works[1], 5)
    assert wait(works[2]) == (works[2],)  # not of a recorded call
    sync, later = records(recorder)
    assert sync["wait_ns"] == sync["call_ns"] < sync["end_ns"]
    assert later["call_ns"] < later["wait_ns"] <= later["end_ns"]
    recorder.state.pending[id(works[2])] = works[2], (1, 2), 1
    assert wait(works[2]) == ("python", works[2])
    assert list(recorder.state.pending) == [id(works[2])]


def test_many_works_are_waited_for_in_any_order(recorder: CallRecorder) -> None:
    group, works = Group(), [Work() for _ in range(40)]
    recorder._communicator(group)
    given = iter(works)
    made = fast_path.method(recorder.state, "allreduce", lambda *_: next(given), refused)
    wait = fast_path.wait_method(recorder.state, lambda *_: True, refused)
    for _ in works:
        made(group, [X], options(asyncOp=True))
    for work in works[30:] + works[:20:-1]:
        wait(work)
    assert set(recorder.state.pending) == {id(work) for work in works[:21]}
    for work in works[10:21]:
        assert recorder.waits(work) == works.index(work) + 1
    for work in works[:10]:
        wait(work)
        wait(work)  # again, which is not recorded
    assert recorder.state.pending == {}
    waited = [bool(record["wait_ns"] and record["end_ns"]) for record in records(recorder)]
    assert waited == [not 10 <= at < 21 for at in range(40)]


def test_a_group_that_is_gone_is_not_recorded_any_more(recorder: CallRecorder) -> None:
    groups = [Group() for _ in range(20)]
    made = fast_path.method(recorder.state, "allreduce", lambda *_: None, lambda *_: "python")
    for group in groups:
        recorder._communicator(group)
        assert made(group, [X], options()) is None
    for group in groups[::2]:
        recorder._forget_group(id(group))
    recorder._forget_group(0)
    assert [made(group, [X], options()) for group in groups] == ["python", None] * 10


def test_a_record_that_was_reused_is_not_written(recorder: CallRecorder) -> None:
    group, work = Group(), Work()
    recorder._communicator(group)
    fast_path.method(recorder.state, "allreduce", lambda *_: work, refused)(group, [X], options())
    done = fast_path.method(recorder.state, "allreduce", lambda *_: None, refused)
    for _ in range(64):
        done(group, [X], options())
    before = records(recorder)
    fast_path.wait_method(recorder.state, lambda *_: True, refused)(work)
    assert records(recorder) == before
    assert [record["begun"] for record in before] == list(range(2, 66))


def test_methods_bind_like_functions(recorder: CallRecorder) -> None:
    made: Any = fast_path.method(recorder.state, "allreduce", refused, lambda *given: given)
    made.__name__ = made.__qualname__ = "allreduce"
    owner = type("Owner", (), {"allreduce": made})
    one: Any = owner()
    assert owner.allreduce is made  # type: ignore[attr-defined]
    assert one.allreduce(1) == (one, 1)
    kept = one.allreduce
    assert kept(2) == (one, 2)
    assert (kept.__name__, kept.__self__) == ("allreduce", one)


def test_no_memory_is_lost(recorder: CallRecorder) -> None:
    group, again = Group(), itertools.repeat(Work())
    recorder._communicator(group)
    made = fast_path.method(recorder.state, "allreduce", lambda *_: next(again), lambda *_: None)
    sends = fast_path.method(recorder.state, "send", lambda *_: None, lambda *_: None)
    wait = fast_path.wait_method(recorder.state, lambda *_: True, refused)
    unusual, usual = options(rootRank="x"), options(asyncOp=True)
    broadcast = fast_path.method(recorder.state, "broadcast", refused, lambda *_: None)

    def work() -> None:
        for _ in range(2000):
            wait(made(group, [X], usual))
            sends(group, [X], 1, 3)
            broadcast(group, [X], unusual)

    work()
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    work()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 10_000
    assert DTYPE_CODES[torch.float32]
