"""kill -9: at random instants of a job of several processes, and at every system call of a save."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import struct
import time
from collections import Counter
from pathlib import Path

from tests.jobs.faults import ranks, refusing
from tests.jobs.faults.calls import CHANGING, Act, Call, watched
from tests.jobs.faults.ranks import KEEP, Meeting
from tests.jobs.faults.state import copied, resume
from tests.jobs.faults.tally import Tally, spread
from unickpt.base.errors import CoordinationError
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions
from unickpt.checkpoint.save.saver import Saver

WORLD = 3
_PLACE = 48
_FORMAT = struct.Struct(f"qqq{_PLACE}s")  # step begun, step committed, saves committed, what was being done


class Board:
    """Memory that the ranks of a job share with their parent, and that outlives them."""

    def __init__(self, world: int) -> None:
        self._memory = mmap.mmap(-1, world * _FORMAT.size)

    def read(self, rank: int) -> tuple[int, int, int, str]:
        begun, committed, count, place = _FORMAT.unpack_from(self._memory, rank * _FORMAT.size)
        return begun, committed, count, place.rstrip(b"\0").decode()

    def put(self, rank: int, at: int, value: int) -> None:
        struct.pack_into("q", self._memory, rank * _FORMAT.size + 8 * at, value)

    def place(self, rank: int, text: str) -> None:
        begin = rank * _FORMAT.size + 24
        self._memory[begin : begin + _PLACE] = text.encode()[:_PLACE].ljust(_PLACE, b"\0")


def _train(rank: int, folder: Path, scratch: Path, board: Board, first: int, meeting: Meeting, *, holds: bool) -> None:
    """One rank: save in a loop, new tags and one that comes again, until something is wrong; then say what."""
    store = meeting.hold() if holds else meeting.join()
    exchange = MessageExchange(store, rank=rank, world=WORLD, prefix="job", timeout_s=1.5)
    saver = Saver(SaveOptions(asynchronous=True, retention=KEEP, on_busy=("wait", "queue", "skip")[first % 3], grace_s=5.0))
    chance = random.Random(first * 10 + rank)
    errors: list[str] = []

    def over(save: PendingSave, step: int) -> None:
        if save.committed:
            board.put(rank, 1, step)
            board.put(rank, 2, board.read(rank)[2] + 1)
        elif save.result is None or save.result.failures:
            errors.append(save.cause())

    def place(call: Call) -> None:
        board.place(rank, call.place + (" done" if call.after else ""))

    with watched(folder, place, CHANGING):
        for step in itertools.count(first):
            tag = "best" if step % 4 == 0 else f"step{step}"
            board.place(rank, "copying")
            board.put(rank, 0, step)
            wanted = ranks.request(folder, tag, step, exchange, on_end=lambda save, step=step: over(save, step))
            try:
                saver.save(wanted, exchange.separate("save"))
            except CoordinationError as err:
                errors.append(str(err))
            if errors:
                break
            time.sleep(chance.uniform(0.0, 0.004))  # training
        saver.finish(ranks.HANG_S)
    ranks.write_word(scratch / f"rank{rank}", errors)


def at_random(folder: Path, count: int, seed: int) -> list[Tally]:
    """One rank or all of them, at an instant that is uniform over the save loop; the next job goes on in the folder."""
    chance = random.Random(seed)
    one = Tally("kill -9 of one rank", f"{WORLD} processes train and save asynchronously in a loop; one is killed at a "
                "random time; the next job resumes in the same folder")  # fmt: skip
    every = Tally("kill -9 of all ranks", "the same; all are killed at once")
    places: dict[str, Counter[str]] = {"one": Counter(), "all": Counter()}
    words: Counter[str] = Counter()
    saves = Path(folder) / "saves"
    saves.mkdir()
    last, committed = 0, 0
    for number in range(count):
        what = "all" if number % 2 else "one"
        tally = every if what == "all" else one
        scratch = folder / f"job{number}"
        scratch.mkdir()
        meeting, board = Meeting(scratch / "port", WORLD), Board(WORLD)
        agent = ranks.fork(meeting.serve) if number % 4 < 2 else None
        begin = max(last + 1, 1)
        children = [
            ranks.fork(lambda r=rank: _train(r, saves, scratch, board, begin, meeting, holds=r == 0 and agent is None))  # noqa: B023
            for rank in range(WORLD)
        ]
        end = time.monotonic() + ranks.HANG_S
        since = time.monotonic()
        while board.read(0)[2] < 2 and time.monotonic() < end:
            time.sleep(0.002)  # until the loop runs
        time.sleep(chance.uniform(0.0, max(time.monotonic() - since, 0.05)))
        victims = list(range(WORLD)) if what == "all" else [chance.randrange(WORLD)]
        for rank in victims:
            os.kill(children[rank], signal.SIGKILL)
        places[what].update(board.read(rank)[3] for rank in victims)
        for rank, child in enumerate(children):
            status = ranks.ended(child)
            if rank in victims:
                continue
            word = scratch / f"rank{rank}"
            if status != 0 or not word.exists():
                tally.deaths.append(f"job {number}: rank {rank} ended with {status} after rank {victims} was killed")
            else:
                words[_kind(word.read_text(), victims)] += 1
        if agent is not None:
            ranks.kill(agent)
        begun = max(board.read(rank)[0] for rank in range(WORLD))
        known = max([last, *(board.read(rank)[1] for rank in range(WORLD))])
        committed += board.read(0)[2]
        found = resume(saves)
        tally.judge(found, at_least=known or None, newest=begun, where=f"job {number}, {what}")
        last = found.step or 0
    for tally, what in ((one, "one"), (every, "all")):
        tally.notes.append(f"last operation before the kill: {spread(places[what])}")
    one.notes.append(f"messages of the other ranks: {spread(words)}")
    every.notes.append(f"checkpoints committed by these jobs: {committed:,}")
    return [one, every]


def _kind(word: str, victims: list[int]) -> str:
    if "no message from rank" in word:
        return f"names rank {victims[0]}" if f"rank {victims[0]}" in word else "names another rank"
    return "the store does not answer" if "store of the job does not answer" in word else word[:80]


def at_every_call(folder: Path, count: int, seed: int) -> list[Tally]:
    """The process with all ranks dies before, and after, every system call of a save."""
    tally = Tally(
        "kill -9 at every system call",
        "a process with 3 ranks (threads) kills itself before and after each call that changes the file system, in a save to "
        "a new tag and to an existing tag; then the next job saves into the same folder",
    )
    base = ranks.sound(folder / "base")
    cases = [
        (tag, call.number, call.after)
        for tag in ("step3", "best")
        for call in refusing.rehearsed(base, folder / "work", tag, CHANGING)
    ]
    for tag, number, after in refusing.some(cases, count, seed):
        work = copied(base, folder / "work")

        def die(call: Call, number: int = number, after: bool = after) -> None:
            if (call.number, call.after) == (number, after):
                os.kill(os.getpid(), signal.SIGKILL)

        def run(tag: str = tag, work: Path = work, die: Act = die) -> None:
            with watched(work, die, CHANGING):
                ranks.save_on_threads(work, tag, 3)

        status = ranks.ended(ranks.fork(run))
        if status == 0:
            continue  # that call did not return this time: it raised, as mkdir does of what is there
        where = f"{tag}, call {number}{' done' if after else ''}"
        if status != -signal.SIGKILL:
            tally.deaths.append(f"{where}: ended with {status}")
        tally.judge(resume(work), at_least=2, newest=3, where=where)
        again = [result.committed for result in ranks.save_on_threads(work, tag, 4)]
        if again != [True] * len(again) or resume(work).step != 4:
            tally.lost.append(f"{where}: the next job could not save")
    return [tally]
