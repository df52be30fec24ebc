"""Report on a job as one HTML page that needs no server, no network and no other file.

Labels, hosts and messages are untrusted. They are embedded as JSON with ``<``, ``>`` and ``&`` escaped, the script inserts
them as text and never as markup, and the page's content security policy allows only that script.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats, Ints
from unickpt.base.errors import StorageError
from unickpt.base.memory_status import MemoryStatus
from unickpt.base.witness_notes import WitnessNote
from unickpt.diagnosis.detectors.verdicts import Verdict
from unickpt.diagnosis.host.stack_dumps import Frame
from unickpt.diagnosis.recording.rank_ranges import progressions
from unickpt.diagnosis.recording.records import Op, bytes_in
from unickpt.diagnosis.reports.arrivals import MEASURES, StepTable, by_step
from unickpt.diagnosis.reports.checkpoint_io import CheckpointIo, checkpoint_io
from unickpt.diagnosis.reports.job_records import OP_NAMES, JobRecords, unended
from unickpt.diagnosis.reports.timeline import KINDS, timeline
from unickpt.diagnosis.reports.transfer_delays import delay_matrix, transfer_times
from unickpt.diagnosis.reports.verdict_line import MOST_HOSTS
from unickpt.diagnosis.reports.verdict_text import VerdictText
from unickpt.diagnosis.reports.wait_table import rank_activities, wait_rows
from unickpt.diagnosis.reports.wording import clock_time

# Limits that keep a page small. The page says what it leaves out.
MOST_ROWS, MOST_COLUMNS = 1024, 120  # of the heat map: ranks, steps
MOST_LINES = 128  # of the timeline
MOST_PAIRS = 8000  # of the delay matrix, for each class of sizes
MOST_CALLS, MOST_GROUPS, MOST_VERDICTS, MOST_NOTES = 64, 100, 50, 8
EACH_RANK, EACH_GROUP = 32, 24  # up to this number, each rank and group has a line
_UNKNOWN = 65535

Verdicts = Sequence[tuple[Verdict, VerdictText]]


def write_report(data: dict[str, Any], path: Path) -> None:
    """Write the page; ``data`` is the result of ``contents``.

    Raises:
        StorageError: the page cannot be written. An existing file is unchanged.
    """
    fresh = path.with_name(f"{path.name}.part")
    try:
        fresh.write_text(page(data), encoding="utf-8")
        fresh.replace(path)
    except OSError as err:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise StorageError(f"{path}: the report cannot be written ({err})") from err


def page(data: dict[str, Any]) -> str:
    """Return the HTML of a page; ``data`` is the result of ``contents``."""
    here = Path(__file__).parent
    template, script = ((here / name).read_text(encoding="utf-8") for name in ("report.html", "report.js"))
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    before, _, rest = template.replace("{{digest}}", f"sha256-{digest}").partition("{{data}}")
    between, _, after = rest.partition("{{script}}")
    return "".join([before, text, between, script, after])


def memory_section(status: MemoryStatus | None, now_s: float) -> dict[str, Any] | None:
    """Return the state of the memory tier for ``contents``; None without a tier. ``now_s``: seconds since the epoch."""
    return None if status is None else {**status.as_json(), "age_s": max(now_s - status.begun_s, 0.0)}


def contents(
    job: JobRecords,
    verdicts: Verdicts,
    rounds: dict[str, Any] | None = None,
    memory: dict[str, Any] | None = None,
    prices: dict[str, Any] | None = None,
    notes: Sequence[WitnessNote] = (),
) -> dict[str, Any]:
    """Return the data of a page as JSON types: durations in nanoseconds, times on the job's clock in milliseconds.

    Args:
        job: records of the job. It may have none, if there are rounds.
        verdicts: verdicts on the job, with their texts.
        rounds: history of the job, from ``unickpt.steering.state.timeline.as_json``.
        memory: state of the memory tier, from ``memory_section``.
        prices: result of a replay, from ``unickpt.planning.replay.price.WhatIf.for_report``.
        notes: what the witness of the job has found, the newest last. It comes first among the verdicts.
    """
    table = by_step(job)
    hosts = sorted({rank.ring.identity.host for rank in job.ranks.values()})
    return {
        "job": job.name,
        "world": job.world,
        "missing": _shortened([rank for rank in range(job.world) if rank not in job.ranks]),
        "hosts": len(hosts),
        "host": hosts[0] if len(hosts) == 1 else "",
        "read_ms": job.read_ns / 1e6,
        "records": sum(len(rank.records) for rank in job.ranks.values()),
        "steps": [int(table.steps[0]), int(table.steps[-1])] if len(table.steps) else None,
        "unreadable": list(job.unreadable[:MOST_VERDICTS]),
        "places": {number: rank.place for number, rank in job.ranks.items()},
        "verdicts": [*map(_noted, reversed(notes[-MOST_NOTES:]))]
        + [
            {
                "syndrome": verdict.syndrome.value,
                "meaning": verdict.syndrome.meaning,
                "ranks": _shortened(verdict.ranks),
                "hosts": list(verdict.hosts[:MOST_HOSTS]),
                "at": _frame(verdict.at),
                "waits_at": _frame(verdict.waits_at),
                "since": text.since,
                "command": text.command,
                "line": text.line,
                "sentence": text.sentence,
                "next": text.next,
            }
            for verdict, text in verdicts[:MOST_VERDICTS]
        ],
        "verdicts_in_all": len(verdicts) + len(notes),
        "waiting": _waiting(job, verdicts),
        "heat": _matrices(table.ranks, table.steps, {name: table.values[name] for name in MEASURES}),
        "timeline": _timeline(job, verdicts, table),
        "delays": _delays(job),
        "rounds": rounds,
        "memory": memory,
        "prices": prices,
        "io": _io(checkpoint_io(job)),
        "groups": _groups(job),
    }


def _noted(found: WitnessNote) -> dict[str, Any]:
    return {
        "syndrome": found.kind,
        "meaning": "the witness has found wrong numbers, or numbers that are not finite",
        "ranks": _shortened(sorted(found.ranks)),
        "hosts": list(dict.fromkeys(found.hosts))[:MOST_HOSTS],
        "at": "",
        "waits_at": "",
        "since": clock_time(found.at_ns),
        "command": "",
        "line": "",
        "sentence": found.text,
        "next": found.next,
    }


def _frame(frame: Frame | None) -> str:
    return f"{frame.file}:{frame.line}" if frame is not None else ""


def _shortened(ranks: Sequence[int]) -> str:
    """``0 to 3, 8 to 56 by 8``."""
    parts = []
    for first, step, count in progressions(sorted(ranks))[:12]:
        last = first + step * (count - 1)
        far = f"{first} to {last}" + (f" by {step}" if step > 1 else "")
        parts.append(far if count > 2 else ", ".join(map(str, range(first, last + 1, step))))
    more = len(ranks) - sum(count for _, _, count in progressions(sorted(ranks))[:12])
    return ", ".join(parts) + (f" and {more} more" if more else "")


# ---------------------------------------------------------------- current waits


def _waiting(job: JobRecords, verdicts: Verdicts) -> dict[str, Any]:
    """Return rows, ranks that others wait for first, with the rows that each waits for.

    A small job has a row for each rank that waits, a large one for each call. Ranks that wait for nothing, and that nobody
    waits for, have a row in a small job in which nothing is wrong.
    """
    calls = wait_rows(job)
    others = rank_activities(job, calls)
    wanted = {rank for call in calls for rank in call.waited_for} | {rank for verdict, _ in verdicts for rank in verdict.ranks}
    rows: list[dict[str, Any]] = []
    for call in calls:
        for ranks in [(rank,) for rank in call.ranks] if len(job.ranks) <= EACH_RANK else [call.ranks]:
            what = f"waits in {call.what} of {job.groups[call.group].label}"
            rows.append({"ranks": ranks, "what": what, "for": call.waited_for, "since": call.since_ns, "kind": "waits"})
    for rank in sorted(wanted - set(job.ranks)):
        rows.append({"ranks": (rank,), "what": "has no ring here", "for": (), "since": 0, "kind": "held"})
    plain = 0
    for other in others:
        if (wanted or len(job.ranks) > EACH_RANK) and other.rank not in wanted:
            plain += 1
            continue
        kind = "held" if other.rank in wanted else "runs"
        rows.append({"ranks": (other.rank,), "what": other.doing, "for": (), "since": other.since_ns, "kind": kind})
    cut = max(len(rows) - MOST_CALLS, 0)
    if cut:  # ranks that others wait for, then calls with most ranks
        rows = sorted(rows, key=lambda row: (row["kind"] != "held", -len(row["ranks"])))[:MOST_CALLS]
    rows.sort(key=lambda row: (row["kind"] != "held", row["ranks"]))
    at = {rank: place for place, row in enumerate(rows) for rank in row["ranks"]}
    return {
        "rows": [
            {
                **row,
                "ranks": _shortened(row["ranks"]),
                "count": len(row["ranks"]),
                "place": job.ranks[row["ranks"][0]].place if len(row["ranks"]) == 1 and row["ranks"][0] in job.ranks else "",
                "for": _shortened(row["for"]),
                "to": sorted({at[rank] for rank in row["for"] if rank in at}),
                "since": max(job.read_ns - row["since"], 0) if row["since"] else None,
            }
            for row in rows
        ],
        "plain": plain,
        "cut": cut,
    }


# ---------------------------------------------------------------- heat map


def _io(found: CheckpointIo) -> dict[str, Any] | None:
    """Return phases of checkpoints: ``time:PHASE`` in nanoseconds and ``size:PHASE`` in bytes. None if there are none."""
    if not found.summaries:
        return None
    values = {f"time:{name}": table for name, table in found.times.items()}
    values |= {f"size:{name}": table for name, table in found.sizes.items()}
    return {**_matrices(found.ranks, found.steps, values), "phases": [asdict(each) for each in found.summaries]}


def _matrices(ranks: Ints, steps: Ints, values: Mapping[str, Floats]) -> dict[str, Any]:
    """Return matrices ``[ranks, steps]`` as base64 of little-endian 16-bit numbers in units of ``unit``."""
    rows, per_row = _blocks(len(ranks), MOST_ROWS)
    columns, per_column = _blocks(len(steps), MOST_COLUMNS)
    return {
        "ranks": ranks[rows].tolist(),
        "steps": steps[columns].tolist(),
        "last_rank": int(ranks[-1]) if len(ranks) else 0,
        "ranks_per_row": per_row,
        "steps_per_column": per_column,
        "measures": {
            name: _encoded(np.fmax.reduceat(np.fmax.reduceat(table, rows, axis=0), columns, axis=1))  # the largest known value
            for name, table in values.items()
            if len(rows) and len(columns)
        },
    }


def _blocks(count: int, most: int) -> tuple[npt.NDArray[np.int64], int]:
    """Return the begins of at most ``most`` blocks of equal length, and that length."""
    length = -(-count // most) if count else 1
    return np.arange(0, count, length), length


def _encoded(values: Floats) -> dict[str, Any]:
    known = values[np.isfinite(values)]
    most = float(known.max(initial=0.0))
    unit = max(most / (_UNKNOWN - 1), 1.0)
    whole = np.where(np.isfinite(values), np.clip(np.nan_to_num(values) / unit, 0, _UNKNOWN - 1), _UNKNOWN)
    top = 0.0  # top of the colour scale: set by rows, not by a few cells
    if len(known):
        rows = np.sort(np.where(np.isfinite(values), values, -np.inf), axis=1)
        top = max(float(np.percentile(known, 97)), float(rows[:, rows.shape[1] // 2].max()))
    return {"unit": unit, "top": max(top, 0.0), "most": most, "data": _base64(np.round(whole).astype("<u2"))}


def _base64(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


# ---------------------------------------------------------------- timeline, delays, groups


def _timeline(job: JobRecords, verdicts: Verdicts, table: StepTable) -> dict[str, Any]:
    """Return the timeline. With too many ranks: those with a verdict, the latest ones, and others at equal distances."""
    ranks = list(job.ranks)
    if len(ranks) > MOST_LINES:
        late = np.nan_to_num(table.values["behind_median"][:, -8:]).max(axis=1, initial=0)
        chosen = [rank for verdict, _ in verdicts for rank in verdict.ranks if rank in job.ranks]
        latest = np.argsort(-late, kind="stable")[: MOST_LINES // 4]
        chosen += table.ranks[latest[late[latest] > 0]].tolist()
        spread = np.linspace(0, len(ranks) - 1, MOST_LINES).astype(int)
        chosen = list(dict.fromkeys(chosen))[: MOST_LINES // 2]
        rest = [ranks[at] for at in spread if ranks[at] not in set(chosen)]
        kept = np.linspace(0, len(rest) - 1, min(MOST_LINES - len(chosen), len(rest))).astype(int)
        ranks = sorted({*chosen, *(rest[at] for at in kept)})
    drawn = timeline(job, ranks)
    return {
        "ranks": list(drawn.ranks),
        "of": len(job.ranks),
        "begin_ms": drawn.begin_ns / 1e6,
        "length": drawn.end_ns - drawn.begin_ns,
        "parts": drawn.kinds.shape[1],
        "kinds": list(KINDS),
        "data": _base64(drawn.kinds),
        "steps": [[number, begin - drawn.begin_ns] for number, begin in drawn.steps],
        "goes_on_s": drawn.goes_on_s,
    }


def _delays(job: JobRecords) -> dict[str, Any]:
    """Return ``cells``: class of sizes -> ``[source, destination, median, count]``, the slowest if there are too many."""
    made = delay_matrix(transfer_times(job))
    cells: dict[int, list[list[float]]] = {}
    for delay in made:
        row = [delay.source, delay.destination, delay.median_ns, delay.count]
        cells.setdefault(delay.size_class, []).append(row)
    in_all = {size: len(rows) for size, rows in cells.items()}
    kept = {size: sorted(rows, key=lambda row: -row[2])[:MOST_PAIRS] for size, rows in cells.items()}
    return {"cells": kept, "in_all": in_all}


def _groups(job: JobRecords) -> dict[str, Any]:
    """Return groups by bytes sent. A collective counts once per member. With many groups, those with one label are combined."""
    counts = np.zeros((len(job.groups), 3), np.int64)  # calls, bytes, calls that have not ended
    ops = np.zeros((len(job.groups), max(Op) + 1), np.int64)
    known = np.array([group.ends_known for group in job.groups], bool)
    for rank in job.ranks.values():
        calls = rank.group >= 0
        at, records = rank.group[calls], rank.records[calls]
        each = np.stack([np.ones(len(at), np.int64), bytes_in(records), unended(rank, known)[calls]], axis=1)
        np.add.at(counts, at, each)
        np.add.at(ops, (at, records["op"]), 1)
    alike: dict[tuple[object, ...], list[int]] = {}
    for group in job.groups:
        of = (group.label, group.backend, len(group.ranks), -1 if len(job.groups) > EACH_GROUP else group.number)
        alike.setdefault(of, []).append(group.number)
    rows = []
    for (label, backend, members, _), numbers in alike.items():
        calls, size_bytes, going = counts[numbers].sum(axis=0).tolist()
        of_op = ops[numbers].sum(axis=0)
        rows.append(
            {
                "label": label,
                "name": job.groups[numbers[0]].name if len(numbers) == 1 else "",
                "backend": backend,
                "groups": len(numbers),
                "members": members,
                "ranks": _shortened(job.groups[numbers[0]].ranks.tolist()) if len(numbers) == 1 else "",
                "calls": calls,
                "bytes": size_bytes,
                "going": going,
                "ops": ", ".join(f"{OP_NAMES[op]} {of_op[op]:,}" for op in np.argsort(-of_op)[:4].tolist() if of_op[op]),
            }
        )
    rows.sort(key=lambda row: (-row["bytes"], -row["calls"]))
    return {"rows": rows[:MOST_GROUPS], "kinds": len(rows), "in_all": len(job.groups)}
