"""A disk that does not answer, and SIGTERM while a save is under way."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.jobs.faults import ranks
from tests.jobs.faults.calls import CHANGING, Call, watched
from tests.jobs.faults.ranks import KEEP
from tests.jobs.faults.state import copied, resume
from tests.jobs.faults.tally import Tally, spread
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions, SaveRequest
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.save.shards import Contribution

STALLS = ("pwrite", "fsync", "replace", "open", "close", "unlink")  # the calls that do not return

KINDS = {"SIGTERM": "the process ends by SIGTERM after its grace", "end": "the process ends by itself after its grace"}


class Stall:
    """Calls of this name in another thread than training's do not return until the gate is opened.

    The thread of a file (``DirectSink``) is let through, as training may wait for it; the background thread makes calls too.
    After two minutes the disk answers in any case, so that a test that waits for it fails and does not hang.

    Attributes:
        gate: set it, and the disk answers.
        met: a call has stalled.
        warned: a warning with the words given to ``open_on_warning`` was heard.
    """

    def __init__(self, name: str = "pwrite") -> None:
        self.name, self.gate, self.met, self.warned = name, threading.Event(), threading.Event(), threading.Event()

    def __call__(self, call: Call) -> None:
        thread = threading.current_thread()
        trains = thread is threading.main_thread() or thread.name == "unickpt-write"
        if call.name == self.name and not call.after and not trains:
            self.met.set()
            self.gate.wait(2 * ranks.HANG_S)

    def open_on_warning(self, words: str) -> Stall:
        """The disk answers once the package has said something: so a test knows that it was waiting."""

        def emit(record: logging.LogRecord) -> None:
            if words in record.getMessage():
                self.warned.set()
                self.gate.set()

        handler = logging.Handler()
        handler.emit = emit  # type: ignore[method-assign]
        logging.getLogger("unickpt").addHandler(handler)
        return self


def stalls(folder: Path, count: int, seed: int) -> list[Tally]:
    """Training goes on, the next save does what ``on_busy`` says, and the end of the process is bounded."""
    tally = Tally(
        "stalled disk",
        f"one call ({', '.join(STALLS)}) blocks; training makes 1,000 steps and begins the next save (`wait`, `skip`, "
        "`queue`), and then the disk answers; or the disk never answers, and the process gets SIGTERM or exits, with "
        "`grace_seconds` of 0.3",
    )
    base = ranks.sound(folder / "base")
    cases = itertools.product(("wait", "skip", "queue", "SIGTERM", "end"), STALLS)
    for what, name in itertools.islice(itertools.cycle(cases), count):
        work = copied(base, folder / "work")
        word = folder / "word"
        word.unlink(missing_ok=True)
        child = ranks.fork(lambda: _stalled(work, name, what, word))  # noqa: B023
        if what == "SIGTERM":
            _until(word.exists)
            os.kill(child, signal.SIGTERM)
        status = ranks.ended(child)
        where = f"{what}, {name} does not return"
        if status != (-signal.SIGTERM if what == "SIGTERM" else 0):
            tally.deaths.append(f"{where}: ended with {status}")
            continue
        found = resume(work)
        if found.wrong:
            tally.wrong.append(f"{where}: {found}")
        expected = {"wait": {4}, "skip": {3}, "queue": {4}}.get(what, {2, 3})  # 3: stalled after the commit
        if found.step not in expected:
            tally.lost.append(f"{where}: {found}")
        kind = f"the process ends within `grace_seconds`, {'on SIGTERM' if what == 'SIGTERM' else 'at its exit'}"
        tally.outcomes[
            kind if what in ("SIGTERM", "end") else f"training continues, `on_busy` '{what}' is applied, saves end as expected"
        ] += 1
    return [tally]


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + ranks.HANG_S
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.002)


def _stalled(folder: Path, name: str, what: str, word: Path) -> None:
    stall = Stall(name)
    policy = what if what in ("wait", "skip", "queue") else "wait"
    saver = Saver(SaveOptions(asynchronous=True, on_busy=policy, grace_s=0.3, retention=KEEP))
    exchange = ranks.alone()
    exchange.notice_s = 0.01
    with watched(folder, stall, (name,)):
        first = saver.save(ranks.request(folder, "best", 3, exchange), exchange)
        assert stall.met.wait(ranks.HANG_S), f"no {name}"
        for step in range(1000):
            assert not first.done, step
        ranks.write_word(word, "stalled")
        if what == "SIGTERM":
            time.sleep(ranks.HANG_S)
        if what == "end":
            shutdown.WRITING_S = 0.3
            shutdown.finish_all()  # as atexit does
            return
        second = _begin_next(saver, folder, what, first, stall)
        stall.gate.set()
        assert saver.finish(ranks.HANG_S)
    assert first.committed, first.cause()
    assert second().committed == (what != "skip"), second().cause()


def _begin_next(saver: Saver, folder: Path, what: str, first: PendingSave, stall: Stall) -> Callable[[], PendingSave]:
    """The save after the stalled one; what is to be seen of it before the disk answers."""
    exchange = ranks.alone()
    exchange.notice_s = 0.01
    wanted = ranks.request(folder, "step4", 4, exchange)
    if what == "wait":  # and says so while it waits, which opens the gate
        logging.disable(logging.NOTSET)
        logging.getLogger("unickpt").propagate = False
        stall.open_on_warning("training has waited")
        save = saver.save(wanted, exchange)
        assert stall.warned.is_set(), "it did not wait, or did not say so"
        assert first.done
        return lambda: save
    save = saver.save(wanted, exchange)
    assert not first.done
    assert save.done == (what == "skip")
    assert len(saver.pending) == (2 if what == "queue" else 1)
    return lambda: save


def terminations(folder: Path, count: int, seed: int) -> list[Tally]:
    """SIGTERM at every call of a save, and while it copies."""
    tally = Tally(
        "SIGTERM during a save",
        "during the copy of the state, and at calls of the save, evenly spread; `grace_seconds` is long enough, so a save that "
        "has begun in the background must be committed; the process must end by SIGTERM",
    )
    base = ranks.sound(folder / "base")
    chance = random.Random(seed)
    calls: list[Call] = []
    with watched(copied(base, folder / "work"), calls.append, CHANGING):
        ranks.save_on_threads(folder / "work", "best", 3, world=1)
    last = max(call.number for call in calls)
    places: Counter[str] = Counter()
    for case in range(count):
        number = -1 if case % 10 == 0 else round(last * case / max(count - 1, 1)) if case < last else chance.randrange(last + 1)
        work = copied(base, folder / "work")
        word = folder / "word"
        word.unlink(missing_ok=True)
        child = ranks.fork(lambda: _terminated(work, number, word))  # noqa: B023
        _until(word.exists)
        os.kill(child, signal.SIGTERM)
        status = ranks.ended(child)
        places["copying" if number < 0 else next(call.place for call in calls if call.number == number)] += 1
        where = f"call {number}"
        if status != -signal.SIGTERM:
            tally.deaths.append(f"{where}: ended with {status}")
        begun = json.loads(word.read_text())  # else the call had not returned to training yet, and promises nothing
        tally.judge(resume(work), at_least=3 if begun else 2, newest=3, where=where)
    tally.notes.append(f"time of the signal: {spread(places)}")
    return [tally]


def _terminated(folder: Path, number: int, word: Path) -> None:
    exchange = ranks.alone()
    saver = Saver(SaveOptions(asynchronous=True, grace_s=ranks.HANG_S, retention=KEEP))

    def tell(call: Call) -> None:
        if (call.number, call.after) == (number, False):
            ranks.write_word(word, threading.current_thread() is not threading.main_thread())
            time.sleep(0.03)  # the signal comes while this call is being made

    wanted = ranks.request(folder, "best", 3, exchange)
    if number < 0:
        contribute = wanted.contribute

        def slow(announced: dict[str, object]) -> Contribution:
            ranks.write_word(word, False)
            time.sleep(ranks.HANG_S)
            return contribute(announced)

        wanted = SaveRequest(slow, wanted.save_dir, wanted.tag, True)
    with watched(folder, tell, CHANGING):
        saver.save(wanted, exchange)
        time.sleep(ranks.HANG_S)
