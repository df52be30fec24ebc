"""The questions of the benchmark page: which measurements answer each, the cells of its table, and the ratios of its history.

All results have the form that the benchmarks write with ``--json``: a list of dictionaries, one per layout, with ``title`` and
``seconds`` (measurement -> seconds of every round), and where it is known ``mine`` (bytes of one rank), ``ranks``, ``bytes``
(format -> bytes on disk), ``read`` and ``peaks`` (bytes).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Result = Mapping[str, Any]
LIMIT, OURS = "limit", "unickpt"  # what a column is compared with


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: heading, and label in the picture.
        names: measurements that it shows; the first that a result has.
        to: ``LIMIT``, ``OURS`` or "": with what the ratio compares it.
        is_peer: it is another program.
    """

    title: str
    names: tuple[str, ...]
    to: str = OURS
    is_peer: bool = True


@dataclass(frozen=True)
class Question:
    """A question, with one table and one picture.

    Attributes:
        key: part of the file name of the picture, and of the keys in the history.
        title: heading.
        text: the sentence below the heading.
        columns: the physical limit, unickpt, and the peers, in this order.
    """

    key: str
    title: str
    text: str
    columns: tuple[Column, ...]


def _limit(title: str, *names: str) -> Column:
    return Column(title, names, "", is_peer=False)


def _ours(*names: str) -> Column:
    return Column("unickpt", names, LIMIT, is_peer=False)


def _peer(title: str, *names: str) -> Column:
    return Column(title, names)


QUESTIONS = (
    Question(
        "stall",
        "How long does training stop?",
        "From the call of a save. DeepSpeed and FastPersist write while training waits; the others copy and write behind "
        "training.",
        (
            _limit("memory copy", "memory copy"),
            _ours("unickpt stall", "unickpt stall, asynchronous"),
            _peer("DeepSpeed", "DeepSpeed save"),
            _peer("FastPersist", "FastPersist save"),
            _peer("DCP async_save", "DCP async_save, stall"),
            _peer("torch_dist async, dp_reshardable", "dp_reshardable stall, asynchronous"),
            _peer("torch_dist async, fully_reshardable", "fully_reshardable stall, asynchronous"),
        ),
    ),
    Question(
        "step",
        "How much slower is a step beside a save?",
        "Training steps while a save is written in the background. The limit is a step alone.",
        (
            _limit("step alone", "step alone"),
            _ours("step beside unickpt"),
            _peer("DCP async_save", "step beside DCP"),
        ),
    ),
    Question(
        "safe",
        "When is the checkpoint safe?",
        "From the call of a save until the checkpoint is on stable storage. unickpt saves asynchronously, the peers "
        "synchronously, which is faster for them. DeepSpeed does not wait for the disk, so its time includes a `sync`.",
        (
            _limit("raw write", "raw write"),
            _ours("unickpt committed", "unickpt written, asynchronous"),
            _peer("DeepSpeed and sync", "DeepSpeed save and sync"),
            _peer("FastPersist", "FastPersist save"),
            _peer("DCP", "DCP save"),
            _peer("DCP async_save", "DCP async_save, written"),
            _peer("torch_dist, dp_reshardable", "dp_reshardable save"),
            _peer("torch_dist, fully_reshardable", "fully_reshardable save"),
        ),
    ),
    Question(
        "load-cache",
        "How long does a load from the page cache take?",
        "By the same layout. Under DeepSpeed, a load is reading and what the framework does with the data.",
        (
            _limit("checked raw read", "checked raw read"),
            _ours("unickpt load"),
            Column("unickpt, its reading", ("unickpt load, its reading",), LIMIT, is_peer=False),
            _peer("DeepSpeed", "DeepSpeed load"),
            _peer("DCP", "DCP load"),
            _peer("DCP with the weights", "DCP load with the weights"),
            _peer("torch_dist, dp_reshardable", "dp_reshardable load"),
            _peer("torch_dist, fully_reshardable", "fully_reshardable load"),
        ),
    ),
    Question(
        "load-disk",
        "How long does a load from the disk take?",
        "The same load after the page cache was dropped.",
        (
            _limit("checked raw read, uncached", "checked raw read, uncached"),
            _ours("unickpt load, uncached"),
            Column("unickpt, its reading", ("unickpt load, uncached, its reading",), LIMIT, is_peer=False),
            _peer("DeepSpeed", "DeepSpeed load, uncached"),
            _peer("DCP", "DCP load, uncached"),
            _peer("DCP with the weights", "DCP load with the weights, uncached"),
            _peer("torch_dist, dp_reshardable", "dp_reshardable load, uncached"),
            _peer("torch_dist, fully_reshardable", "fully_reshardable load, uncached"),
        ),
    ),
    Question(
        "reshard",
        "How long does a load under another layout take?",
        "DeepSpeed: another ZeRO stage, or without tensor and pipeline parallelism. Megatron: pipeline parallelism in place of "
        "tensor parallelism. From the page cache.",
        (
            _limit("checked raw read", "checked raw read"),
            _ours("unickpt load as another layout"),
            Column("unickpt, same layout", ("unickpt load",), is_peer=False),
            _peer("ds_to_universal + load_universal", "ds_to_universal + load_universal"),
            _peer("torch_dist, fully_reshardable", "fully_reshardable load as another layout"),
        ),
    ),
)

