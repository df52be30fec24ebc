"""One fault of the soak: it is made, the reaction is watched, and the row says what was right."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evidence.sixty_four.soak.faults import KINDS, STAYS_S, Case, Kind, chosen, kind_of
from evidence.sixty_four.soak.hosts import NAMES, Soaked, waited
from evidence.sixty_four.soak.worker_files import read_steps
from evidence.steering.readings import verdict_s
from evidence.steering.timeline import epoch_of
from tests.jobs.steering import soak_arithmetic as exact

LIMIT_S, RETURN_S = 300.0, 400.0  # on a busy machine
LEFT_S = 45.0  # in which processes without their agent must have ended
_LINE = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})\] unickpt: (.*)")
_SIGNS = ("steering: ", "HANG", "SLOW", "DEAD", "not saved", "goes to disk", "gave up", "damaged", "failed")
_QUIET = ("check", "admit", "not executed", "keep")


@dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        number, kind, job: of the fault.
        hosts, rank: at fault.
        step: newest step at the fault.
        noticed_s: from the fault until the first sign of it in a verdict, an order, a log or a rank.
        works_s: until the job works again, on the hosts that are left; None if nothing stopped it.
        all_s: until all hosts work in one round again.
        lost_steps: steps that were done again.
        rounds: that began.
        verdict: first order, or else verdict, or else line of the log.
        seen: what was noted on the way.
        problems: what was wrong.
        held: what was held after it.
    """

    number: int
    kind: str
    job: int
    hosts: tuple[str, ...]
    rank: int
    step: int
    noticed_s: float | None
    works_s: float | None
    all_s: float | None
    lost_steps: int
    rounds: int
    verdict: str
    seen: tuple[str, ...]
    problems: tuple[str, ...]
    held: Mapping[str, Any]


class Watch:
    """What a job does after a fault."""

    def __init__(self, job: Soaked) -> None:
        self.job, self.began_s = job, time.time()
        now = job.round_now()
        self.round = now[0] if now is not None else "0.0"
        self.step = read_steps(job.folder).last()
        self._logs = {path: path.stat().st_size for path in job.outputs}

    def lines(self) -> list[tuple[float, str]]:
        """Return time and text of what has been logged about faults since then."""
        found = []
        for path in self.job.outputs:
            with path.open("rb") as file:
                file.seek(self._logs.get(path, 0))
                text = file.read().decode(errors="replace")
            for stamp, part, said in _LINE.findall(text):
                if any(word.lower() in said.lower() for word in _SIGNS):
                    found.append((time.mktime(time.strptime(stamp, "%Y-%m-%d %H:%M:%S")) + int(part) / 1000, said))
        return sorted(found)

    def orders(self) -> list[str]:
        """Return the orders since then, each once."""
        return list(dict.fromkeys(said[17:] for _, said in self.lines() if said.startswith("steering: order: ")))

    def works(self, hosts: set[str], *, fresh: bool = True) -> float | None:
        """Return when a round of exactly these hosts, begun since then if ``fresh``, did a step; None if there is none."""
        now = self.job.round_now()
        if now is None or now[1] != hosts or (fresh and epoch_of(now[0]) <= epoch_of(self.round)):
            return None
        if now[2] < self.began_s or time.time() - now[2] > 5.0:
            return None
        return next(line[4] for line in read_steps(self.job.folder).rounds[now[0]] if line[4] >= self.began_s)

    def rounds(self) -> list[str]:
        """Return the rounds that have begun since then."""
        found = {each["round"] for each in self.job.events() if each["what"] == "started"}
        return sorted((each for each in found if epoch_of(each) > epoch_of(self.round)), key=epoch_of)

    def noticed_s(self) -> float | None:
        """Return the seconds until the first sign of the fault."""
        signs = [at for at, said in self.lines() if at >= self.began_s]
        told = verdict_s(self.job, self.began_s)
        signs += [told] if told is not None else []
        signs += [each["at"] for each in self.job.events() if each["what"] == "not saved" and each["at"] >= self.began_s]
        return round(min(signs) - self.began_s, 1) if signs else None


def make(job: Soaked, number: int, seed: int, expected: Mapping[int, exact.Done], only: Sequence[str] = ()) -> Row:
    """Make a fault, and wait until all hosts work again."""
    name = kind_of(number, seed, only)
    kind = KINDS[name]
    case, watch = chosen(number, seed, job, kind), Watch(job)
    step = job.step()
    works_s = all_s = None
    try:
        kind.act(case)
        works_s, all_s = _followed(kind, case, watch)
    except Exception as err:  # such as a process that is gone before it was signalled
        case.wrong.append(f"harness: {type(err).__name__}: {err}")
    finally:
        job.no_fault()
    problems = [*case.wrong, *_wrong_orders(kind, case, watch), *_wrong_ends(case), *wrong_numbers(job, expected)]
    orders = [each for each in watch.orders() if not each.startswith(_QUIET)]
    lines = [said for _, said in watch.lines()]
    verdict = orders[0] if orders else next((each for each in lines if "the round ends" in each), lines[0] if lines else "")
    return Row(
        number, name, job.number, tuple(case.hosts), case.rank, step, watch.noticed_s(), works_s, all_s, lost(job, watch),
        len(watch.rounds()), verdict[:240], tuple(case.seen), tuple(dict.fromkeys(problems)), asdict(job.held()),
    )  # fmt: skip


