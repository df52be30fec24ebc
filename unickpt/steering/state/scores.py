"""Self-check of a host: what it measures, and whether that is good enough beside the other hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

BUSY_SHARE = 0.25  # of the processors, used by other programs: a slow measurement of compute or memory then proves nothing
LINK_SHARE = 0.1  # of the median of others: the link and the partner are also used by training
_LARGEST, _LONGEST_TEXT = 1e18, 1024
_NAMES = {
    "compute": ("compute", "GFLOP/s"),
    "device": ("GPU", "GFLOP/s"),
    "memory": ("memory", "GB/s"),
    "loopback": ("loop-back", "GB/s"),
    "link": ("link to another host", "GB/s"),
}


class Score(NamedTuple):
    """What a host has measured. More is better, 0 is not measured.

    Attributes:
        compute: matrix product on one core, in GFLOP/s.
        device: matrix product on the slowest GPU, in GFLOP/s.
        memory: copy in main memory, in GB/s.
        loopback: transfer within the host, in GB/s.
        link: transfer to another host, in GB/s.
        wrong: what does not work at all, or gives wrong results; ''.
        busy: share of the processor time of the host that other programs used meanwhile, 0 to 1.
    """

    compute: float = 0.0
    device: float = 0.0
    memory: float = 0.0
    loopback: float = 0.0
    link: float = 0.0
    wrong: str = ""
    busy: float = 0.0


def best(one: Score, later: Score) -> Score:
    """Return the best of two measurements of a host. Other programs make it slower, and never faster."""
    return Score(
        compute=max(one.compute, later.compute),
        device=max(one.device, later.device),
        memory=max(one.memory, later.memory),
        loopback=max(one.loopback, later.loopback),
        link=max(one.link, later.link),
        wrong=one.wrong and later.wrong,
        busy=min(one.busy, later.busy),
    )


def failure(score: Score, others: Iterable[Score], share: float) -> str:
    """Return why a host fails its self-check; '' if it passes.

    A host that other programs use is slow for them, so its speed without a GPU and a link proves no fault.

    Args:
        score: what it has measured.
        others: what the other hosts of the job have measured at their start. Without others, only ``wrong`` counts.
        share: smallest share of their median that is good enough.
    """
    if score.wrong:
        return score.wrong
    known = list(others)
    for key, (name, unit) in _NAMES.items():
        values = [value for each in known if (value := getattr(each, key)) > 0]
        own: float = getattr(score, key)
        if key == "device" and not own and 2 * len(values) > len(known):
            return "no GPU can be used, and other hosts have one"
        if key not in ("device", "link") and score.busy > BUSY_SHARE:
            continue
        least = LINK_SHARE if key == "link" else share
        if own and values and own < least * median(values):
            return f"{name}: {own:.4g} {unit}, and the median of {len(values)} others is {median(values):.4g} {unit}"
    return ""


def described(score: Score) -> str:
    """Return the measured values, for the log."""
    parts = [f"{name} {getattr(score, key):.4g} {unit}" for key, (name, unit) in _NAMES.items() if getattr(score, key)]
    if score.busy > BUSY_SHARE:
        parts.append(f"while other programs used {score.busy:.0%} of the processors")
    return ", ".join([*parts, *([score.wrong] if score.wrong else [])])


def score_from(value: Any) -> Score:
    """Return the score that another process has sent.

    Raises:
        ValueError: the value is no score.
    """
    if not isinstance(value, (list, tuple)) or len(value) != len(Score._fields):
        raise ValueError("no score")
    *numbers, wrong, busy = value
    for each in (*numbers, busy):
        if isinstance(each, bool) or not isinstance(each, (int, float)) or not 0 <= each < _LARGEST:
            raise ValueError("a score is a number")
    if not isinstance(wrong, str) or len(wrong) > _LONGEST_TEXT:
        raise ValueError("no text of a score")
    compute, device, memory, loopback, link = (float(each) for each in numbers)
    return Score(compute, device, memory, loopback, link, wrong, float(busy))