MEMORY_QUESTIONS = (
    Question(
        "memory-stall",
        "How long does a save into memory stop training?",
        "From the call until training goes on. NVRx replicates within the call, the others behind training.",
        (
            _limit("memory copy", "memory copy"),
            _ours("memory, stall"),
            Column("unickpt to disk", ("disk, stall",), LIMIT, is_peer=False),
            _peer("DCP async_save", "DCP async_save, stall"),
            _peer("NVRx", "NVRx, stall"),
        ),
    ),
    Question(
        "memory-copies",
        "When are the copies on the other host complete?",
        "unickpt: until every host has checked the bytes of the other. NVRx: until both hosts have written their files into "
        "memory; it checks nothing.",
        (
            _limit("TCP transfer", "TCP transfer"),
            _ours("memory, copies confirmed"),
            _peer("NVRx", "NVRx, replicated and written"),
        ),
    ),
    Question(
        "memory-step",
        "How much slower is a step beside the copies?",
        "A training step while the copies are made, on the same two cores.",
        (_limit("step alone", "step alone"), _ours("step beside the copies")),
    ),
    Question(
        "memory-load",
        "How long does a load from memory take?",
        "By the same layout. From disk: unickpt's load of the same state from the page cache.",
        (
            _limit("memory copy", "memory copy"),
            _ours("load from memory"),
            Column("unickpt from disk", ("load from disk",), LIMIT, is_peer=False),
        ),
    ),
    Question(
        "memory-lost",
        "How long does a load take after the loss of a host?",
        "Half of the ranks are on a new host and read the copies of the other one.",
        (_limit("TCP transfer", "TCP transfer"), _ours("load after the loss of a host")),
    ),
)


def values(result: Result, column: Column) -> Sequence[float]:
    """Return the seconds of every round; empty if the result has none."""
    return next((result["seconds"][name] for name in column.names if name in result["seconds"]), ())


def ratios(question: Question, result: Result, column: Column) -> list[float]:
    """Return a column relative to what it is compared with, round by round; empty if one of them is missing."""
    base = {LIMIT: question.columns[0], OURS: question.columns[1]}.get(column.to)
    if base is None:
        return []
    others, found = values(result, base), values(result, column)
    return [a / b for a, b in zip(found, others, strict=True)] if others and found else []


def short(found: Sequence[float]) -> str:
    """Return the median of ratios with their spread."""
    middle = statistics.median(found)
    digits = 2 if middle >= 0.1 else 4
    return f"{middle:.{digits}f} ({min(found):.{digits}f} to {max(found):.{digits}f})"


def answered(question: Question, results: Sequence[Result]) -> list[Result]:
    """Return the results that have the measurement of unickpt and the limit."""
    return [each for each in results if values(each, question.columns[0]) and values(each, question.columns[1])]


