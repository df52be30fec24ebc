"""Two jobs that save into one folder at the same time, by mistake."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

from tests.jobs.faults import ranks
from tests.jobs.faults.ranks import KEEP
from tests.jobs.faults.state import JOBS, resume
from tests.jobs.faults.tally import Tally, spread
from unickpt.checkpoint.save.requests import SaveOptions
from unickpt.checkpoint.save.retention import Retention
from unickpt.checkpoint.save.saver import Saver

SAVES = 12  # of each job, in one race


def two(folder: Path, count: int, seed: int) -> list[Tally]:
    """Under the same tags, and under different ones, with and without retention."""
    how = f"two processes save {SAVES} times each at once, under one tag and `latest`; a third process resumes in a loop"
    same = Tally("two jobs, the same tags", how)
    other = Tally("two jobs, different tags", "the same, each under its own tags; half of the cases with `keep_last` 2")
    for tally, tagged in ((same, False), (other, True)):
        said: Counter[str] = Counter()
        resumes = 0
        for number in range(count):
            work = folder / f"{tally.fault[-9:]}{number}"
            keep = KEEP if number % 2 else Retention()
            go = work / "go"
            work.mkdir()
            words = [work / f"word{job}" for job in (0, 1)]
            saves = work / "saves"
            children = [
                ranks.fork(lambda j=job: _race(saves, j, go, words[j], tagged=tagged, keep=keep))  # noqa: B023
                for job in (0, 1)
            ]
            go.touch()
            seen = False
            while not all(word.exists() for word in words) and any(_alive(child) for child in children):
                found = resume(saves)
                resumes += 1
                seen = seen or found.step is not None
                if found.wrong:
                    tally.wrong.append(f"race {number}: {found}")
                if seen and found.step is None:
                    tally.lost.append(f"race {number}: nothing is left of what there was: {found}")
            statuses = [ranks.ended(child) for child in children]
            if statuses != [0, 0] or not all(word.exists() for word in words):
                tally.deaths.append(f"race {number}: ended with {statuses}")
                continue
            results = [json.loads(word.read_text()) for word in words]
            for result in (line for lines in results for line in lines):
                said[result or "committed"] += 1
            found = resume(saves)
            if found.wrong:
                tally.wrong.append(f"race {number}: {found}")
            committed = any(not line for lines in results for line in lines)
            if committed and (found.step is None or found.skipped):
                tally.lost.append(f"race {number}: at the end {found}")
            tally.outcomes[
                f"at the end a complete checkpoint of one job is resumed{'' if found.skipped else ', none is passed over'}"
            ] += 1
        tally.notes.append(f"{resumes:,} resumes during the saves, none of them wrong; results of the saves: {spread(said)}")
    return [same, other]


def _alive(child: int) -> bool:
    return Path(f"/proc/{child}/stat").read_text().split(")")[1].split()[0] != "Z"


def _race(folder: Path, job: int, go: Path, word: Path, *, tagged: bool, keep: Retention) -> None:
    while not go.exists():
        os.sched_yield()
    saver = Saver(SaveOptions(asynchronous=bool(job), retention=keep))
    said = []
    for number in range(1, SAVES + 1):
        exchange = ranks.alone()
        tag = f"job{job}-{number}" if tagged else "best"
        save = saver.save(ranks.request(folder, tag, job * JOBS + number, exchange), exchange)
        save.wait(ranks.HANG_S)
        reason = "" if save.committed else save.cause()
        said.append("refused: another process is saving into this directory" if "is locked" in reason else reason[:80])
    ranks.write_word(word, said)
