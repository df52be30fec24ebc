"""All pictures of a job on one HTML page that needs nothing else: no server, no network, no other file.

Labels, hosts and messages come from files that anybody may have written. They reach the page as JSON in which ``<``, ``>`` and
``&`` are escaped, the script puts them there as text and never as markup, and the page's own policy lets no script run
but that one.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.verdicts import Verdict
from unickpt.errors import StorageError
from unickpt.timing.ranks import progressions
from unickpt.timing.records import Op, bytes_in
from unickpt.views.gathering import OP_NAMES, View, unended
from unickpt.views.lateness import MEASURES, Floats, StepTable, by_step
from unickpt.views.timeline import KINDS, timeline
from unickpt.views.transfers import delay_matrix, transfers
from unickpt.views.waiting import elsewhere, waiting_now

# What a page may hold, so that it stays small and drawable; where more is there, the page says so.
MOST_ROWS, MOST_COLUMNS = 1024, 120  # of the heat map: ranks, steps
MOST_LINES = 128  # of the timeline
MOST_PAIRS = 8000  # of the delay matrix, for each class of sizes
MOST_CALLS, MOST_GROUPS, MOST_VERDICTS = 64, 100, 50
EACH_RANK, EACH_GROUP = 32, 24  # up to so many ranks and groups have a line each
_UNKNOWN = 65535

Verdicts = Sequence[tuple[Verdict, str]]


def write_report(view: View, verdicts: Verdicts, path: Path) -> None:
    """Write the page.

    Raises:
        StorageError: it cannot be written; what was there before stays.
    """
    fresh = path.with_name(f"{path.name}.part")
    try:
        fresh.write_text(page(contents(view, verdicts)), encoding="utf-8")
        fresh.replace(path)
    except OSError as err:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise StorageError(f"{path}: the report cannot be written ({err})") from err


def page(data: dict[str, Any]) -> str:
    """The HTML; ``data`` is what ``contents`` returns."""
    here = Path(__file__).parent
    template, script = ((here / name).read_text(encoding="utf-8") for name in ("report.html", "report.js"))
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    before, _, rest = template.replace("{{digest}}", f"sha256-{digest}").partition("{{data}}")
    between, _, after = rest.partition("{{script}}")
    return "".join([before, text, between, script, after])


def contents(view: View, verdicts: Verdicts) -> dict[str, Any]:
    """What the page shows, as JSON takes it. Times are in nanoseconds, moments on the job's clock in milliseconds."""
    table = by_step(view)
    hosts = sorted({rank.ring.identity.host for rank in view.ranks.values()})
    return {
        "job": view.job,
        "world": view.world,
        "missing": _shortened([rank for rank in range(view.world) if rank not in view.ranks]),
        "hosts": len(hosts),
        "host": hosts[0] if len(hosts) == 1 else "",
        "read_ms": view.read_ns / 1e6,
        "records": sum(len(rank.records) for rank in view.ranks.values()),
        "steps": [int(table.steps[0]), int(table.steps[-1])] if len(table.steps) else None,
        "unreadable": list(view.unreadable[:MOST_VERDICTS]),
        "places": {number: rank.place for number, rank in view.ranks.items()},
        "verdicts": [
            {"syndrome": verdict.syndrome.value, "ranks": _shortened(verdict.ranks), "told": told}
            for verdict, told in verdicts[:MOST_VERDICTS]
        ],
        "verdicts_in_all": len(verdicts),
        "waiting": _waiting(view, verdicts),
        "heat": _heat(table),
        "timeline": _timeline(view, verdicts, table),
        "delays": _delays(view),
        "groups": _groups(view),
    }


def _shortened(ranks: Sequence[int]) -> str:
    """``0 to 3, 8 to 56 by 8``."""
    told = []
    for first, step, count in progressions(sorted(ranks))[:12]:
        last = first + step * (count - 1)
        far = f"{first} to {last}" + (f" by {step}" if step > 1 else "")
        told.append(far if count > 2 else ", ".join(map(str, range(first, last + 1, step))))
    more = len(ranks) - sum(count for _, _, count in progressions(sorted(ranks))[:12])
    return ", ".join(told) + (f" and {more} more" if more else "")


# ---------------------------------------------------------------- who waits for whom


