"""Trials of a library: jobs that save with it and jobs that load what these have saved, without and with the switch.

Each job is a torchrun of the module ``evidence.libraries.LIBRARY`` in the library's environment. It reads a ``Task`` and writes
a ``Result``. ``megatron_job`` has what such a job does around the library's calls.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from evidence.document import put
from evidence.libraries.environments import python_of
from tests.support.repository import REPO
from unickpt.testing.launch import command, finish, started

PAGE = REPO / "docs" / "evidence" / "libraries.md"
HEAD = """# Libraries

Do libraries on top of Megatron-core and DeepSpeed resume under another layout, with no line of theirs changed?

With `UNICKPT=1`, those of this page do.

Each row is two jobs. The first trains, saves by the library's own code and trains on. The second starts with another seed and
another layout, loads by the library's own code and trains on. Equal: every weight, master, moment, step and setting of the
optimizer, gathered, bit for bit. Difference: the largest between a loss of the second job and the same loss of the first.
"""
SAVED, EQUAL = "saved", "equal"
ABSENT = "absent"  # as a value of the switch: no hook of unickpt is installed
LIMIT = 1e-3  # losses of another layout differ by rounding
TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Trial:
    """A save under one layout and a load under another.

    Attributes:
        source, target: names of the layouts, in the words of the library's job. ``target`` '': nothing is loaded.
        ranks: processes of both.
        switch: value of ``UNICKPT`` in both jobs; ``ABSENT``: unickpt is not installed.
        options: settings of the library.
        expected: ``EQUAL``, or a part of the error of the load, of the library's own limit.
    """

    source: str
    target: str = ""
    ranks: tuple[int, int] = (2, 2)
    switch: str = "1"
    options: tuple[str, ...] = ()
    expected: str = EQUAL


@dataclass(frozen=True, slots=True)
class Task:
    """What a job does. The fields are those of a trial.

    Attributes:
        folder: where the library saves.
        notes: folder of what the saving job notes for the loading one.
        loads: whether the job loads.
        result: where it writes its ``Result``.
    """

    layout: str
    options: tuple[str, ...]
    folder: str
    notes: str
    loads: bool
    result: str

    @classmethod
    def read(cls, file: str) -> Task:
        values = json.loads(Path(file).read_text())
        return cls(**{**values, "options": tuple(values["options"])})


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a job.

    Attributes:
        losses: after the save or the load.
        problems: what differs after the load.
        error: of the job; '' if it ended well.
        seen: what the job has looked at besides, such as files.
    """

    losses: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    error: str = ""
    seen: Mapping[str, Any] = field(default_factory=dict)

    def write(self, task: Task) -> None:
        Path(task.result).write_text(json.dumps(asdict(self)))


class Trials:
    """Runs trials of one library in a folder. Each save runs once."""

    def __init__(self, library: str, python: str, folder: Path) -> None:
        self.library, self._python, self._folder = library, python, folder
        self._saves: dict[tuple[Any, ...], tuple[Path, Result]] = {}

    def saved(self, trial: Trial) -> tuple[Path, Result]:
        """Return the folder of the saving job of a trial, and its result. The library has saved in ``ck``."""
        key = trial.source, trial.switch, trial.options
        if key not in self._saves:
            place = self._folder / str(len(self._saves))
            self._saves[key] = place, self._run(place, trial, trial.source, trial.ranks[0], loads=False)
        return self._saves[key]

    def loaded(self, trial: Trial) -> Result:
        """Return the result of the loading job of a trial."""
        return self._run(self.saved(trial)[0], trial, trial.target, trial.ranks[1], loads=True)

    def row(self, trial: Trial) -> tuple[dict[str, str], bool]:
        """Run a trial. Return its row of the table, and whether it ended as expected."""
        outcome, difference = self._outcome(trial)
        print(trial, outcome, difference, flush=True)
        passed = trial.expected in outcome if trial.expected != EQUAL else outcome in (EQUAL, SAVED) and difference < LIMIT
        return {
            "`UNICKPT`": {"": "unset"}.get(trial.switch, f"`{trial.switch}`"),
            "settings": ", ".join(trial.options) or "-",
            "saved under": trial.source,
            "loaded under": trial.target or "-",
            "result": ("" if passed else "**not as expected:** ") + _cell(outcome),
            "difference": f"{difference:.1e}" if outcome == EQUAL and difference else "0" if outcome == EQUAL else "-",
        }, passed  # fmt: skip

    def _outcome(self, trial: Trial) -> tuple[str, float]:
        _, before = self.saved(trial)
        if before.error or not trial.target:
            return (f"save: {before.error}" if before.error else SAVED), 0.0
        after = self.loaded(trial)
        if after.error or after.problems:
            return after.error or "; ".join(after.problems[:3]), 0.0
        return EQUAL, max(abs(a - b) for a, b in zip(before.losses, after.losses, strict=True))

    def _run(self, place: Path, trial: Trial, layout: str, ranks: int, *, loads: bool) -> Result:
        folder, notes = place / "ck", place / "notes"
        for each in (folder, notes):
            each.mkdir(parents=True, exist_ok=True)
        name = f"{'load' if loads else 'save'}-{layout}"
        task = Task(layout, trial.options, str(folder), str(notes), loads, str(place / f"{name}.json"))
        (place / f"{name}.task.json").write_text(json.dumps(asdict(task)))
        env = {"UNICKPT": "" if trial.switch == ABSENT else trial.switch, "PYTHONDONTWRITEBYTECODE": "1"}
        env |= {"UNICKPT_AUTOLOAD": "0"} if trial.switch == ABSENT else {}
        module = f"evidence.libraries.{self.library}"
        program = [self._python, *command(ranks, "-m", module, str(place / f"{name}.task.json"))[1:]]
        job = started(program, subprocess.PIPE, REPO, {**_without_switches(), **env})
        try:
            output = finish(job, program, name, TIMEOUT_S, check=False).stdout
        except AssertionError as late:
            output = str(late)
        (place / f"{name}.log").write_text(output)
        if not Path(task.result).is_file():
            return Result(error=_last_error(output))
        return Result(**json.loads(Path(task.result).read_text()))


