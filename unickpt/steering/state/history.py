"""What happened to a job, as entries: made from two states that follow each other, kept as lines of JSON. Pure.

Every agent makes the entries from its own copy of the state, so the history survives the loss of any host. Several agents
tell of the same event; ``merged`` keeps one of these entries.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from unickpt.steering.state.membership import JobPhase, Membership, Round, ranks_of

MOST_NAMES, LONGEST_TEXT, LONGEST_LINE = 4096, 4096, 1 << 20  # hosts of an entry; characters; bytes of a line
_LATEST = 1 << 62


class Kind(enum.Enum):
    """Kind of an entry."""

    BEGIN = "begin"  # an agent begins to keep this history
    OPENED = "opened"  # the members of a round are chosen
    RUNNING = "running"  # the workers of a round can start
    STEP = "step"  # how far the job has come
    ALIVE = "alive"  # the agent that makes the entry lives; once a minute
    ORDER = "order"  # an order was given
    ENDED = "ended"  # a round has ended
    CLOSED = "closed"  # there will be no more rounds


@dataclasses.dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One event.

    Attributes:
        kind: kind.
        at_s: time in seconds since the epoch, on the wall clock of the host that made the entry.
        epoch: round; (0, 0) before the first.
        hosts: of OPENED and RUNNING, the members by rank.
        world: number of workers of the round; 0 if unknown.
        step: step that the job has reached in the round; 0 if unknown.
        furthest: furthest step of earlier rounds; -1 in the first.
        moved_s: time at which ``step`` was seen first; 0 if unknown.
        number: number of an order.
        action: of ORDER, its kind; '' if it was not executed.
        cause: of ORDER, the row of the policy, or ``PERSON``; of ENDED and CLOSED, the ``Ending``.
        text: in words.
        finished: of CLOSED, whether the program ended with success.
    """

    kind: Kind
    at_s: float
    epoch: tuple[int, int] = (0, 0)
    hosts: tuple[str, ...] = ()
    world: int = 0
    step: int = 0
    furthest: int = -1
    moved_s: float = 0.0
    number: int = 0
    action: str = ""
    cause: str = ""
    text: str = ""
    finished: bool = False


def entries(before: Membership | None, after: Membership, now_s: float, wall_s: float) -> list[HistoryEntry]:
    """Return what happened between two states, in order.

    Args:
        before: state that was known before; None for none.
        after: state that is known now.
        now_s: time on the clock of the states.
        wall_s: the same time in seconds since the epoch.
    """
    old, new = (before.round if before is not None else None), after.round
    other = new is not None and (old is None or old.epoch != new.epoch)
    found = [HistoryEntry(Kind.BEGIN, wall_s)] if before is None else []
    known = before.orders[-1].number if before is not None and before.orders else 0
    for order in after.orders if before is not None else ():
        if order.number > known:
            found.append(
                HistoryEntry(Kind.ORDER, wall_s, order.epoch, number=order.number, action=order.action, cause=order.cause,
                      text=order.text)
            )  # fmt: skip
    over = other or after.phase is JobPhase.GATHERING
    if before is not None and old is not None and before.phase is not JobPhase.GATHERING and over:
        step = max(before.reached, 0 if other else after.reached)
        found.append(
            HistoryEntry(Kind.ENDED, wall_s, old.epoch, world=world_of(before), step=step, furthest=before.furthest,
                  cause=after.ending.value, text=after.reason)
        )  # fmt: skip
    if new is not None:
        found += _of_round(before, after, new, other, now_s, wall_s)
    if new is not None and after.reached > (0 if other or before is None else before.reached):
        found.append(_step(after, new, wall_s))
    if after.closed and (before is None or not before.closed):
        epoch = new.epoch if new is not None else (0, 0)
        found.append(
            HistoryEntry(Kind.CLOSED, wall_s, epoch, step=after.reached, cause=after.ending.value, text=after.closed,
                  finished=after.finished)
        )  # fmt: skip
    return found