def _waiting(view: View, verdicts: Verdicts) -> dict[str, Any]:
    """Rows in the order of the parallel layout, with the rows that each waits for.

    One row for each rank of a small job; of a large one a row for each call, and for each rank that others wait for.
    """
    calls = waiting_now(view)
    others = elsewhere(view, calls)
    wanted = {rank for call in calls for rank in call.waited_for} | {rank for verdict, _ in verdicts for rank in verdict.ranks}
    rows: list[dict[str, Any]] = []
    for call in calls:
        for ranks in [(rank,) for rank in call.ranks] if len(view.ranks) <= EACH_RANK else [call.ranks]:
            what = f"waits in {call.what} of {view.groups[call.group].label}"
            rows.append({"ranks": ranks, "what": what, "for": call.waited_for, "since": call.since_ns, "kind": "waits"})
    for rank in sorted(wanted - set(view.ranks)):
        rows.append({"ranks": (rank,), "what": "has no ring here", "for": (), "since": 0, "kind": "held"})
    plain = 0
    for other in others:
        if len(view.ranks) > EACH_RANK and other.rank not in wanted:
            plain += 1
            continue
        kind = "held" if other.rank in wanted else "runs"
        rows.append({"ranks": (other.rank,), "what": other.doing, "for": (), "since": other.since_ns, "kind": kind})
    cut = max(len(rows) - MOST_CALLS, 0)
    if cut:  # those that others wait for first, and then where most wait
        rows = sorted(rows, key=lambda row: (row["kind"] != "held", -len(row["ranks"])))[:MOST_CALLS]
    rows.sort(key=lambda row: row["ranks"])
    at = {rank: place for place, row in enumerate(rows) for rank in row["ranks"]}
    return {
        "rows": [
            {
                **row,
                "ranks": _shortened(row["ranks"]),
                "count": len(row["ranks"]),
                "place": view.ranks[row["ranks"][0]].place if len(row["ranks"]) == 1 and row["ranks"][0] in view.ranks else "",
                "for": _shortened(row["for"]),
                "to": sorted({at[rank] for rank in row["for"] if rank in at}),
                "since": max(view.read_ns - row["since"], 0) if row["since"] else None,
            }
            for row in rows
        ],
        "plain": plain,
        "cut": cut,
    }  # fmt: skip


# ---------------------------------------------------------------- heat map


def _heat(table: StepTable) -> dict[str, Any]:
    """Matrices as base64 of little-endian 16-bit numbers, times ``unit`` nanoseconds."""
    rows, per_row = _blocks(len(table.ranks), MOST_ROWS)
    columns, per_column = _blocks(len(table.steps), MOST_COLUMNS)
    return {
        "ranks": table.ranks[rows].tolist(),
        "steps": table.steps[columns].tolist(),
        "last_rank": int(table.ranks[-1]) if len(table.ranks) else 0,
        "ranks_per_row": per_row,
        "steps_per_column": per_column,
        "measures": {
            name: _encoded(_largest(table.values[name], rows, columns)) for name in MEASURES if len(rows) and len(columns)
        },
    }


