"""The machine-readable line of a verdict: written for logs, and parsed back.

Grammar::

    line  = "unickpt" SP keyword *( SP key "=" value )
    value = bare | string
    bare  = 1*( printable ASCII without space, quote, backslash and equals sign )
    string = a JSON string in ASCII, in double quotes

``docs/guides/diagnosis.md`` lists keywords, keys and units.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from unickpt.base.errors import FormatError
from unickpt.diagnosis.detectors.hints import Helps
from unickpt.diagnosis.detectors.observations import EndsAlike
from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome, Verdict
from unickpt.diagnosis.host.process_exits import ExitStatus
from unickpt.diagnosis.host.stack_dumps import Frame
from unickpt.diagnosis.recording.rank_ranges import axis_of, checked_progressions, expanded, members, progressions
from unickpt.diagnosis.reports.hardware_text import short_text
from unickpt.diagnosis.reports.wording import zoned_time

KEYWORDS = {
    Syndrome.NON_COMMUNICATION_HANG: "HANG",
    Syndrome.COMMUNICATION_HANG: "NETWORK_HANG",
    Syndrome.NON_COMMUNICATION_SLOW: "SLOW",
    Syndrome.COMMUNICATION_SLOW: "SLOW_LINK",
    Syndrome.MISMATCH: "MISMATCH",
    Syndrome.DEADLOCK: "DEADLOCK",
    Syndrome.FAILED: "FAILED",
}
MOST_PARTS = 32  # of a list of ranks
MOST_HOSTS = 8  # of a list of hosts
MOST_CHARACTERS = 96  # of a text value
_SYNDROMES = {keyword: syndrome for syndrome, keyword in KEYWORDS.items()}
_HEAD = re.compile(r"(?:(?!unickpt).)*unickpt ([A-Z_]+)(?: |$)")
_PAIR = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[!#-<>-\[\]-~]+)(?: |$)')
_TEXTS = ("since", "state", "at", "waits_at", "cause", "role", "error", "helps", "host", "evidence")
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
        since: local time of the first sign in ISO 8601 with the offset of the zone, ``2026-11-27T14:03:07+01:00``.
        state: state of the first rank's process.
        at: where its main thread is in the user's own code, ``file:line``.
        waits_at: the same of most of the ranks that wait.
        cause: activity of the ranks at fault, where the syndrome does not imply it.
        role: role of the ranks, such as ``CriticWorker``, if the agent knows one (``unickpt.base.role``).
        error: of a failed job, how the ranks at fault ended: class of the exception, signal or ``exit code N``.
        helps: what helps: ``stop``, ``restart`` or ``evict``.
        host: hosts of the ranks at fault, or of the ends of the link, with commas; ``+N`` stands for N that do not fit.
        evidence: what has happened to the hardware of these hosts, what counts most first.
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
    error: str = ""
    helps: str = ""
    host: str = ""
    evidence: str = ""

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
            zoned_time(verdict.since_ns) if verdict.since_ns else "",
            verdict.state.value if verdict.state is not None else "",
            _place(verdict.at),
            _place(verdict.waits_at),
            verdict.cause.value if verdict.cause is not None and not implied else "",
            error=_error(verdict)[:MOST_CHARACTERS],
            helps=verdict.next.remedy.value if isinstance(verdict.next, Helps) else "",
            host=_hosts(verdict.hosts),
            evidence=_evidence(verdict),
        )

    def __str__(self) -> str:
        values = {
            "rank": str(self.ranks),
            "host": self.host,
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
            "error": self.error,
            "helps": self.helps,
            "evidence": self.evidence,
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
            *(values.get(key, "") for key in _TEXTS),
        )
    except ValueError as err:
        raise FormatError(f"damaged line of a verdict ({err}): {text[:MOST_CHARACTERS]!r}") from err


def _hosts(hosts: Sequence[str]) -> str:
    shown = ",".join(hosts[:MOST_HOSTS])[:MOST_CHARACTERS]
    return shown + (f",+{len(hosts) - MOST_HOSTS}" if len(hosts) > MOST_HOSTS else "")


def exit_text(status: ExitStatus | None) -> str:
    """How a process ended: ``SIGKILL``, ``exit code 1``; '' if unknown."""
    if status is None:
        return ""
    return status.signal_name or f"exit code {status.code}"


def _error(verdict: Verdict) -> str:
    ends = [each for each in verdict.evidence if isinstance(each, EndsAlike)]
    return (ends[0].error or exit_text(ends[0].status)) if ends else ""


def _evidence(verdict: Verdict) -> str:
    """Return as many events as fit."""
    text = ""
    for each in map(short_text, verdict.hardware):
        longer = f"{text}; {each}" if text else each[:MOST_CHARACTERS]
        if len(longer) > MOST_CHARACTERS:
            break
        text = longer
    return text


def _place(frame: Frame | None) -> str:
    return f"{frame.file[-MOST_CHARACTERS:]}:{frame.line}" if frame is not None else ""


def _quoted(value: str) -> str:
    return value if _BARE.fullmatch(value) else json.dumps(value)
