"""Results of the soak as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.sixty_four.soak.faults import KINDS
from evidence.steering.readings import seconds

QUARTERS = 4
HELD = {
    "harness_mb": "memory of the harness, MB",
    "harness_threads": "threads of the harness",
    "harness_descriptors": "descriptors of the harness",
    "agents_mb": "memory of the largest agent, MB",
    "agents_threads": "threads of an agent, at most",
    "agents_descriptors": "descriptors of an agent, at most",
    "ranks_mb": "memory of the largest rank, MB",
    "ranks_threads": "threads of a rank, at most",
    "ranks_descriptors": "descriptors of a rank, at most",
    "processes": "processes of the job",
    "shm_files": "files in the memory of all hosts",
    "shm_mb": "their size, MB",
    "disk_files": "files of checkpoints on disk",
    "disk_mb": "their size, MB",
    "temporary_files": "files in temporary folders",
    "machine_shm_files": "files of the job in the memory of the machine",
}


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; the last one may be torn."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def of(every: Iterable[Mapping[str, Any]], what: str) -> list[Mapping[str, Any]]:
    """Return the rows of faults or of pieces."""
    return [each for each in every if each["row"] == what]


def tables(every: Sequence[Mapping[str, Any]]) -> str:
    """Return Markdown: a sentence, the faults by kind, the pieces, what is held."""
    faults, pieces = of(every, "fault"), of(every, "piece")
    right = sum(not each["problems"] for each in faults)
    minutes = sum(each["minutes"] for each in pieces)
    useful, possible = (sum(each[name] for each in pieces) for name in ("useful_steps", "possible_steps"))
    share = f", effective training time {useful / possible:.1%}" if possible else ""
    if not faults:
        return "No faults yet.\n"
    head = f"{len(faults)} faults in {minutes:.0f} minutes, {right} right{share}."
    return "\n\n".join([head, _by_kind(faults), _pieces(pieces), _held(faults), _wrong(faults, pieces)]) + "\n"


def _by_kind(faults: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| fault | times | right | noticed | works again | all hosts work | steps done again |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, kind in KINDS.items():
        own = [each for each in faults if each["kind"] == name]
        if own:
            cells = [seconds([each[key] for each in own]) for key in ("noticed_s", "works_s", "all_s")]
            again = sorted(each["lost_steps"] for each in own)
            spread = str(again[0]) if again[0] == again[-1] else f"{again[0]} to {again[-1]}"
            lines.append(
                f"| {kind.title} | {len(own)} | {sum(not each['problems'] for each in own)} | {' | '.join(cells)} | {spread} |"
            )
    return "\n".join(lines)


def _pieces(pieces: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| piece | minutes | jobs | faults | useful of possible steps | compared with the uninterrupted run |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {number} | {each['minutes']:.0f} | {each['jobs']} | {each['faults']} | {each['useful_steps']:,} of "
        f"{each['possible_steps']:,.0f} ({each['useful_steps'] / max(1, each['possible_steps']):.0%}) | "
        f"{each['compared']:,} steps, {each['resumes']} resumes of a rank: {each['wrong'] or 'all equal'} |"
        for number, each in enumerate(pieces, 1)
    ]
    return "\n".join(lines)


def _held(faults: Sequence[Mapping[str, Any]]) -> str:
    """Return the largest value after a fault, in each quarter of the faults. Memory has the rings of up to two rounds."""
    size = -(-len(faults) // QUARTERS)
    quarters = [faults[at : at + size] for at in range(0, len(faults), size)] if len(faults) >= QUARTERS else [faults]
    titles = [f"faults {each[0]['number']} to {each[-1]['number']}" for each in quarters]
    lines = [
        f"| held after a fault, at most | {' | '.join(titles)} |",
        f"|---|{'---|' * len(quarters)}",
    ]
    for name, title in HELD.items():
        cells = [f"{max(each['held'][name] for each in quarter):.4g}" for quarter in quarters]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _wrong(faults: Sequence[Mapping[str, Any]], pieces: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"- fault {each['number']}, `{each['kind']}`: {'; '.join(each['problems'])}" for each in faults if each["problems"]
    ]
    lines += [f"- piece that ended at fault {each['last']}: {each['wrong']}" for each in pieces if each["wrong"]]
    return "Not right:\n\n" + "\n".join(lines) if lines else "Nothing was wrong."
