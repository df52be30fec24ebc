"""The generated part of ``docs/evidence/benchmarks.md``: goals, one table and one picture per question."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.questions import (
    MEMORY_GOALS,
    MEMORY_QUESTIONS,
    OURS,
    QUESTIONS,
    Question,
    Result,
    answered,
    goals_table,
    memory_table,
    ratios,
    table,
    values,
)

REPO = Path(__file__).resolve().parent.parent
MEMORY_PAGE = REPO / "docs" / "evidence" / "memory.md"
PAGE, IMAGES = REPO / "docs" / "evidence" / "benchmarks.md", REPO / "docs" / "images"
BEGIN, END = "<!-- made by benchmarks/run.py -->", "<!-- end of benchmarks/run.py -->"
COLOURS = ("#2ca02c", "#1f77b4", "#d62728", "#ff7f0e", "#9467bd", "#8c564b", "#7f7f7f", "#e377c2")
MEMORY = (
    "State: masters and optimizer states of all ranks. On disk: one checkpoint, relative to the state. Peak: largest "
    "additional memory of a rank, relative to the bytes of one rank. The first save takes memory for staging and keeps it."
)


def write(path: Path, made: str, questions: Sequence[Question], results: Sequence[Result]) -> None:
    """Replace the generated part of a page by ``made``, and draw the pictures of its questions."""
    head, _, rest = path.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    path.write_text(f"{head}{BEGIN}\n\n{made}\n{END}{tail}")
    for question in questions:
        if answered(question, results):
            draw(question, results, IMAGES / f"benchmarks-{question.key}.png")


def sections(questions: Sequence[Question], results: Sequence[Result]) -> str:
    """Return a section with table and picture for each question that was measured."""
    lines = []
    for question in questions:
        if answered(question, results):
            lines += [f"## {question.title}", "", question.text, "", table(question, results), ""]
            lines += [f"![{question.title}](../images/benchmarks-{question.key}.png)", ""]
    return "\n".join(lines)


RULE = (
    "A goal is reached on a layout if the median round reaches it. Layouts with more ranks than the machine has cores have no "
    "part in the goals."
)


def memory_body(results: Sequence[Result], unavailable: Sequence[str]) -> str:
    """Return the generated Markdown of the page of the memory tier."""
    if not results:
        return ""
    goals = goals_table(results, MEMORY_GOALS)
    return "\n".join(
        ["## Goals", "", RULE, "", goals, "", *(f"{each}\n" for each in unavailable), sections(MEMORY_QUESTIONS, results)]
    )


def body(results: Sequence[Result], direct_io: str, unavailable: Sequence[str]) -> str:
    """Return the generated Markdown of the page of benchmarks.

    Args:
        results: of all benchmarks; see ``benchmarks.questions``.
        direct_io: Markdown of the benchmark of direct I/O; '' if it did not run.
        unavailable: sentences on peers that cannot run here.
    """
    lines = ["## Goals", "", RULE, "", goals_table(results), ""]
    lines += [line for each in unavailable for line in (each, "")]
    lines += [sections(QUESTIONS, results)]
    memory = memory_table(results)
    if memory:
        lines += ["## How much memory and how many bytes?", "", MEMORY, "", memory, ""]
    if direct_io:
        lines += ["## Direct I/O", "", direct_io.strip(), ""]
    return "\n".join(lines)


def draw(question: Question, results: Sequence[Result], path: Path) -> None:
    """Draw a table: a line per layout, a dot per column at the median of its ratio to the limit, whiskers for the rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = answered(question, results)
    columns = [column for column in question.columns if any(values(each, column) for each in rows)]
    figure, panel = plt.subplots(figsize=(10, 0.42 * len(rows) + 1.3), layout="constrained")
    limit = question.columns[0]
    for number, column in enumerate(columns[1:], 1):
        label: str | None = column.title
        for at, each in enumerate(reversed(rows)):
            seconds, base = values(each, column), values(each, limit)
            if not seconds:
                continue
            found = [a / b for a, b in zip(seconds, base, strict=True)]
            middle = statistics.median(found)
            spread = [[middle - min(found)], [max(found) - middle]]
            height = at + 0.09 * (len(columns) / 2 - number)
            panel.errorbar(middle, height, xerr=spread, fmt="o", markersize=5, color=COLOURS[number], elinewidth=1, label=label)
            label = None  # one entry in the legend
    panel.axvline(1, color=COLOURS[0], linewidth=1.5, label=f"limit: {limit.title}")
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_yticks(range(len(rows)), [each["title"] for each in reversed(rows)], fontsize=8)
    panel.set_xlabel(f"seconds relative to the limit ({limit.title}), logarithmic: less is better", fontsize=8)
    panel.tick_params(axis="x", labelsize=8)
    panel.grid(axis="x", which="both", linewidth=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def details(results: Sequence[Result]) -> str:
    """Return all measurements of results as text, with the ratios of the page."""
    lines = []
    for each in results:
        lines += ["", each["title"], each.get("heading", "")]
        width = max(len(name) for name in each["seconds"])
        for name, seconds in each["seconds"].items():
            lines.append(f"  {name:<{width}}  {statistics.median(seconds):8.3f} s  ({min(seconds):.3f} to {max(seconds):.3f})")
        for question in (*QUESTIONS, *MEMORY_QUESTIONS):
            for column in question.columns:
                found = ratios(question, each, column)
                if found:
                    base = question.columns[column.to == OURS].title
                    lines.append(f"  {question.key}: {column.title} / {base}: {statistics.median(found):.3f}")
        for key in ("bytes", "peaks", "read", "sent"):
            if key in each:
                lines.append(f"  {key}: {each[key]}")
    return "\n".join(lines)
