"""Fence of a checkpoint folder: of several copies of a job, one writes.

A launcher that is killed alone may leave its workers behind. When the job starts again, on this host or on another one, both
copies would save into one folder. So the folder has a small file that says which copy writes. A copy takes the file over when
it begins to save, and looks at it directly before each commit. A copy that was started earlier finds a later one, and does
not commit, unless the later one is known to have ended. Under ``--rdzv-backend unickpt``, a round takes the folder of its job
over when it resumes.

Rounds of one job have an order of their own. Other copies are compared by the time of their start: on one machine since its
boot, and else by the clocks. A wrong clock can give the folder to the wrong one of two copies that live on different machines,
and never takes it from the only one: a first save does not compare.
A lock keeps others out between the look and the rename of the manifest. Object stores have no locks: there a copy that has
looked can be overtaken for the time of one request.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import re
import socket
import time
from collections.abc import Iterator, MutableSet
from dataclasses import asdict, dataclass
from typing import Any

from unickpt.base.errors import StorageError, UnickptError
from unickpt.base.launcher_watch import known_launcher
from unickpt.base.logs import logger
from unickpt.base.process_identity import ProcessIdentity
from unickpt.base.round_folder import ROUND
from unickpt.checkpoint.storage.base import Storage, absolute, split
from unickpt.checkpoint.storage.open import open_storage

FENCE_FILE, FENCE_LOCK = "unickpt-writer.json", "unickpt-writer.lock"
FENCE = "UNICKPT_FENCE"  # in the environment of the workers of a round
LOCK_S, _POLL_S = 10.0, 0.02
_SCHEMA, _LONGEST = 1, 1 << 16
_OF_TRAINER = re.compile(r"checkpoint[-_]\d+")  # the folder of one checkpoint of transformers or Accelerate

_owned: set[str] = set()  # folders that this process has taken over


class FencedError(StorageError):
    """A copy of the job that was started later writes into the folder."""


class FenceVerdict(enum.Enum):
    """What a copy does about the fence of a folder."""

    OWN = "it is this copy's"
    TAKE = "it is taken over"
    REFUSED = "a later copy has it"


@dataclass(frozen=True, slots=True)
class JobCopy:
    """One start of the workers of a job.

    Attributes:
        job: short name of the job; '' if only its launcher knows it.
        instance: of the steering of the job, which orders its rounds; '' without steering.
        round: term and number of the round; (0, 0) without steering.
        process: identity of the coordinator, as text.
        began_s: start of the coordinator, in seconds since the epoch.
        where: host and process, for people.
    """

    job: str
    instance: str
    round: tuple[int, int]
    process: str
    began_s: float
    where: str

    def __str__(self) -> str:
        of_round = f"round {self.round[0]}.{self.round[1]}, " if self.instance else ""
        return f"{of_round}{self.where}, started at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.began_s))}"


def copy_of_this() -> JobCopy | None:
    """Return the copy of the job to which this process belongs. None without a known launcher: then nobody restarts it."""
    me = ProcessIdentity.of(os.getpid()) if known_launcher() else None
    if me is None:
        return None
    job, _, instance = os.environ.get(FENCE, "").partition("/")
    term, _, number = os.environ.get(ROUND, "").partition(".")
    steered = bool(instance) and term.isdigit() and number.isdigit()
    ran_s = time.clock_gettime(time.CLOCK_BOOTTIME) - me.start / os.sysconf("SC_CLK_TCK")
    return JobCopy(
        job if steered else "", instance if steered else "", (int(term), int(number)) if steered else (0, 0), str(me),
        time.time() - max(ran_s, 0.0), f"{socket.gethostname()} process {me.pid}",
    )  # fmt: skip


def writing_copy(one_writer: bool, world: int) -> JobCopy | None:
    """Return the copy of the job that writes a checkpoint; None if others may write beside it.

    Without steering, copies are told apart by rank 0 of the whole job, so the saves of a group of ranks (``world``) are not
    looked at. ``one_writer``: the folder is for one training.
    """
    own = copy_of_this() if one_writer else None
    return own if own is not None and (own.instance or os.environ.get("WORLD_SIZE", "") == str(world)) else None


def verdict_on(found: JobCopy | None, own: JobCopy, *, owned: bool, lives: bool | None) -> FenceVerdict:
    """Return what a copy does before a commit. Pure.

    Args:
        found: copy that the fence names.
        own: the copy that asks.
        owned: it has had this folder before.
        lives: whether the coordinator of ``found`` runs; None if unknown, as on another host. A copy that has ended holds
            nothing: it may have been another job, and a restart of it takes the folder again. A steered job has a next round.
    """
    if found is None:
        return FenceVerdict.TAKE
    if own.instance and (found.job, found.instance) == (own.job, own.instance):
        if found.round == own.round:
            return FenceVerdict.OWN
        return FenceVerdict.TAKE if found.round < own.round else FenceVerdict.REFUSED
    if found.process == own.process:
        return FenceVerdict.OWN
    later = _started_later(found, own)
    ended = lives is False and (not own.job or own.job != found.job)
    refused = later and (lives or (owned and not ended))
    return FenceVerdict.REFUSED if refused else FenceVerdict.TAKE


def _started_later(found: JobCopy, own: JobCopy) -> bool:
    """Whether a copy was started after another one. On one machine the ticks since its boot tell, which nobody sets."""
    one, other = ProcessIdentity.parse(found.process), ProcessIdentity.parse(own.process)
    if one is not None and other is not None and one.boot == other.boot != "":
        return one.start > other.start
    return found.began_s > own.began_s


def line_folder(save_dir: str) -> str:
    """Return the folder with the checkpoints of one training: Trainer makes a ``save_dir`` for each of them."""
    parent, name = split(save_dir)
    return parent if parent and _OF_TRAINER.fullmatch(name) else save_dir


@contextlib.contextmanager
def guarded(save_dir: str, own: JobCopy | None, owned: MutableSet[str] = _owned) -> Iterator[None]:
    """Take the folder that gets the checkpoint for this copy. Others cannot take it until the block ends.

    ``own``: None: nothing is done. ``owned``: folders that this process has had before.

    Raises:
        FencedError: a later copy has it.
        StorageError: the fence cannot be read or written.
    """
    if own is None:
        yield
        return
    save_dir = absolute(save_dir)
    folder = line_folder(save_dir)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_taken(folder, own, owned))
        except FencedError:
            raise
        except StorageError as err:
            if folder == save_dir:
                raise
            if not any(line_folder(each) == folder for each in owned):
                logger.warning(
                    "unickpt: %s; each checkpoint there has the fence in its own folder, so two copies of this job that save "
                    "other steps both write. Make %s writable",
                    err,
                    folder,
                )
            held.enter_context(_taken(save_dir, own, owned))
        yield


@contextlib.contextmanager
def _taken(folder: str, own: JobCopy, owned: MutableSet[str]) -> Iterator[None]:
    place = open_storage(folder)
    with _locked(place):
        found = read_fence(place)
        verdict = verdict_on(found, own, owned=folder in owned, lives=_lives(found))
        if verdict is FenceVerdict.REFUSED:
            raise FencedError(
                f"{place.where(FENCE_FILE)} names a copy of this job that was started later ({found}). This one ({own}) must "
                "not write there any more, so its checkpoint is not committed. End this copy: its launcher has probably been "
                "killed alone. If they are two jobs, give each a folder of its own"
            )
        if verdict is FenceVerdict.TAKE:
            _write(place, own)
        owned.add(folder)
        yield


def take_on_resume(folder: str) -> None:
    """Take over a folder from which this copy resumes, if an earlier round of the same job had it.

    Then a save of the earlier round is refused before this one has chosen its checkpoint. Other readers, such as an evaluation,
    take nothing. Never raises.
    """
    with contextlib.suppress(UnickptError, OSError):
        own = copy_of_this()
        if own is None or not own.instance:
            return
        folder = line_folder(absolute(folder))
        found = read_fence(open_storage(folder))
        if found is not None and found.job == own.job and found.process != own.process:
            with guarded(folder, own):
                pass


def read_fence(place: Storage) -> JobCopy | None:
    """Return the copy that a folder's fence names; None if there is no fence, or it cannot be understood.

    Raises:
        StorageError: the storage cannot read it.
    """
    size = place.size_bytes(FENCE_FILE)
    if size is None or size > _LONGEST:
        return None
    text = place.read(FENCE_FILE, 0, size)
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        said: dict[str, Any] = json.loads(text)
        if said["schema"] == _SCHEMA:
            term, number = said["round"]
            return JobCopy(
                str(said["job"]), str(said["instance"]), (int(term), int(number)), str(said["process"]),
                float(said["began_s"]), str(said["where"])[:200],
            )  # fmt: skip
    return None


def _write(place: Storage, own: JobCopy) -> None:
    place.write_atomic(FENCE_FILE, json.dumps({"schema": _SCHEMA, **asdict(own)}, indent=1).encode())


def _lives(found: JobCopy | None) -> bool | None:
    """Return whether the coordinator of a copy runs; None if it cannot be seen from here."""
    process = None if found is None else ProcessIdentity.parse(found.process)
    return process.lives if process is not None and process.is_near else None


@contextlib.contextmanager
def _locked(place: Storage) -> Iterator[None]:
    """Keep other copies out, as far as the storage can. A copy that is stopped meanwhile does not hold them up for long."""
    end_s = time.monotonic() + LOCK_S
    while (release := place.try_lock(FENCE_LOCK)) is None and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    if release is None:
        logger.warning("unickpt: another copy holds %s for %.0f s; going on without it", place.where(FENCE_LOCK), LOCK_S)
    try:
        yield
    finally:
        if release is not None:
            release()