def _of_round(
    before: Membership | None, after: Membership, new: Round, other: bool, now_s: float, wall_s: float
) -> list[HistoryEntry]:
    hosts, since_s = tuple(name for name, _ in new.members), wall_s - max(now_s - new.since_s, 0.0)
    found = [HistoryEntry(Kind.OPENED, since_s, new.epoch, hosts, furthest=after.furthest)] if other else []
    if after.phase is JobPhase.RUNNING and (other or before is None or before.phase is not JobPhase.RUNNING):
        at_s = since_s if before is None else wall_s
        found.append(HistoryEntry(Kind.RUNNING, at_s, new.epoch, hosts, world_of(after), furthest=after.furthest))
    return found


def _step(state: Membership, round_: Round, wall_s: float) -> HistoryEntry:
    return HistoryEntry(
        Kind.STEP, wall_s, round_.epoch, world=world_of(state), step=state.reached, furthest=state.furthest, moved_s=wall_s
    )


def world_of(state: Membership) -> int:
    """Return the number of workers of the round that is being opened or runs; 0 if it is unknown."""
    if state.round is None:
        return 0
    counts = [len(ranks_of(state, name)) for name, _ in state.round.members]
    return sum(counts) if all(counts) else 0


# ---------------------------------------------------------------- lines


def line_of(entry: HistoryEntry) -> bytes:
    """Return an entry as a line of JSON. Fields with their default are left out."""
    value: dict[str, Any] = {"kind": entry.kind.value}
    for field in dataclasses.fields(HistoryEntry):
        found = getattr(entry, field.name)
        if field.name != "kind" and found != field.default:
            value[field.name] = found
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def entry_of(line: bytes) -> HistoryEntry:
    """Return the entry on a line.

    Raises:
        ValueError: the line holds none.
    """
    try:
        value = json.loads(line)
        term, number = value.get("epoch", (0, 0))
        hosts = value.get("hosts", [])
        if not isinstance(hosts, list) or len(hosts) > MOST_NAMES or not isinstance(value.get("finished", False), bool):
            raise ValueError("hosts or finished are wrong")
        return HistoryEntry(
            Kind(value["kind"]), seconds(value["at_s"]), (count(term), count(number)), tuple(_text(host) for host in hosts),
            count(value.get("world", 0)), count(value.get("step", 0)), count(value.get("furthest", -1), least=-1),
            seconds(value.get("moved_s", 0.0)), count(value.get("number", 0)), _text(value.get("action", "")),
            _text(value.get("cause", "")), _text(value.get("text", "")), value.get("finished", False),
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as err:
        raise ValueError(f"not an entry of a history: {type(err).__name__}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value[:LONGEST_TEXT]


def count(value: Any, least: int = 0) -> int:
    """Return a number that another process has sent. Raises ValueError."""
    if type(value) is not int or not least <= value < _LATEST:
        raise ValueError(f"{value!r} is no count")
    return value


def seconds(value: Any) -> float:
    """Return a time or a duration that another process has sent. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no number of seconds")
    return float(value)


def merged(files: Iterable[Sequence[HistoryEntry]]) -> list[HistoryEntry]:
    """Return the entries of all agents of a job by time, each event once: the earliest entry about it."""
    every = sorted((entry for file in files for entry in file), key=lambda entry: entry.at_s)
    found: dict[object, HistoryEntry] = {}
    for entry in every:
        key: object = (entry.kind, entry.epoch, entry.number)
        if entry.kind in (Kind.STEP, Kind.ALIVE, Kind.BEGIN):
            key = entry
        elif key in found and found[key].world < entry.world:  # told before the number of workers was known
            found[key] = dataclasses.replace(found[key], world=entry.world)
        found.setdefault(key, entry)
    return sorted(found.values(), key=lambda entry: entry.at_s)
