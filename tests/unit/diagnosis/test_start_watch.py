"""Before anything is recorded: ranks that wait in ``init_process_group`` say who has not come there, and where that rank is."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.support.repository import REPO
from unickpt.base.round_folder import HOSTS, ROUND, RUN_ID, STORE
from unickpt.diagnosis import start_watch
from unickpt.diagnosis.host.early_stacks import EARLY, path_of
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.host.stack_dumps import Frame
from unickpt.diagnosis.recording.launched import AbsentRank
from unickpt.diagnosis.reports.start_text import waiting_text
from unickpt.diagnosis.start_watch import Pace, StartNote, StartWatch, call_of
from unickpt.testing.launch import environment

LOADS = (Frame("read", "torch/data.py", 3), Frame("load", "run/train.py", 9, own=True))
ASLEEP = AbsentRank(17, "n1", State.SLEEPING, LOADS)
SINCE = 1_700_000_000_000_000_000


def said(absent: dict[int, AbsentRank], elsewhere: dict[int, str] | None = None, unknown: dict[int, str] | None = None) -> Any:
    return waiting_text("init_process_group", SINCE, [0, 1], absent, elsewhere or {}, unknown or {}, "")


def test_a_rank_that_has_not_come_is_named_with_its_place() -> None:
    text, then = said({2: ASLEEP})
    assert text.startswith("ranks 0, 1 wait since ")
    assert (
        "in init_process_group for rank 2; rank 2 has not come there: process 17 on n1 is sleeping, at run/train.py:9 (load)"
        in text
    )
    assert then.endswith("look at run/train.py:9")


def test_what_is_said_of_processes_that_cannot_tell_where_they_are() -> None:
    text, then = said({2: replace(ASLEEP, state=State.STOPPED, stack=())})
    assert (text.endswith("process 17 on n1 is stopped"), then.startswith("type on n1: kill -CONT 17,")) == (True, True)
    assert said({2: replace(ASLEEP, state=State.STUCK)})[1].startswith("type on n1: cat /proc/17/stack")
    text, _ = said({2: replace(ASLEEP, state=State.UNKNOWN)})
    assert "has not said where it is for some seconds: it is stopped, or in a call" in text
    assert "rank 2 has not come there: no process of it is seen on n1" in said({2: AbsentRank(0, "n1", State.UNKNOWN)})[0]


def test_a_rank_in_another_call_and_ranks_of_which_nothing_is_known() -> None:
    assert "rank 2 waits in broadcast: process 17 on n1 is sleeping, at " in said({2: ASLEEP}, {2: "broadcast"})[0]
    text, then = said({}, {}, {2: "n1", 3: "n1"})
    assert "for ranks 2, 3; n1 has told nothing of ranks 2, 3" in text
    assert then == "look at the log of the launcher on n1"
    text, then = said({}, {}, {2: ""})
    assert text.endswith("for rank 2; no host has told of rank 2")
    assert "launcher of rank 2" in then
    text, _ = waiting_text("init_process_group", SINCE, [1], {}, {}, {0: ""}, "n0:29500")
    assert "nothing listens at n0:29500, where rank 0 opens the store of the job" in text


def test_the_outermost_call_of_torch_is_found_in_a_stack() -> None:
    names: dict[str, Callable[[Any], Any]] = {}
    source = "def barrier(inner): return inner()\ndef wrapper(inner): return inner()\ndef _rendezvous(inner): return inner()"
    exec(compile(source, f"/any/{start_watch.C10D}", "exec"), names)

    def here() -> str:
        return call_of(sys._getframe())[0]

    assert here() == ""
    assert names["barrier"](here) == "barrier"
    assert names["wrapper"](lambda: names["barrier"](lambda: names["_rendezvous"](here))) == "barrier"


def test_a_note_travels_and_one_that_is_none_is_dropped() -> None:
    note = StartNote("n1", 17, 2, "barrier #1", 5, 7, State.STUCK, LOADS)
    assert StartNote.of(note.text()) == note
    assert StartNote.of(replace(note, waits="x" * 20_000).text()) is None
    for text in (b"", b"[]", b'{"host": "n1"}', note.text().replace(b'"in uninterruptible sleep"', b'"odd"')):
        assert StartNote.of(text) is None


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[TCPStore]:
    """The store of a round of two hosts, with two ranks each."""
    made = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setenv(STORE, f"127.0.0.1:{made.port}")
    monkeypatch.setenv(RUN_ID, "job")
    monkeypatch.setenv(ROUND, "1.1")
    made.set(HOSTS, '["n0", "n1"]')
    return made


def watch(rank: int, waits: str = "", stack: tuple[Frame, ...] = ()) -> StartWatch:
    """The watch of a rank, which has told of itself."""
    made = StartWatch(rank, 4, rank - rank % 2, 2)
    assert made._connected()
    made._note = StartNote("machine", 100 + rank, rank - rank % 2, waits, SINCE, 1, State.SLEEPING, stack)
    made._store.set(made._key(start_watch.TOLD, rank), made._note.text())
    return made


def test_one_rank_says_it_for_all(store: TCPStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("unickpt"), "propagate", True)
    waiting = [watch(rank, "init_process_group") for rank in (0, 1)]
    before = StartNote("machine", 102, state=State.RUNNING)  # from outside, before it has told of itself
    store.set(watch(2, stack=LOADS)._key(start_watch.SEEN, 2), before.text())
    with caplog.at_level("INFO", "unickpt"):
        waiting[0]._speak(11.0)
        assert not caplog.messages, "rank 2 may be stopped, and has not told again yet"
        for one in reversed(waiting):
            one._speak(12.0)
        assert [each for each in caplog.messages if "wait since" in each] == [caplog.messages[0]]
        waiting[0]._speak(13.0)
    first, then = caplog.messages
    assert "ranks 0, 1 wait since " in first
    assert (
        "rank 2 has not come there: process 102 on n1 is sleeping, at run/train.py:9 (load); n1 has told nothing of rank 3"
        in first
    )
    text = "next: it may still load data or weights, download or compile; if it stays so, look at run/train.py:9"
    assert then.removeprefix("unickpt: ") == text  # the formats of other handlers decide about the name


def test_nothing_is_said_at_once_nor_if_all_have_come(
    store: TCPStore,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("unickpt"), "propagate", True)
    one = watch(0, "barrier #1")
    one._speak(9.0)
    for rank in (1, 2, 3):
        watch(rank, "barrier #1")
    one._speak(13.0)
    assert not caplog.messages


def test_a_rank_that_tells_nothing_new_is_silent(
    store: TCPStore,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("unickpt"), "propagate", True)
    monkeypatch.setattr(start_watch, "SILENT_S", -1.0)  # and so at once
    one = watch(0, "barrier #1")
    watch(1, "barrier #1")
    watch(2, stack=LOADS)
    one._speak(7.0)
    one._speak(11.0)
    assert "rank 2 has not come there: process 102 on n1 has not said where it is for some seconds" in caplog.messages[0]


def test_a_rank_tells_at_once_what_is_new_and_more_seldom_what_is_not() -> None:
    pace = Pace()
    told = {at: every for at in range(40) if (every := pace.due("loads" if at < 30 else "compiles", float(at)))}
    assert told == {0: 1.0, 1: 2.0, 3: 4.0, 7: 5.0, 12: 5.0, 17: 5.0, 22: 5.0, 27: 5.0, 30: 1.0, 31: 2.0, 33: 4.0, 37: 5.0}


@pytest.mark.parametrize("stops_at", [*range(0, 40, 3), 1000])
@pytest.mark.parametrize("asked_at", range(0, 40, 3))
def test_it_is_certain_within_twelve_seconds_whether_a_rank_is_stopped(stops_at: int, asked_at: int) -> None:
    """A rank that does not stop is never taken for stopped, and has told again by then."""
    one, pace, note = StartWatch(0, 2, 0, 2), Pace(), StartNote("n1", 17, looks=0)
    begun_s = asked_at - start_watch.KNOWN_S
    for now in range(asked_at + 30):
        if now < stops_at and (every_s := pace.due("loads", float(now))):
            note = replace(note, looks=note.looks + 1, every_s=every_s)
        if now >= asked_at:
            silent = one._silent({1: note}, now + 0.5)
            late = now + 0.5 - begun_s >= start_watch.CERTAIN_S
            assert not silent or stops_at < now
            assert not late or silent or one._news[1].again
            assert silent or stops_at > now - 10 or now < asked_at + 10


def test_who_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[StartWatch] = []
    monkeypatch.setattr(StartWatch, "begin", lambda self: begun.append(self))
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    for worker in ("", f"agent/{os.getpid()}.1", "agent/1.1"):  # the last one was started by the worker
        monkeypatch.setenv("UNICKPT_WORKER", worker)
        start_watch.begin()
    monkeypatch.setenv("UNICKPT_WORKER", "")
    monkeypatch.setenv("WORLD_SIZE", "1")
    start_watch.begin()
    monkeypatch.delenv("RANK")
    start_watch.begin()
    assert [(one._rank, one._first, one._count) for one in begun] == [(5, 4, 4)] * 2


def test_a_watch_ends_when_the_process_records(monkeypatch: pytest.MonkeyPatch) -> None:
    one = StartWatch(0, 2, 0, 2)
    assert not one._is_over()
    monkeypatch.setattr(EARLY, "records", True)
    assert one._is_over()


def test_a_neighbour_that_has_told_nothing_is_seen_from_outside(tmp_path: Path, store: TCPStore) -> None:
    """A process with the variables of rank 1, started by the parent of this one's watch."""
    program = tmp_path / "train.py"
    program.write_text("import torch, time\nprint('loads', flush=True)\ntime.sleep(100)\n")
    variables = environment(RANK="1", UNICKPT_TIMING="1", UNICKPT_AUTOLOAD="1")
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, cwd=REPO, env=variables) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loads\n"
        deadline = time.monotonic() + 10
        while not path_of(process.pid).is_file() and time.monotonic() < deadline:
            time.sleep(0.05)
        one = watch(0, "barrier #1")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "getppid", os.getpid)
            seen = one._neighbours({0, 2, 3})
        process.kill()
    assert {rank: (note.pid, note.host, note.state) for rank, note in seen.items()} == {
        1: (process.pid, socket.gethostname(), State.SLEEPING)
    }
    assert seen[1].stack[0].line == 3


def test_ranks_ask_all_others_in_turn_until_one_has_said_who_is_missing() -> None:
    """Each costs the store a request for each rank, and thousands of ranks may wait."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watches = {rank: StartWatch(rank, 4096, rank // 8 * 8, 8) for rank in (0, 10, 4000)}
    for watch in watches.values():
        watch._store, watch._note = store, replace(watch._note, waits="init_process_group")
    assert [rank for rank, watch in watches.items() if watch._asks(start_watch.SAID_S - 0.1)] == [0]
    assert watches[10]._asks(12.0)
    assert list(watches[10]._host_ranks()) == list(range(8, 16))
    watches[0]._store.set(watches[0]._key(start_watch.SAID, 0), b"init_process_group")
    assert not watches[10]._asks(12.0)
    watches[10]._note = replace(watches[10]._note, waits="broadcast")
    assert watches[10]._asks(12.0)
    watches[0]._said_s = time.monotonic() - 60
    assert not watches[0]._asks(70.0)