def table(question: Question, results: Sequence[Result]) -> str:
    """Return the Markdown table of a question: layouts as rows; limit, unickpt and peers as columns."""
    rows = answered(question, results)
    columns = [column for column in question.columns if any(values(each, column) for each in rows)]
    lines = [f"| layout | {' | '.join(column.title for column in columns)} |", "|---" * (1 + len(columns)) + "|"]
    for each in rows:
        cells = []
        for column in columns:
            seconds, ratio = values(each, column), ratios(question, each, column)
            cell = f"{statistics.median(seconds):.3f} s" if seconds else "-"
            cells.append(f"{cell}<br>{short(ratio)}" if ratio and column.to else cell)
        lines.append(f"| {each['title']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def memory_table(results: Sequence[Result]) -> str:
    """Return the table of bytes on disk, bytes read and peak memory; '' if no result has them."""
    formats: Sequence[str] = ("unickpt", "DeepSpeed", "FastPersist", "DCP", "dp_reshardable", "fully_reshardable")
    peaks: Sequence[str] = (
        "unickpt, first save",
        "unickpt save",
        "DeepSpeed save",
        "unickpt load",
        "DeepSpeed load",
        "DCP load",
    )
    rows = [each for each in results if each.get("bytes") and "mine" in each]
    if not rows:
        return ""
    formats = [name for name in formats if any(name in each["bytes"] for each in rows)]
    peaks = [name for name in peaks if any(name in each.get("peaks", {}) for each in rows)]
    heads = ["layout", "state, MB", *(f"{name} on disk" for name in formats), "unickpt reads of bytes needed"]
    heads += [f"peak, {name}" for name in peaks]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for each in rows:
        state = each["mine"] * each["ranks"]
        cells = [each["title"], f"{state / 1e6:,.0f}"]
        for name in formats:
            size = each["bytes"].get(name)
            cells.append(f"{size / 1e6:,.0f} MB<br>{size / state:.2f}" if size else "-")
        read, needed = each.get("read", {}).get("unickpt load", (0, 0))
        cells.append(f"{read / needed:.3f}" if needed else "-")
        for name in peaks:
            peak = each.get("peaks", {}).get(name)
            cells.append("-" if peak is None else f"{peak / 1e6:,.0f} MB<br>{peak / each['mine']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tracked(
    results: Sequence[Result], questions: Sequence[Question] = (*QUESTIONS, *MEMORY_QUESTIONS)
) -> Iterator[tuple[str, list[float]]]:
    """Yield the ratios of a history: key, and ratios round by round. All are better if they are smaller.

    The keys are ``QUESTION | LAYOUT | unickpt / OTHER``.
    """
    for question in questions:
        limit, ours, *others = question.columns
        for each in answered(question, results):
            yield f"{question.key} | {each['title']} | unickpt / {limit.title}", ratios(question, each, ours)
            for column in others:
                found = ratios(question, each, column)
                if found and column.is_peer:
                    yield f"{question.key} | {each['title']} | unickpt / {column.title}", [1 / value for value in found]
                elif found and column.to == LIMIT:
                    yield f"{question.key} | {each['title']} | {column.title} / {limit.title}", found
    for each in results:
        if "unickpt" in each.get("bytes", {}) and "mine" in each:
            size = each["bytes"]["unickpt"] / (each["mine"] * each["ranks"])
            yield f"bytes | {each['title']} | unickpt / state", [size]


@dataclass(frozen=True)
class Goal:
    """``ours`` takes at most ``factor`` times ``other``, plus ``plus_s`` seconds, in the median round."""

    text: str
    ours: tuple[str, ...]
    other: str
    factor: float = 1.0
    plus_s: float = 0.0


STALL = ("unickpt stall", "unickpt stall, asynchronous")
GOALS = (
    Goal("stall at most 1.15 memory copies plus 5 ms", STALL, "memory copy", 1.15, 0.005),
    Goal("stall 50 times shorter than DeepSpeed's save", STALL, "DeepSpeed save", 1 / 50),
    Goal("stall 5 times shorter than that of DCP's `async_save`", STALL, "DCP async_save, stall", 1 / 5),
    Goal("stall 5 times shorter than that of asynchronous `torch_dist`, `dp_reshardable`", STALL,
         "dp_reshardable stall, asynchronous", 1 / 5),
    Goal("the same, `fully_reshardable`", STALL, "fully_reshardable stall, asynchronous", 1 / 5),
    Goal("a step beside a save at most 10% longer", ("step beside unickpt",), "step alone", 1.1),
    Goal("committed within 1.15 raw writes", ("unickpt committed", "unickpt written, asynchronous"), "raw write", 1.15),
    Goal("reading from the page cache within 1.15 checked raw reads", ("unickpt load, its reading",), "checked raw read", 1.15),
    Goal("reading from the disk within 1.15 checked raw reads", ("unickpt load, uncached, its reading",),
         "checked raw read, uncached", 1.15),
    Goal("load faster than DeepSpeed's, page cache", ("unickpt load",), "DeepSpeed load"),
    Goal("load faster than DeepSpeed's, disk", ("unickpt load, uncached",), "DeepSpeed load, uncached"),
    Goal("load faster than DCP's, page cache", ("unickpt load",), "DCP load"),
    Goal("load faster than DCP's, disk", ("unickpt load, uncached",), "DCP load, uncached"),
    Goal("load faster than DCP's with the weights, page cache", ("unickpt load",), "DCP load with the weights"),
    Goal("load faster than DCP's with the weights, disk", ("unickpt load, uncached",), "DCP load with the weights, uncached"),
    Goal("load faster than `torch_dist`, page cache", ("unickpt load",), "dp_reshardable load"),
    Goal("load faster than `torch_dist`, disk", ("unickpt load, uncached",), "dp_reshardable load, uncached"),
    Goal("load under another layout within 1.15 of the same layout", ("unickpt load as another layout",), "unickpt load", 1.15),
    Goal("20 times faster than `ds_to_universal` and `load_universal`", ("unickpt load as another layout",),
         "ds_to_universal + load_universal", 1 / 20),
    Goal("5 times faster than `torch_dist` under another layout", ("unickpt load as another layout",),
         "fully_reshardable load as another layout", 1 / 5),
)  # fmt: skip


MEMORY_GOALS = (
    Goal("stall at most 1.15 memory copies", ("memory, stall",), "memory copy", 1.15),
    Goal("stall shorter than that of DCP's `async_save`", ("memory, stall",), "DCP async_save, stall"),
    Goal("stall shorter than that of NVRx", ("memory, stall",), "NVRx, stall"),
    Goal("copies confirmed after at most 1.3 TCP transfers", ("memory, copies confirmed",), "TCP transfer", 1.3),
    Goal("copies confirmed before those of NVRx are written", ("memory, copies confirmed",), "NVRx, replicated and written"),
    Goal("a step beside the copies at most 2% slower", ("step beside the copies",), "step alone", 1.02),
)


def goals_table(results: Sequence[Result], goals: Sequence[Goal] = GOALS) -> str:
    """Return the table of goals: on how many layouts each is reached, and the layout that misses it most.

    Layouts with more ranks than the machine has cores are left out, if the results say so with ``ranks`` and ``cores``.
    """
    lines = ["| goal | reached | furthest from it |", "|---|---|---|"]
    for goal in goals:
        reached, missed = 0, []
        for each in results:
            ours, other = values(each, Column("", goal.ours)), each["seconds"].get(goal.other, ())
            crowded = each.get("ranks", 0) > each.get("cores", math.inf)
            if crowded or not ours or not other:
                continue
            limits = [goal.factor * value + goal.plus_s for value in other]
            times = statistics.median(a / b for a, b in zip(ours, limits, strict=True))
            if times <= 1:
                reached += 1
            else:
                took = f"{times:.2f} times the goal ({statistics.median(ours):.3f} s)"
                missed.append((times, f"{each['title']}: {took}"))
        if reached or missed:
            worst = max(missed)[1] if missed else "-"
            lines.append(f"| {goal.text} | {reached} of {reached + len(missed)} layouts | {worst} |")
    return "\n".join(lines)
