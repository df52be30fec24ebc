"""Selects the ``checkpoint-N`` folder of a Trainer run that a job can resume from.

Trainer reads its own state (``trainer_state.json``, generators, scheduler) from the selected folder, and then DeepSpeed's state
from the same folder. An older checkpoint must therefore be selected before Trainer reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unickpt.base.errors import CorruptCheckpointError, StorageError, UnickptError
from unickpt.checkpoint.format.checksums import digest
from unickpt.checkpoint.format.manifest import MANIFEST_FILE
from unickpt.checkpoint.load.candidates import Candidates
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.failure import DAMAGE, failure_of
from unickpt.checkpoint.load.folders import TRAINER_FOLDER, trainer_state_problem
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.storage.open import open_storage

DAMAGE_FILE = "unickpt-damaged.json"
_ARCHIVES = ("rng_state*.pth", "scheduler.pt", "scaler.pt")  # torch.save makes zip archives
NO_ENGINE_STATE = "it has no DeepSpeed checkpoint (global_step*)"


@dataclass(frozen=True, slots=True)
class ResumeFolder:
    """The folder that a Trainer run resumes from.

    Attributes:
        folder: ``.../checkpoint-N``; None if no folder can be resumed.
        passed_over: newer folders that cannot be resumed, newest first, each with the reason.
    """

    folder: str | None
    passed_over: tuple[tuple[str, str], ...] = ()

    def line(self) -> str:
        """Return the log line about folders that cannot be resumed; '' if the newest one is used."""
        if not self.passed_over:
            return ""
        reasons = "; ".join(
            f"{os.path.basename(folder)} cannot be resumed: {reason.rstrip('.')}" for folder, reason in self.passed_over
        )
        if self.folder is None:
            return f"{reasons}. No checkpoint is left to resume from."
        return f"{reasons}. Resuming from {self.folder} instead."


def folders(output_dir: str | os.PathLike[str]) -> list[str]:
    """Return the ``checkpoint-N`` folders of a Trainer run, newest first."""
    found = [(int(match[1]), name) for name in os.listdir(output_dir) if (match := TRAINER_FOLDER.fullmatch(name))]
    paths = [os.path.join(output_dir, name) for _, name in sorted(found, reverse=True)]
    return [path for path in paths if os.path.isdir(path)]


def is_one(folder: str | os.PathLike[str]) -> bool:
    """Whether a path has the name of a Trainer checkpoint."""
    return TRAINER_FOLDER.fullmatch(os.path.basename(os.path.normpath(folder))) is not None


def run_of(folder: str) -> str:
    """Return the ``output_dir`` of a ``checkpoint-N`` folder."""
    return os.path.dirname(os.path.abspath(folder))


def choose(output_dir: str | os.PathLike[str]) -> ResumeFolder:
    """Return the newest folder that can be resumed.

    Raises:
        CorruptCheckpointError: all committed checkpoints are damaged. A new run would replace them.
    """
    passed: list[tuple[str, str]] = []
    for folder in folders(output_dir):
        reason = unusable(folder)
        if not reason:
            return ResumeFolder(folder, tuple(passed))
        passed.append((folder, reason))
    if passed and all(reason == NO_ENGINE_STATE for _, reason in passed):  # save_only_model: Trainer raises its own error
        return ResumeFolder(passed[0][0])
    if any(_committed(folder) for folder, _ in passed):
        raise CorruptCheckpointError(
            ResumeFolder(None, tuple(passed)).line() + " To start a new run, use another output directory."
        )
    return ResumeFolder(None, tuple(passed))


def unusable(folder: str) -> str:
    """Return why a job cannot resume from a ``checkpoint-N`` folder, or ''.

    A newer format, a missing permission or an unreachable storage is not damage. The result is '' then, and the load raises.
    Compares the sizes of data files and does not read them.
    """
    place = Path(folder)
    problem = trainer_state_problem(open_storage(folder))
    if problem:
        return problem
    for pattern in _ARCHIVES:
        for file in sorted(place.glob(pattern)):
            if not zipfile.is_zipfile(file):
                return f"{file.name} is incomplete, so its save did not finish"
    if not any(place.glob("global_step*")):
        return NO_ENGINE_STATE
    return _engine_state_unusable(folder)


def is_usable(folder: str) -> bool:
    """Whether a job can resume from a ``checkpoint-N`` folder."""
    return not unusable(folder)


def note_damage(folder: str, reason: str) -> bool:
    """Mark the present checkpoints of a folder as damaged, so that the next job does not select it. Return whether it could."""
    text = json.dumps({"reason": reason, "manifests": _manifests(folder)})
    try:
        open_storage(folder).write_atomic(DAMAGE_FILE, text.encode())
    except (StorageError, OSError):
        return False
    return True


def forget_damage(folder: str) -> None:
    """Remove the mark of damage after a successful load."""
    open_storage(folder).delete(DAMAGE_FILE)


def advice(folder: str) -> str:
    """Return a sentence that names another folder of the run that can be resumed; '' if there is none."""
    with contextlib.suppress(UnickptError, OSError):
        for other in folders(run_of(folder)):
            if os.path.realpath(other) != os.path.realpath(folder) and not unusable(other):
                return f"{other} can be resumed. Pass it as resume_from_checkpoint, or pass True."
    return ""


def left_by_rotation(folder: str, limit: int, best: str | None) -> list[str]:
    """Return the older folders that Trainer keeps (``rotate_checkpoints`` in transformers/trainer_utils.py).

    Args:
        folder: the newest ``checkpoint-N``.
        limit: ``save_total_limit``; 0 or less keeps all.
        best: ``best_model_checkpoint``, which is kept too.
    """
    others = beside(folder)
    protected = {str(Path(folder))} | ({str(Path(best))} if best is not None else set())
    deletable = [other for other in reversed(others) if str(Path(other)) not in protected]
    surplus = 0 if limit <= 0 else max(len(others) + 1 - max(limit, len(protected)), 0)
    return [other for other in others if other not in deletable[:surplus]]


def beside(folder: str) -> list[str]:
    """Return the other ``checkpoint-N`` folders of the same run, newest first."""
    parent, name = os.path.split(os.path.normpath(folder))
    return [other for other in folders(parent or ".") if os.path.basename(other) != name]


def has_our_files(folder: str) -> bool:
    """Whether unickpt began a save in a ``checkpoint-N`` folder."""
    place = Path(folder)
    return any(any(place.glob(f"global_step*/{name}")) for name in (MANIFEST_FILE, "data/rank*.safetensors"))


def _engine_state_unusable(folder: str) -> str:
    candidates, reasons = Candidates(folder), list[str]()
    try:
        noted = _noted_damage(folder)
        while (tag := (choice := candidates.next()).tag) is not None:
            if _is_native(Path(folder) / tag):
                return ""  # only DeepSpeed can check it
            if tag in noted and not reasons:
                return f"{tag} was found damaged before: {noted[tag]}"
            try:
                Checkpoint.open(os.path.join(folder, tag))
            except UnickptError as err:
                if failure_of(err, rank=0, where=folder).kind not in DAMAGE:
                    return ""
                reasons.append(str(err))
            else:
                return ""
    except (UnickptError, OSError):
        return ""
    return "; ".join([*reasons, *choice.notes]) or "it has no 'latest' file, so its save did not finish"


def _is_native(directory: Path) -> bool:
    return not is_checkpoint(directory) and any(directory.glob("*.pt"))


def _committed(folder: str) -> bool:
    return any(Path(folder).glob(f"global_step*/{MANIFEST_FILE}"))


def _manifests(folder: str) -> dict[str, str]:
    """Return the checksums of the manifests in a folder, by tag."""
    found = {}
    for path in sorted(Path(folder).glob(f"*/{MANIFEST_FILE}")):
        with contextlib.suppress(OSError):
            found[path.parent.name] = digest(path.read_bytes())
    return found


def _noted_damage(folder: str) -> dict[str, str]:
    """Return tag -> reason for the checkpoints in a folder that are marked as damaged and were not saved again since."""
    try:
        note: Any = json.loads((Path(folder) / DAMAGE_FILE).read_text())
        manifests, reason = dict(note["manifests"]), str(note["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    now = _manifests(folder)
    return {tag: reason for tag, checksum in manifests.items() if now.get(tag) == checksum}