def _without_switches() -> dict[str, str]:
    return {key: "" for key in os.environ if key.startswith("UNICKPT_") and key != "UNICKPT_AUTOLOAD"}


def _last_error(output: str) -> str:
    """Return the last line of the output that names an error of the job itself."""
    lines = [line for line in output.splitlines() if "Error" in line and "ChildFailedError" not in line]
    return (lines or output.strip().splitlines() or ["no output"])[-1].strip()


def _cell(text: str) -> str:
    short = " ".join(text.split()).replace("|", "\\|")
    return short if len(short) < 240 else short[:240] + " ..."


def digests(folder: Path, *, leave_out: Callable[[str], bool] = lambda _: False) -> dict[str, str]:
    """Return the digest of every file below a folder, by its name in the folder."""
    return {
        name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not leave_out(name := str(file.relative_to(folder)))
    }


def main(
    library: str,
    title: str,
    trials: Sequence[Trial],
    text: str,
    more: Callable[[Trials], Iterator[tuple[str, bool]]] | None = None,
) -> int:
    """Run the trials of a library, print their table, and return 0 if all ended as expected, else 1.

    Args:
        library: name of its module and of its file of requirements.
        title: of its section: the library and its version.
        trials: rows of the table.
        text: of the section, below the table: what was not tested.
        more: further checks: sentences for the page, and whether they hold.
    """
    parser = argparse.ArgumentParser(prog=f"python -m evidence.libraries.{library}")
    parser.add_argument("--environments", type=Path, default=REPO / ".venv-libraries", help="folder of the environments")
    parser.add_argument("--folder", type=Path, help="where the jobs work (default: a temporary folder)")
    parser.add_argument("--only", nargs="+", type=int, help="numbers of the rows to run; the page is not written")
    parser.add_argument("--page", type=Path, help=f"the page whose section is replaced, {PAGE.relative_to(REPO)}")
    args = parser.parse_args()
    python = python_of(library, args.environments.resolve())
    with tempfile.TemporaryDirectory(prefix="unickpt-libraries-") as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        shutil.rmtree(folder / library, ignore_errors=True)
        run = Trials(library, python, folder / library)
        rows = [run.row(trial) for at, trial in enumerate(trials) if not args.only or at in args.only]
        checked = [] if more is None or args.only else list(more(run))
    table = _table(row for row, _ in rows)
    said = "\n".join(f"- {'' if passed else '**not as expected:** '}{sentence}" for sentence, passed in checked)
    print(f"{table}\n\n{said}")
    if args.page and not args.only:
        body = "\n\n".join(filter(None, (table.strip(), said, text.strip())))
        put(args.page, title, _section(library, title, body), HEAD)
    return int(not all(passed for _, passed in [*rows, *checked]))


def _section(library: str, title: str, body: str) -> str:
    ran = f"`python -m evidence.libraries.{library} --page {PAGE.relative_to(REPO)}`\n\n{machine()}, CPU and gloo"
    return f"<!-- {title} -->\n## {title}\n\n{body}\n\n{ran}\n<!-- end of {title} -->\n"


def _table(rows: Iterable[Mapping[str, str]]) -> str:
    lines = list(rows)
    columns = list(lines[0]) if lines else []
    cells = [columns, ["---"] * len(columns), *([row[column] for column in columns] for row in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
