"""``unickpt replay-step``: compute a step twice from a checkpoint, compare, and say where it differs."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from unickpt.base.errors import ConfigError, NotACheckpointError
from unickpt.base.step_replay import REFUSED, VARIABLE, ReplayRequest, asked, write_request
from unickpt.base.switch import Switch, switch
from unickpt.checkpoint.format.manifest import Manifest
from unickpt.checkpoint.load.folders import all_manifests
from unickpt.checkpoint.storage.base import absolute, is_url
from unickpt.cli.exit_codes import DAMAGED, SOUND
from unickpt.cli.output import Output
from unickpt.training.witness.replay import texts
from unickpt.training.witness.replay.judging import Judgement, judge
from unickpt.training.witness.replay.records import read

JSON_SCHEMA = 1
_SAVED = "checkpoint"  # folder of the run that only loads the checkpoint of the last step
_AUTOLOADS = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "UNICKPT_AUTOLOAD")
_MOST = 100


def run(args: argparse.Namespace, out: Output) -> int:
    """Repeat and compare. Return 0 if all is equal, 1 if something differs.

    Raises:
        ConfigError: the arguments do not fit, the job has failed, or a rank has recorded nothing.
    """
    if args.compare is not None:
        if args.directory is not None or args.command:
            raise ConfigError("--compare FOLDER compares what was recorded; it takes no DIR and no COMMAND")
        return _told(args, out, _compared(args.compare))
    request, manifests = _request(args)
    folder = _folder(args.out, request.directory)
    reason = _why_not_against(request, manifests)
    requests = [replace(request, folder=str(folder / f"run{number}")) for number in range(1, args.times + 1)]
    if not reason:
        requests.append(replace(request, step=request.until, folder=str(folder / _SAVED)))
    if not args.command:
        for each in requests:
            write_request(each)
        _say_what_to_start(out, folder, requests)
        return SOUND
    program = shutil.which(args.command[0])
    if program is None:
        raise ConfigError(f"{args.command[0]}: no such program")
    _require_hooks()
    lines = Output.for_lines(out, as_json=args.json)
    for each in requests:
        write_request(each)
        lines.line(f"unickpt replay-step: {Path(each.folder).name}: {shlex.join(args.command)}")
        sys.stdout.flush()
        _start(program, args.command, each, as_json=args.json)
    return _told(args, out, _compared(folder, reason))


def _request(args: argparse.Namespace) -> tuple[ReplayRequest, dict[int, Manifest]]:
    """Return what is asked, and the manifests of the checkpoints by step.

    Raises:
        ConfigError, NotACheckpointError: an argument does not fit, or there is no such checkpoint.
    """
    if args.directory is None or args.step is None:
        raise ConfigError(f"name a folder and a step, such as: {_example()}")
    until = args.step + 1 if args.until is None else args.until
    if not 0 <= args.step < until or not 2 <= args.times <= _MOST:
        raise ConfigError(f"--until must be greater than --step, which is at least 0, and --times from 2 to {_MOST}")
    manifests: dict[int, Manifest] = {}
    for _, manifest in all_manifests(args.directory):
        manifests.setdefault(manifest.step, manifest)
    if args.step not in manifests:
        steps = ", ".join(map(str, list(manifests)[:8])) or "none"
        raise NotACheckpointError(
            f"{args.directory}: no complete checkpoint of step {args.step}; there are those of the steps: {steps}"
        )
    return ReplayRequest(absolute(args.directory), args.step, until, args.other_layout), manifests


def _example() -> str:
    from unickpt.cli.parsers.replay_step import EXAMPLE

    return EXAMPLE


def _why_not_against(request: ReplayRequest, manifests: dict[int, Manifest]) -> str:
    """Return why the result is not compared with what the original run has saved, or ''."""
    saved = manifests.get(request.until)
    if saved is None:
        return "there is none"
    if request.other_layout:
        return "the layout may be another one"
    if saved.writer.topology != manifests[request.step].writer.topology:
        return "it was saved under another layout"
    return ""


def _folder(given: Path | None, directory: str) -> Path:
    """Return an empty folder that is not in the one of the checkpoints."""
    if given is None:
        return Path(tempfile.mkdtemp(prefix="unickpt-replay-"))
    folder = Path(os.path.realpath(given))
    if not is_url(directory) and folder.is_relative_to(os.path.realpath(directory)):
        raise ConfigError(f"--out {given} is in the folder of the checkpoints, in which nothing is written; name another one")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"--out {given} is not empty; name a new folder")
    return folder


def _require_hooks() -> None:
    off = [name for name in _AUTOLOADS if os.environ.get(name) == "0"]
    if switch() is Switch.OFF:
        off.append("UNICKPT")
    if off:
        raise ConfigError(
            f"{off[0]}={os.environ[off[0]]} is in the environment, so unickpt would not see the load of the job; remove it"
        )


def _start(program: str, command: Sequence[str], request: ReplayRequest, *, as_json: bool) -> None:
    """Run the job once.

    Raises:
        ConfigError: it has failed, or has recorded nothing.
    """
    environment = {**os.environ, VARIABLE: request.folder}
    done = subprocess.run([program, *command[1:]], env=environment, stdout=2 if as_json else None, check=False)
    folder = Path(request.folder)
    refused = folder / REFUSED
    if refused.exists():
        raise ConfigError(refused.read_text())
    if done.returncode:
        raise ConfigError(f"{folder.name}: the job ended with code {done.returncode}; what it printed says why")
    if not read(folder):
        raise ConfigError(
            f"{folder.name}: no rank has recorded anything. Either the job loads nothing from {request.directory} through "
            f"unickpt, or {VARIABLE} did not reach its ranks, or it ended before step {request.until}"
        )


def _say_what_to_start(out: Output, folder: Path, requests: Sequence[ReplayRequest]) -> None:
    out.line("Start all ranks of the job once with each of these variables. The folder must be visible on all hosts:")
    for each in requests:
        out.line(f"  {VARIABLE}={shlex.quote(each.folder)}")
    out.line(f"Then: unickpt replay-step --compare {shlex.quote(str(folder))}")


def _compared(folder: Path, reason: str = "") -> Judgement:
    """Compare what was recorded.

    Raises:
        ConfigError: runs are missing or damaged.
    """
    runs = sorted((each for each in folder.glob("run*") if each.name[3:].isdecimal()), key=lambda each: int(each.name[3:]))
    request = asked({VARIABLE: str(runs[0])}) if runs else None
    if request is None:
        raise ConfigError(f"{folder}: nothing is recorded there; 'unickpt replay-step DIR --step N' makes such a folder")
    found = []
    for each in runs:
        refused = each / REFUSED
        if refused.exists():
            raise ConfigError(f"{each.name}: {refused.read_text()}")
        ranks = read(each)
        if not ranks:
            raise ConfigError(f"{each}: no rank has recorded anything; start the job with {VARIABLE}={each}")
        found.append(ranks)
    saved = read(folder / _SAVED)
    if not saved and not reason:
        reason = "its load was not recorded" if (folder / _SAVED).is_dir() else "there is none, or under another layout"
    return judge(found, request.step, request.until, saved or None, why_not=reason)


def _told(args: argparse.Namespace, out: Output, found: Judgement) -> int:
    if args.json:
        told = {"text": texts.heading(found), "next": texts.next_steps(found)}
        out.json({"schema": JSON_SCHEMA, "equal": found.equal, **told, **asdict(found)})
    else:
        out.line(texts.heading(found), style="bold green" if found.equal else "bold red")
        for line in texts.details(found):
            out.line(line)
        out.line(f"Next: {texts.next_steps(found)}")
    return SOUND if found.equal else DAMAGED