def _blocks(count: int, most: int) -> tuple[npt.NDArray[np.int64], int]:
    """Where blocks of equal length begin, so that there are not too many, and that length."""
    length = -(-count // most) if count else 1
    return np.arange(0, count, length), length


def _largest(values: Floats, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> Floats:
    """The largest known value of each block."""
    return np.asarray(np.fmax.reduceat(np.fmax.reduceat(values, rows, axis=0), columns, axis=1), np.float64)


def _encoded(values: Floats) -> dict[str, Any]:
    known = values[np.isfinite(values)]
    most = float(known.max(initial=0.0))
    unit = max(most / (_UNKNOWN - 1), 1.0)
    whole = np.where(np.isfinite(values), np.clip(np.nan_to_num(values) / unit, 0, _UNKNOWN - 1), _UNKNOWN)
    top = 0.0  # of the colours: not set by a few cells, but by a row that is often so
    if len(known):
        rows = np.sort(np.where(np.isfinite(values), values, -np.inf), axis=1)
        top = max(float(np.percentile(known, 97)), float(rows[:, rows.shape[1] // 2].max()))
    return {"unit": unit, "top": max(top, 0.0), "most": most, "data": _base64(np.round(whole).astype("<u2"))}


def _base64(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


# ---------------------------------------------------------------- timeline, delays, groups


def _timeline(view: View, verdicts: Verdicts, table: StepTable) -> dict[str, Any]:
    """If there are more ranks than lines: those with a verdict, those that came latest, and others at equal distances."""
    ranks = list(view.ranks)
    if len(ranks) > MOST_LINES:
        late = np.nan_to_num(table.values["behind_median"][:, -8:]).max(axis=1, initial=0)
        chosen = [rank for verdict, _ in verdicts for rank in verdict.ranks if rank in view.ranks]
        latest = np.argsort(-late, kind="stable")[: MOST_LINES // 4]
        chosen += table.ranks[latest[late[latest] > 0]].tolist()
        spread = np.linspace(0, len(ranks) - 1, MOST_LINES).astype(int)
        chosen = list(dict.fromkeys(chosen))[: MOST_LINES // 2]
        rest = [ranks[at] for at in spread if ranks[at] not in set(chosen)]
        kept = np.linspace(0, len(rest) - 1, min(MOST_LINES - len(chosen), len(rest))).astype(int)
        ranks = sorted({*chosen, *(rest[at] for at in kept)})
    drawn = timeline(view, ranks)
    return {
        "ranks": list(drawn.ranks),
        "of": len(view.ranks),
        "begin_ms": drawn.begin_ns / 1e6,
        "length": drawn.end_ns - drawn.begin_ns,
        "parts": drawn.kinds.shape[1],
        "kinds": list(KINDS),
        "data": _base64(drawn.kinds),
        "steps": [[number, begin - drawn.begin_ns] for number, begin in drawn.steps],
        "goes_on_s": drawn.goes_on_s,
    }


def _delays(view: View) -> dict[str, Any]:
    """``cells``: class of sizes -> ``[source, destination, median, count]``; the slowest, if there are too many."""
    made = delay_matrix(transfers(view))
    cells: dict[int, list[list[float]]] = {}
    for delay in made:
        row = [delay.source, delay.destination, delay.median_ns, delay.count]
        cells.setdefault(delay.size_class, []).append(row)
    in_all = {size: len(rows) for size, rows in cells.items()}
    kept = {size: sorted(rows, key=lambda row: -row[2])[:MOST_PAIRS] for size, rows in cells.items()}
    return {"cells": kept, "in_all": in_all}


def _groups(view: View) -> dict[str, Any]:
    """By what their members have given; a collective counts once for each member. Of many groups those of a label are one."""
    counts = np.zeros((len(view.groups), 3), np.int64)  # calls, bytes, calls that have not ended
    ops = np.zeros((len(view.groups), max(Op) + 1), np.int64)
    known = np.array([group.ends_known for group in view.groups], bool)
    for rank in view.ranks.values():
        calls = rank.group >= 0
        at, records = rank.group[calls], rank.records[calls]
        each = np.stack([np.ones(len(at), np.int64), bytes_in(records), unended(rank, known)[calls]], axis=1)
        np.add.at(counts, at, each)
        np.add.at(ops, (at, records["op"]), 1)
    alike: dict[tuple[object, ...], list[int]] = {}
    for group in view.groups:
        of = (group.label, group.backend, len(group.ranks), -1 if len(view.groups) > EACH_GROUP else group.number)
        alike.setdefault(of, []).append(group.number)
    rows = []
    for (label, backend, members, _), numbers in alike.items():
        calls, size_bytes, going = counts[numbers].sum(axis=0).tolist()
        of_op = ops[numbers].sum(axis=0)
        rows.append(
            {
                "label": label,
                "name": view.groups[numbers[0]].name if len(numbers) == 1 else "",
                "backend": backend,
                "groups": len(numbers),
                "members": members,
                "ranks": _shortened(view.groups[numbers[0]].ranks.tolist()) if len(numbers) == 1 else "",
                "calls": calls,
                "bytes": size_bytes,
                "going": going,
                "ops": ", ".join(f"{OP_NAMES[op]} {of_op[op]:,}" for op in np.argsort(-of_op)[:4].tolist() if of_op[op]),
            }
        )
    rows.sort(key=lambda row: (-row["bytes"], -row["calls"]))
    return {"rows": rows[:MOST_GROUPS], "kinds": len(rows), "in_all": len(view.groups)}
