"""Which checkpoints stay, and what the tracker file names at every moment, in jobs of the unmodified ``pretrain_gpt.py``.

    MEGATRON_LM=/path/to/Megatron-LM python -m evidence.megatron.retention --page docs/evidence/megatron-retention.md

A job saves after each of six iterations. Meanwhile this process reads its folder again and again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import runpy
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from pathlib import Path

from unickpt.checkpoint.checkpoint_folder import TRACKER

SAVES = 6
MODES = ("sync", "async")
RULES = {
    "--save-retain-interval 4": {4, 6},
    "--unickpt-keep-last 2": {5, 6},
    "--save-retain-interval 4 --unickpt-keep-last 2": {4, 5, 6},
}
POLLS = {"before a poll": {"WAIT_AFTER_SAVES": "2"}, "after a poll": {}}  # when an asynchronous save commits
FALL_BACKS = (None, 3, 6)  # iteration that Megatron saves in its own format
ARGUMENTS = (
    "--ckpt-format unickpt --save-interval 1 --train-iters {saves} --bf16 --use-distributed-optimizer --num-layers 2 "
    "--vocab-size 1023 --global-batch-size 2 --save {folder}"
)
ASYNC = "--async-save --unickpt-on-busy queue --unickpt-write-megabytes-per-second 8"


@dataclass(frozen=True)
class Case:
    """One job."""

    mode: str
    rule: str
    poll: str
    fall_back: int | None

    @property
    def expected(self) -> set[int]:
        """Iterations that stay. ``keep_last`` counts those in unickpt's format after a save in this format."""
        stays = RULES[self.rule]
        return stays | {4} if self.fall_back == 6 else stays


@dataclass
class Seen:
    """What was seen of a folder."""

    looks: int = 0
    wrong: list[str] = field(default_factory=list)
    newest: int = 0


def cases() -> list[Case]:
    """Return all jobs. A synchronous save has no poll."""
    return [
        Case(mode, rule, poll, fall_back)
        for mode, rule, poll, fall_back in product(MODES, RULES, POLLS, FALL_BACKS)
        if mode == "async" or poll == next(iter(POLLS))
    ]


def complete(folder: Path, iteration: int) -> bool:
    """Return whether a checkpoint of either format is complete."""
    place = folder / f"iter_{iteration:07d}"
    return (place / "manifest.json").is_file() or ((place / ".metadata").is_file() and (place / "metadata.json").is_file())


def iterations(folder: Path) -> set[int]:
    """Return the iterations that have a folder."""
    return {int(path.name[5:]) for path in folder.glob("iter_*")}


def tracked(folder: Path) -> str | None:
    """Return the text of the tracker file."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / TRACKER).read_text()
    return None


def look(folder: Path, seen: Seen) -> None:
    """Look at a folder once."""
    text = tracked(folder)
    if text is None:
        if seen.newest:
            seen.wrong.append("there is no tracker file any more")
        return
    seen.looks += 1
    if not text.isdigit():
        seen.wrong.append(f"the tracker file holds {text!r}")
    elif not complete(folder, int(text)) and tracked(folder) == text:
        seen.wrong.append(f"the tracker file names {text}, which is not complete")
    newest = max(filter(lambda at: complete(folder, at), iterations(folder)), default=0)
    if newest < seen.newest:
        seen.wrong.append(f"the newest complete checkpoint was {seen.newest}, and is {newest}")
    seen.newest = max(newest, seen.newest)


def start(case: Case, folder: Path) -> int:
    """Fork the process of a job. Returns its id."""
    child = os.fork()
    if child:
        return child
    os.environ.update(POLLS[case.poll] if case.mode == "async" else {})
    if case.fall_back:
        os.environ["FALL_BACK_AT"] = str(case.fall_back)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    log = os.open(folder.parent / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    given = f"{ARGUMENTS} {case.rule} {ASYNC if case.mode == 'async' else ''}".format(saves=SAVES, folder=folder)
    sys.argv = ["pretrain", *given.split()]
    runpy.run_module("tests.jobs.megatron.pretrain", run_name="__main__")
    sys.exit(0)


def run(case: Case, place: Path) -> Seen:
    """Run one job, and look at its folder until it has ended."""
    folder, seen = place / "checkpoints", Seen()
    folder.mkdir(parents=True)
    child, code = start(case, folder), None
    while code is None:
        look(folder, seen)
        done, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        time.sleep(0.0005)
    look(folder, seen)
    if code:
        seen.wrong.append(f"the job ended with {code}: {(place / 'log').read_text()[-800:]}")
    if tracked(folder) != str(SAVES):
        seen.wrong.append(f"the tracker file names {tracked(folder)} at the end")
    if iterations(folder) != case.expected:
        seen.wrong.append(f"iterations {sorted(iterations(folder))} stay, expected {sorted(case.expected)}")
    return seen


def page(found: dict[Case, Seen]) -> str:
    """Return the page of the documentation."""
    lines = [
        "# Megatron's retention",
        "",
        "Does the folder of a job always have a complete checkpoint, and the tracker file its name, while old ones are "
        "removed?",
        "",
        "`MEGATRON_LM=/path/to/Megatron-LM python -m evidence.megatron.retention --page docs/evidence/megatron-retention.md`",
        "",
        f"The unmodified `pretrain_gpt.py` of megatron-core {version('megatron-core')}, torch {version('torch')}, Python "
        f"{platform.python_version()}, CPU, one rank. A job saves after each of {SAVES} iterations. Asynchronous saves queue, "
        "and either two of them commit before the training loop polls the first, or they commit after polls. In some jobs "
        "Megatron saves one iteration in its own format, because unickpt cannot describe its state. Another process reads the "
        "folder all the time. At each look the tracker file has to name a complete checkpoint, and the newest complete "
        "checkpoint must not be older than at the look before.",
        "",
        f"**{len(found)} jobs, {sum(seen.looks for seen in found.values()):,} looks, "
        f"{sum(len(seen.wrong) for seen in found.values())} violations.**",
        "",
        "| saves | rule | commits | in Megatron's format | stays | looks | violations |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, seen in found.items():
        poll = case.poll if case.mode == "async" else "-"
        stays = ", ".join(map(str, sorted(case.expected)))
        wrong = "; ".join(seen.wrong) or "0"
        lines.append(f"| {case.mode} | `{case.rule}` | {poll} | {case.fall_back or '-'} | {stays} | {seen.looks:,} | {wrong} |")
    lines += [
        "",
        "`--unickpt-keep-last` counts the checkpoints in unickpt's format after a save in this format. So one more stays "
        "if the last save is Megatron's.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of jobs")
    given = parser.parse_args()
    sys.path.insert(1, os.environ["MEGATRON_LM"])
    from megatron_unickpt.testing import cpu

    cpu.adapt_megatron()
    import megatron.training.training  # noqa: F401 - once, for all jobs

    found: dict[Case, Seen] = {}
    root = Path(tempfile.mkdtemp())  # not in a block, which the end of a forked job would leave too
    for at, case in enumerate(cases()):
        if not given.only or at in given.only:
            found[case] = run(case, root / str(at))
            print(at, case, found[case], flush=True)
    shutil.rmtree(root)
    if given.page:
        given.page.write_text(page(found))
    sys.exit(any(seen.wrong for seen in found.values()))


if __name__ == "__main__":
    main()