def _followed(kind: Kind, case: Case, watch: Watch) -> tuple[float | None, float | None]:
    """Wait for what must happen. Return the seconds until the job works again, and until it does so on all hosts."""
    job, every = case.job, set(NAMES)
    if kind.after == "same":
        time.sleep(STAYS_S)
        kind.back(case)
        went_on = job.go_on(10, LIMIT_S)
        case.wrong += [] if went_on else ["the job does not go on"]
        case.wrong += [f"rounds began: {', '.join(watch.rounds())}"] if watch.rounds() else []
        return None, None
    if kind.after == "out":
        left = every - set(case.hosts)
        at = waited(lambda: watch.works(left) or job.over(), LIMIT_S)
        if not isinstance(at, float):
            case.wrong.append(f"no round of {', '.join(sorted(left))}: {job.round_now()}{' the job has ended' * job.over()}")
        gone = watch.works(left)
        kind.back(case)
        if not isinstance(at, float):
            return None, _all(case, watch)
        job.go_on(5, 60)
        return round((gone or at) - watch.began_s, 1), _all(case, watch)
    if kind.after == "restart":
        at = waited(lambda: watch.works(every) or job.over(), LIMIT_S)
        kind.back(case)
        if not isinstance(at, float):
            case.wrong.append(f"no round of all hosts: {job.round_now()}{' the job has ended' * job.over()}")
            return None, None
        return round(at - watch.began_s, 1), round(at - watch.began_s, 1)
    found = _all(case, watch)
    return found, found


def _all(case: Case, watch: Watch) -> float | None:
    at = waited(lambda: watch.works(set(NAMES), fresh=False) or case.job.over(), RETURN_S)
    if isinstance(at, float):
        return round(_begun(case.job, at) - watch.began_s, 1)
    case.wrong.append(f"not all hosts work again: {case.job.round_now()}{' the job has ended' * case.job.over()}")
    return None


def _begun(job: Soaked, at: float) -> float:
    now = job.round_now()
    return next((line[4] for line in read_steps(job.folder).rounds[now[0]] if line[4] >= at), at) if now else at


def _wrong_orders(kind: Kind, case: Case, watch: Watch) -> list[str]:
    wrong, orders = [], [each for each in watch.orders() if not each.startswith(_QUIET)]
    for text in orders:
        parked = re.match(r"park ([^\s:]+)", text)
        right = text.startswith(kind.orders) if kind.orders else False
        if not right or (parked is not None and parked[1] not in case.hosts):
            wrong.append(f"order: {text[:200]}")
    if kind.named and not any(word in text for text in orders for word in kind.named):
        wrong.append(f"no order with {' or '.join(kind.named)}")
    told = [said for _, said in watch.lines()]
    told += [each["why"] for each in watch.job.events() if each["what"] == "not saved" and each["at"] >= watch.began_s]
    if kind.said and not any(word in said for said in told for word in kind.said):
        wrong.append(f"nothing is logged with {' or '.join(kind.said)}")
    return wrong


def _wrong_ends(case: Case) -> list[str]:
    """Return processes that live although their agent has ended."""
    if not case.left:
        return []
    gone = waited(lambda: not [each for each in case.left if each.is_running() and each.status() != "zombie"], LEFT_S)
    return [] if gone else [f"processes of a killed agent live: {[each.pid for each in case.left if each.is_running()]}"]


def lost(job: Soaked, watch: Watch) -> int:
    """Return how many steps were done again, in all rounds since the fault."""
    before, again = watch.step, 0
    for name, lines in read_steps(job.folder).read().items():
        if epoch_of(name) == epoch_of(watch.round) and lines:
            before = max(before, lines[-1][0])
        elif epoch_of(name) > epoch_of(watch.round) and lines:
            again += max(0, before - (lines[0][0] - 1))
            before = lines[-1][0]
    return again


def wrong_numbers(job: Soaked, expected: Mapping[int, exact.Done]) -> list[str]:
    """Return what differs from the uninterrupted run: any step of any round, any state after a resume, a step left out."""
    found, furthest = [], 0
    for name, lines in read_steps(job.folder).read().items():
        found += exact.differences({step: exact.Done(loss, words, state) for step, loss, words, state, _ in lines}, expected)
        numbers = [line[0] for line in lines]
        if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            found.append(f"round {name} leaves out steps")
        if numbers and numbers[0] > furthest + 1:
            found.append(f"round {name} begins with step {numbers[0]}, and the rounds before ended with {furthest}")
        furthest = max([furthest, *numbers])
    for each in job.events():
        if each["what"] == "resumed" and each["step"]:
            if each["state"] != expected[each["step"]].state:
                found.append(f"rank {each['rank']} of round {each['round']} resumed another state at step {each['step']}")
            if each["samples"] != each["step"] * exact.BATCH:
                found.append(f"round {each['round']} resumed after {each['samples']} samples at step {each['step']}")
    return [*found, *_at_once(job)][:5]


def _at_once(job: Soaked) -> Sequence[str]:
    """Return which rounds have worked at the same time."""
    spans = [(name, lines[0][4], lines[-1][4]) for name, lines in read_steps(job.folder).read().items() if lines]
    return [f"rounds {one[0]} and {other[0]} worked at once" for one, other in itertools.pairwise(spans) if one[2] > other[1]]
