"""What the agent of rank 0's host reports about the running round, once a second: findings, and how far the job has come."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from unickpt.diagnosis.detectors.hardware import Weight
from unickpt.steering.policy.policy import Fault, Finding
from unickpt.steering.state.history import count, seconds
from unickpt.steering.wire.codec import SteeringError

MOST_FINDINGS, MOST_NAMES, LONGEST_TEXT = 64, 4096, 4096  # of a report; names and ranks of a finding; characters


@dataclass(frozen=True, slots=True)
class HubReport:
    """One report.

    Attributes:
        epoch: round that it is about.
        step: furthest step of its ranks; 0 if unknown.
        pause_s: longest time that ranks have waited for one another and then gone on.
        findings: what is wrong.
    """

    epoch: tuple[int, int]
    step: int = 0
    pause_s: float = 0.0
    findings: tuple[Finding, ...] = ()


def report_as_json(report: HubReport) -> dict[str, Any]:
    """Return a report as JSON types."""
    findings = [
        {**asdict(each), "fault": each.fault.value, "hardware": each.hardware.value} for each in report.findings[:MOST_FINDINGS]
    ]
    return {"epoch": report.epoch, "step": report.step, "pause_s": report.pause_s, "findings": findings}


def report_from_json(value: Any) -> HubReport:
    """Return the report that another process has made.

    Raises:
        SteeringError: the value is not a report.
    """
    try:
        term, number = value["epoch"]
        findings = value["findings"]
        if not isinstance(findings, list) or len(findings) > MOST_FINDINGS:
            raise ValueError("too many findings")
        epoch = (count(term), count(number))
        return HubReport(epoch, count(value["step"]), seconds(value["pause_s"]), tuple(_finding(each) for each in findings))
    except (KeyError, TypeError, ValueError, OverflowError) as err:
        raise SteeringError(f"not a report: {type(err).__name__}: {err}") from None


def _finding(value: Any) -> Finding:
    names = {field.name for field in fields(Finding)}
    if set(value) != names:
        raise ValueError(f"a finding has {sorted(names)}")
    gain = seconds(value["gain"])
    if gain > 1 or not isinstance(value["at_work"], bool):
        raise ValueError("a gain above 1, or at_work is not a boolean")
    return Finding(
        fault=Fault(value["fault"]),
        hosts=tuple(_text(host) for host in _items(value["hosts"])),
        age_s=seconds(value["age_s"]),
        still_s=seconds(value["still_s"]),
        same_place_s=seconds(value["same_place_s"]),
        at_work=value["at_work"],
        gain=gain,
        blamed=_text(value["blamed"]),
        text=_text(value["text"]),
        ranks=tuple(count(rank) for rank in _items(value["ranks"])),
        hardware=Weight(value["hardware"]),
    )


def _items(value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)) or len(value) > MOST_NAMES:
        raise ValueError("not a list, or too long")
    return list(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise ValueError("not a text, or too long")
    return value
