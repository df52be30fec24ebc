"""Trials of a library: jobs that save with it and jobs that load what these have saved, without and with the switch.

Each job is a torchrun of the module ``evidence.libraries.LIBRARY`` in the library's environment. It reads a ``Task`` and writes
a ``Result``. ``megatron_job`` has what such a job does around the library's calls.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from benchmarks.measure import machine
from evidence.document import put
from evidence.libraries.environments import python_of
from tests.support.repository import REPO
from unickpt.testing.launch import command, finish, started

Row = TypeVar("Row")
PAGE = REPO / "docs" / "evidence" / "libraries.md"
HEAD = """# Libraries

Do libraries on top of Megatron-core, DeepSpeed and FSDP2 resume under another layout, with no line of theirs changed?

With `UNICKPT=1`, those of this page do, but for verl's manager of FSDP2. Libraries on FSDP2 do so without unickpt, too.
With the switch their checkpoints are those of every other framework, and are committed as a whole.

Each row is two jobs. The first trains, saves by the library's own code and trains on. The second starts with another seed and
another layout, loads by the library's own code and trains on. Equal: every weight, master, moment, step and setting of the
optimizer, gathered, bit for bit. Difference: the largest between a loss of the second job and the same loss of the first.
"""
SAVED, EQUAL = "saved", "equal"
ABSENT = "absent"  # as a value of the switch: no hook of unickpt is installed
LIMIT = 3e-3  # losses of bf16 models differ by rounding under another layout
TIMEOUT_S = 900.0
_TASK = ".task.json"
_ERROR = re.compile(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b")


@dataclass(frozen=True, slots=True)
class Trial:
    """A save under one layout and a load under another.

    Attributes:
        source, target: names of the layouts, in the words of the library's job. ``target`` '': nothing is loaded.
        ranks: processes of both.
        switch: value of ``UNICKPT``; ``ABSENT``: unickpt is not installed.
        switch_of_load: its value in the job that loads. None: the same.
        options: settings of the library.
        expected: ``EQUAL``, or a part of the error of the load, of the library's own limit.
    """

    source: str
    target: str = ""
    ranks: tuple[int, int] = (2, 2)
    switch: str = "1"
    options: tuple[str, ...] = ()
    expected: str = EQUAL
    switch_of_load: str | None = None

    def switched(self, *, loads: bool) -> str:
        """Return the value of the switch in one of the jobs."""
        return self.switch if not loads or self.switch_of_load is None else self.switch_of_load


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


def tasks_of(arguments: Sequence[str]) -> list[Task]:
    """Return the tasks of a job, which are its arguments; none for the program that starts the jobs."""
    return [Task.read(each) for each in arguments[1:] if each.endswith(_TASK)]


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a job.

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


def noted(task: Task, work: Callable[[], Result]) -> None:
    """Do a task in this rank of a job, and write its result. An error is the result, and ends the process."""
    rank = int(os.environ["RANK"])
    try:
        result = work()
    except BaseException as err:
        traceback.print_exc()
        if rank == 0:
            Result(error=f"{type(err).__name__}: {err}".strip().partition("\n")[0]).write(task)
        os._exit(1)  # ranks that wait for this one end with it
    if rank == 0:
        result.write(task)


class Trials:
    """Runs trials of one library in a folder. Each save runs once."""

    def __init__(self, library: str, python: str, folder: Path) -> None:
        self.library, self.python, self._folder = library, python, folder
        self._places: dict[tuple[Any, ...], Path] = {}

    def saved(self, trial: Trial) -> tuple[Path, Result]:
        """Return the folder of the saving job of a trial, and its result. The library has saved in ``ck``."""
        result = self._run(trial, loads=False)
        return self._places[trial.source, trial.switch, trial.options], result

    def tool(self, *arguments: str) -> bool:
        """Run a module of the library's environment without the switch. Return whether it ends well."""
        env = {**os.environ, "UNICKPT": "", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([self.python, "-m", *arguments], cwd=REPO, env=env, capture_output=True, text=True, check=False)
        print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
        return done.returncode == 0

    def at(self, trial: Trial, place: Path) -> None:
        """Let the folder of another library's saving job be that of a trial."""
        self._places[trial.source, trial.switch, trial.options] = place

    def loaded(self, trial: Trial) -> Result:
        """Return the result of the loading job of a trial."""
        return self._run(trial, loads=True)

    def row(self, trial: Trial) -> tuple[dict[str, str], bool]:
        """Run a trial. Return its row of the table, and whether it ended as expected."""
        outcome, difference = self._outcome(trial)
        print(trial, outcome, difference, flush=True)
        passed = trial.expected in outcome if trial.expected != EQUAL else outcome in (EQUAL, SAVED) and difference < LIMIT
        return {
            "`UNICKPT`": " → ".join(dict.fromkeys(_value(trial.switched(loads=loads)) for loads in (False, True))),
            "settings": ", ".join(trial.options) or "-",
            "saved under": _shown(trial.source),
            "loaded under": _shown(trial.target) or "-",
            "result": _cell(outcome, trial.expected) if passed else f"**not as expected:** {_cell(outcome)}",
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

    def ahead(self, trials: Sequence[Trial]) -> None:
        """Run the jobs of many trials, several tasks in one process: those of equal switches and numbers of ranks.

        The module of the library must run all of its tasks (``tasks_of``), one after the other, up to one that fails.
        """
        for loads in (False, True):
            jobs: dict[tuple[str, int], list[Task]] = {}
            for trial in trials:
                if not loads or (trial.target and not self.saved(trial)[1].error):
                    task = self._task(trial, loads=loads)
                    own = jobs.setdefault((trial.switched(loads=loads), trial.ranks[loads]), [])
                    own += [] if task in own else [task]
            for (switch, ranks), tasks in jobs.items():
                while left := [task for task in tasks if not Path(task.result).is_file()]:
                    self._start(left, switch, ranks)

    def _task(self, trial: Trial, *, loads: bool) -> Task:
        """Write the task of one of a trial's jobs."""
        key = trial.source, trial.switch, trial.options
        place = self._places.setdefault(key, self._folder / str(len(self._places)))
        layout = trial.target if loads else trial.source
        folder, notes = place / "ck", place / "notes"
        for each in (folder, notes):
            each.mkdir(parents=True, exist_ok=True)
        name = f"{'load' if loads else 'save'}-{layout}"
        if loads and trial.switch_of_load is not None:
            name += f"-{trial.switch_of_load or 'unset'}"
        task = Task(layout, trial.options, str(folder), str(notes), loads, str(place / f"{name}.json"))
        (place / f"{name}{_TASK}").write_text(json.dumps(asdict(task)))
        return task

    def _run(self, trial: Trial, *, loads: bool) -> Result:
        task = self._task(trial, loads=loads)
        if not Path(task.result).is_file():
            self._start([task], trial.switched(loads=loads), trial.ranks[loads])
        return Result(**json.loads(Path(task.result).read_text()))

    def _start(self, tasks: Sequence[Task], switch: str, ranks: int) -> None:
        """Run a job. Its first task without a result gets the error of the job as one."""
        env = {"UNICKPT": "" if switch == ABSENT else switch, "PYTHONDONTWRITEBYTECODE": "1"}
        env |= {"UNICKPT_AUTOLOAD": "0"} if switch == ABSENT else {}
        files = [task.result.removesuffix(".json") + _TASK for task in tasks]
        program = [self.python, *command(ranks, "-m", f"evidence.libraries.{self.library}", *files)[1:]]
        job = started(program, subprocess.PIPE, REPO, {**_without_switches(), **env})
        try:
            output = finish(job, program, files[0], TIMEOUT_S, check=False).stdout
        except AssertionError as late:
            output = str(late)
        Path(tasks[0].result).with_suffix(".log").write_text(output)
        for task in [task for task in tasks if not Path(task.result).is_file()][:1]:
            if not any(Path(each.result).is_file() and json.loads(Path(each.result).read_text())["error"] for each in tasks):
                Result(error=_last_error(output)).write(task)


def _without_switches() -> dict[str, str]:
    return {key: "" for key in os.environ if key.startswith("UNICKPT_") and key != "UNICKPT_AUTOLOAD"}


def _last_error(output: str) -> str:
    """Return the last line of the output that names an error of the job itself."""
    lines = [line for line in output.splitlines() if _ERROR.match(line) and "ChildFailedError" not in line]
    return (lines or output.strip().splitlines() or ["no output"])[-1].strip()


def _cell(outcome: str, expected: str = "") -> str:
    """Return the text of a cell. Of an expected error that is what was expected of it."""
    if expected not in ("", EQUAL, SAVED):
        return f"error: `{expected}`"
    short = " ".join(outcome.split()).replace("|", "\\|")
    return short if len(short) < 240 else short[:240] + " ..."


def _value(switch: str) -> str:
    return {"": "unset", ABSENT: "unickpt is not installed"}.get(switch, f"`{switch}`")


def _shown(layout: str) -> str:
    """Return a layout as pages name it: TP2 PP2 for ``gpt-tp2pp2-dist``. Other names are as they are."""
    found = re.fullmatch("(gpt|moe)-((?:[a-z]+[0-9]+)+)-dist", layout)
    if found is None:
        return layout
    return " ".join([*re.findall("[a-z]+[0-9]+", found[2].upper(), re.I), *(["(MoE)"] if found[1] == "moe" else [])])


def of_torch(switch: str = "1", options: tuple[str, ...] = ()) -> list[Trial]:
    """Return the trials of a library on FSDP2: two ranks, one rank, four, and replicas of shards."""
    targets = {"FSDP2 on 2": 2, "FSDP2 on 1": 1, "FSDP2 on 4": 4, "HSDP 2x2": 4}
    return [Trial("FSDP2 on 2", target, (2, ranks), switch, options) for target, ranks in targets.items()]


def digests(folder: Path, *, leave_out: Callable[[str], bool] = lambda _: False) -> dict[str, str]:
    """Return the digest of every file below a folder, by its name in the folder.

    Of PyTorch's ``.metadata`` the identity of the save, the path and the order of entries are left out, and addresses in memory
    of YAML files. They differ between any two saves.
    """
    return {
        name: hashlib.sha256(_content(file)).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not leave_out(name := str(file.relative_to(folder)))
    }


def _content(file: Path) -> bytes:
    data = file.read_bytes()
    if file.suffix == ".yaml":
        return re.sub(rb" at 0x[0-9a-f]+>", b">", data)
    if file.name != ".metadata" or not data.startswith(pickle.PROTO):
        return data
    held = pickle.loads(data)
    entries = sorted(f"{key} {value}" for key, value in held.storage_data.items())
    return repr((held.state_dict_metadata, held.planner_data, held.version, entries)).encode()


def stand_in(*packages: str) -> None:
    """Put empty packages in place of those that import what a CPU or this Python lacks. Modules below them are real."""
    for name in (name for name in packages if name not in sys.modules):
        parent, _, own = name.rpartition(".")
        spec = None if parent else importlib.util.find_spec(name)
        places = sys.modules[parent].__path__ if parent else spec.submodule_search_locations if spec else ()
        module = ModuleType(name)
        module.__path__ = [f"{place}/{own}" if parent else place for place in places or ()]
        sys.modules[name] = module


def as_without_unickpt(library: str, places: Sequence[Path], *, but: str = "") -> tuple[str, bool]:
    """Return whether what several saving jobs have saved is the same: without unickpt, with the switch unset, and off.

    Args:
        library: its name in the sentence.
        places: folders of the jobs.
        but: name of a file that is not compared, since it has the path of the folder.
    """
    found = [digests(place / "ck", leave_out=lambda name: Path(name).name == but) for place in places]
    differ = sorted({name for each in found for name in each if len({other.get(name) for other in found}) > 1})
    said = (
        f"`UNICKPT` unset or `off`: the {len(found[0])} files that {library} writes without unickpt, byte for byte. Of "
        "PyTorch's `.metadata`, the identity of the save, the path and the order of entries are not compared"
    )
    return said + (f". Different: {', '.join(differ)}" if differ else ""), bool(found[0]) and not differ


def main(
    library: str,
    title: str,
    trials: Sequence[Trial],
    text: str,
    more: Callable[[Trials], Iterator[tuple[str, bool]]] | None = None,
    *,
    together: bool = False,
    environment: str = "",
    prepare: Callable[[Path, Path], None] | None = None,
) -> int:
    """Run the trials of a library, print their table, and return 0 if all ended as expected, else 1.

    Args:
        library: name of its module and of its file of requirements.
        title: of its section: the library and its version.
        trials: rows of the table.
        text: of the section, below the table: what was not tested.
        more: further checks: sentences for the page, and whether they hold.
        together: the jobs do several tasks each (``Trials.ahead``).
        environment: name of the file of requirements, if not the library's.
        prepare: called with the folder of the trials and that of the environments before they run.
    """
    parser = argparse.ArgumentParser(prog=f"python -m evidence.libraries.{library}")
    parser.add_argument("--environments", type=Path, default=REPO / ".venv-libraries", help="folder of the environments")
    parser.add_argument("--folder", type=Path, help="where the jobs work (default: a temporary folder)")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run of the same rows has left in --folder")
    parser.add_argument("--only", nargs="+", type=int, help="numbers of the rows to run; the page is not written")
    parser.add_argument("--page", type=Path, help=f"the page whose section is replaced, {PAGE.relative_to(REPO)}")
    args = parser.parse_args()
    python = python_of(environment or library, args.environments.resolve())
    with tempfile.TemporaryDirectory(prefix="unickpt-libraries-") as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        if not args.resume:
            shutil.rmtree(folder / library, ignore_errors=True)
        run = Trials(library, python, folder / library)
        if prepare is not None:
            prepare(folder / library, args.environments.resolve())
        chosen = [trial for at, trial in enumerate(trials) if not args.only or at in args.only]
        if together:
            run.ahead(chosen)
        rows = [run.row(trial) for trial in chosen]
        checked = [] if more is None or args.only else list(more(run))
    cells = table(row for row, _ in rows)
    said = "\n".join(f"- {'' if passed else '**not as expected:** '}{sentence}" for sentence, passed in checked)
    print(f"{cells}\n\n{said}")
    if args.page and not args.only:
        body = "\n\n".join(filter(None, (cells.strip(), said, text.strip())))
        put(args.page, title, section(library, title, body), HEAD)
    return int(not all(passed for _, passed in [*rows, *checked]))


def main_of_rows(
    program: str, title: str, text: str, rows: Iterable[Row], of: Callable[[Row, Path, Path], tuple[dict[str, str], bool]]
) -> int:
    """Do each row of a table, print it, and return 0 if all ended as expected, else 1.

    Args:
        program: name of the module.
        title, text: of its section.
        rows: of the table.
        of: does a row, given its folder and that of the environments. Returns its cells, and whether it ended as expected.
    """
    parser = argparse.ArgumentParser(prog=f"python -m evidence.libraries.{program}")
    parser.add_argument("--environments", type=Path, default=REPO / ".venv-libraries", help="folder of the environments")
    parser.add_argument("--folder", type=Path, help="where the jobs work (default: a temporary folder)")
    parser.add_argument("--page", type=Path, help=f"the page whose section is replaced, {PAGE.relative_to(REPO)}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unickpt-libraries-") as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        done = [of(row, folder, args.environments.resolve()) for row in rows]
    cells = table(row for row, _ in done)
    print(cells)
    if args.page:
        put(args.page, title, section(program, title, f"{cells}\n\n{text}"), HEAD)
    return int(not all(passed for _, passed in done))


def section(library: str, title: str, body: str) -> str:
    """Return a section of the page, with the command that makes it."""
    ran = f"`python -m evidence.libraries.{library} --page {PAGE.relative_to(REPO)}`\n\n{machine()}, CPU and gloo"
    return f"<!-- {title} -->\n## {title}\n\n{body}\n\n{ran}\n<!-- end of {title} -->\n"


def table(rows: Iterable[Mapping[str, str]]) -> str:
    """Return rows, which have the same columns, as a table."""
    lines = list(rows)
    columns = list(lines[0]) if lines else []
    cells = [columns, ["---"] * len(columns), *([row[column] for column in columns] for row in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
