"""The machine-readable line of a verdict: written for logs, and parsed back.

Grammar::

    line  = "unickpt" SP keyword *( SP key "=" value )
    value = bare | string
    bare  = 1*( printable ASCII without space, quote, backslash and equals sign )
    string = a JSON string in ASCII, in double quotes

``docs/guides/diagnosis.md`` lists keywords, keys and units.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from unickpt.base.errors import FormatError
from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome, Verdict
from unickpt.diagnosis.host.stack_dumps import Frame
from unickpt.diagnosis.recording.rank_ranges import axis_of, checked_progressions, expanded, members, progressions

KEYWORDS = {
    Syndrome.NON_COMMUNICATION_HANG: "HANG",
    Syndrome.COMMUNICATION_HANG: "NETWORK_HANG",
    Syndrome.NON_COMMUNICATION_SLOW: "SLOW",
    Syndrome.COMMUNICATION_SLOW: "SLOW_LINK",
    Syndrome.MISMATCH: "MISMATCH",
    Syndrome.DEADLOCK: "DEADLOCK",
}
MOST_PARTS = 32  # of a list of ranks
MOST_CHARACTERS = 96  # of a text value
_SYNDROMES = {keyword: syndrome for syndrome, keyword in KEYWORDS.items()}
_HEAD = re.compile(r"(?:(?!unickpt).)*unickpt ([A-Z_]+)(?: |$)")
_PAIR = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[!#-<>-\[\]-~]+)(?: |$)')
_BARE = re.compile(r"[!#-<>-\[\]-~]+")
_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")
_LINK = re.compile(r"(\d{1,9})->(\d{1,9})")


@dataclass(frozen=True, slots=True)
class RankList:
    """Ranks, of which a line may leave out some.

    Attributes:
        ranks: ranks in the line.
        more: number of ranks that the line leaves out.
    """

    ranks: tuple[int, ...] = ()
    more: int = 0

    @classmethod
    def of(cls, ranks: Sequence[int]) -> RankList:
        """Keep as many ranks as a line may have."""
        parts = progressions(sorted(ranks))[:MOST_PARTS]
        kept = tuple(members(parts))
        return cls(kept, len(ranks) - len(kept))

    def __str__(self) -> str:
        parts = []
        for first, step, count in progressions(self.ranks):
            last = first + step * (count - 1)
            run = f"{first}-{last}" + (f":{step}" if step > 1 else "")
            parts.append(run if count > 2 else ",".join(str(first + step * at) for at in range(count)))
        return ",".join([*parts, *([f"+{self.more}"] if self.more else [])])

    @classmethod
    def parse(cls, text: str) -> RankList:
        """Read what ``str`` has written.

        Raises:
            ValueError: ``text`` is not a list of ranks.
        """
        parts, more = [], 0
        for part in text.split(","):
            if re.fullmatch(r"\+\d{1,9}", part):
                more = int(part[1:])
            elif found := _PART.fullmatch(part):
                first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
                parts.append((first, step, (last - first) // max(step, 1) + 1))
            else:
                raise ValueError(f"{part!r} is not a rank or a range of ranks")
        return cls(tuple(expanded(checked_progressions(parts)).tolist()), more)


@dataclass(frozen=True, slots=True)
class VerdictLine:
    """Content of a line. Texts are empty and numbers 0 where the line has no such key.

    Attributes:
        syndrome: kind, from the keyword.
        ranks: global ranks at fault (``rank``).
        link: source and destination rank (``link``).
        op: operation of the call in question, such as ``all_reduce``.
        seq: sequence number of the call.
        group: short name of the communicator, such as ``dp``.
        members: global ranks of the communicator.
        blocked: number of ranks that wait.
        since: local time of the first sign, ``HH:MM:SS``.
        state: state of the first rank's process.
        at: where its main thread is in the user's own code, ``file:line``.
        waits_at: the same of most of the ranks that wait.
        cause: activity of the ranks at fault, where the syndrome does not imply it.
        role: role of the ranks, such as ``CriticWorker``, if the agent knows one (``unickpt.base.role``).
    """

    syndrome: Syndrome
    ranks: RankList = RankList()
    link: tuple[int, int] | None = None
    op: str = ""
    seq: int = 0
    group: str = ""
    members: RankList = RankList()
    blocked: int = 0
    since: str = ""
    state: str = ""
    at: str = ""
    waits_at: str = ""
    cause: str = ""
    role: str = ""

    @classmethod
    def of(cls, verdict: Verdict) -> VerdictLine:
        """Render a verdict."""
        group = verdict.group
        implied = verdict.cause is Cause.COMMUNICATION or (
            verdict.cause is Cause.COMPUTE and verdict.syndrome is Syndrome.NON_COMMUNICATION_HANG
        )
        return cls(
            verdict.syndrome,
            RankList.of(verdict.ranks),
            verdict.link,
            verdict.op.name.lower() if verdict.op is not None else "",
            verdict.seq,
            (axis_of(group.label) or group.label or group.name)[:MOST_CHARACTERS] if group is not None else "",
            RankList.of(group.members().tolist()) if group is not None else RankList(),
            verdict.victims,
            clock_time(verdict.since_ns) if verdict.since_ns else "",
            verdict.state.value if verdict.state is not None else "",
            _place(verdict.at),
            _place(verdict.waits_at),
            verdict.cause.value if verdict.cause is not None and not implied else "",
        )

    def __str__(self) -> str:
        values = {
            "rank": str(self.ranks),
            "link": f"{self.link[0]}->{self.link[1]}" if self.link is not None else "",
            "op": self.op,
            "seq": str(self.seq or ""),
            "group": f"{self.group}[{self.members}]" if self.group else "",
            "blocked": str(self.blocked or ""),
            "since": self.since,
            "state": self.state,
            "at": self.at,
            "waits_at": self.waits_at,
            "cause": self.cause,
            "role": self.role,
        }
        pairs = [f"{key}={_quoted(value)}" for key, value in values.items() if value]
        return " ".join(["unickpt", KEYWORDS[self.syndrome], *pairs])


def parse_line(text: str) -> VerdictLine:
    """Parse the machine-readable line of a verdict.

    Args:
        text: one line of a log. A prefix, such as torchrun's ``[rank0]:``, is allowed unless it contains ``unickpt``.

    Raises:
        FormatError: ``text`` is not the line of a verdict. Keys that this release does not know are ignored.

    Example:
        >>> parse_line("unickpt HANG rank=2 op=all_reduce seq=118 group=dp[0-3] blocked=3").members.ranks
        (0, 1, 2, 3)
    """
    line = text.rstrip("\r\n ")
    head = _HEAD.match(line)
    if head is None or head[1] not in _SYNDROMES:
        raise FormatError(f"not the line of a verdict: {text[:MOST_CHARACTERS]!r}")
    values, at = {}, head.end()
    try:
        while at < len(line):
            pair = _PAIR.match(line, at)
            if pair is None:
                raise ValueError(f"no key=value at character {at}")
            values[pair[1]] = str(json.loads(pair[2])) if pair[2].startswith('"') else pair[2]
            at = pair.end()
        group, _, members = values.get("group", "[]").removesuffix("]").rpartition("[")
        link = _LINK.fullmatch(values["link"]) if "link" in values else None
        if "link" in values and link is None:
            raise ValueError(f"{values['link']!r} is not a link")
        return VerdictLine(
            _SYNDROMES[head[1]],
            RankList.parse(values["rank"]) if "rank" in values else RankList(),
            (int(link[1]), int(link[2])) if link is not None else None,
            values.get("op", ""),
            int(values.get("seq", "0")),
            group,
            RankList.parse(members) if members else RankList(),
            int(values.get("blocked", "0")),
            *(values.get(key, "") for key in ("since", "state", "at", "waits_at", "cause", "role")),
        )
    except ValueError as err:
        raise FormatError(f"damaged line of a verdict ({err}): {text[:MOST_CHARACTERS]!r}") from err


def clock_time(ns: int) -> str:
    """Local time of day, ``HH:MM:SS``; ``unknown`` for times that no calendar has."""
    try:
        return datetime.datetime.fromtimestamp(ns / 1e9).strftime("%H:%M:%S")
    except (ValueError, OverflowError, OSError):  # rings are not trusted
        return "unknown"


def _place(frame: Frame | None) -> str:
    return f"{frame.file[-MOST_CHARACTERS:]}:{frame.line}" if frame is not None else ""


def _quoted(value: str) -> str:
    return value if _BARE.fullmatch(value) else json.dumps(value)
