"""Words for ranks, groups, calls and times in the sentences of verdicts."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from unickpt.diagnosis.detectors.observations import CallRef
from unickpt.diagnosis.snapshot.snapshot import GroupInfo

MOST_NAMED = 8  # ranks in a list


def call_text(call: CallRef) -> str:
    """Identity of a call in a sentence."""
    what = f"{call.op.name.lower()} #{call.seq} of {group_text(call.group)}"
    return what if call.pair is None else f"{what} from rank {call.pair[0]} to rank {call.pair[1]}"


def group_text(group: GroupInfo) -> str:
    """Name of a group in a sentence."""
    label = group.label or repr(group.name)
    if not group.count:
        return f"the {label} group"
    if group.count > 2:
        first, step, count = group.ranks[-1]
        return f"the {label} group of ranks {group.ranks[0][0]} to {first + step * (count - 1)}"
    return f"the {label} group of {counted(group.members().tolist())}"


def counted(ranks: Sequence[int], verb: str = "") -> str:
    """Ranks, with a verb: 'rank 3 waits', 'ranks 4, 5 wait'."""
    one = len(ranks) == 1
    named = ", ".join(map(str, sorted(ranks)[:MOST_NAMED]))
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' * (not one)} {named}{more}" + (f" {verb}{'s' * one}" if verb else "")


def is_or_are(ranks: Sequence[int]) -> str:
    """'is' for one rank, otherwise 'are'."""
    return "is" if len(ranks) == 1 else "are"


def has_or_have(ranks: Sequence[int]) -> str:
    """'has' for one rank, otherwise 'have'."""
    return "has" if len(ranks) == 1 else "have"


def clock_time(ns: int) -> str:
    """Local time of day with the offset of its zone, ``14:03:07+01:00``; ``unknown`` for times that no calendar has."""
    return zoned_time(ns).rpartition("T")[2]


def zoned_time(ns: int) -> str:
    """Local time in ISO 8601 with the offset of its zone, to the second; ``unknown`` for times that no calendar has."""
    try:
        return datetime.datetime.fromtimestamp(ns // 1_000_000_000).astimezone().isoformat()
    except (ValueError, OverflowError, OSError):  # rings are not trusted
        return "unknown"
