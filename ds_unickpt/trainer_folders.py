"""The ``checkpoint-N`` folders of a Trainer run: which of them a job can resume from.

Trainer reads its own state (``trainer_state.json``, generators, scheduler) from the folder that it chooses, and after that
DeepSpeed's state from the same folder. So an older checkpoint has to be chosen before Trainer reads anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unickpt.checksums import digest
from unickpt.errors import CorruptCheckpointError, StorageError, UnickptError
from unickpt.load.failure import DAMAGE, failure_of
from unickpt.loading import Checkpoint, is_checkpoint
from unickpt.manifest import MANIFEST_FILE
from unickpt.resuming import Candidates
from unickpt.storage import open_storage

STATE_FILE = "trainer_state.json"  # TRAINER_STATE_NAME of transformers; Trainer writes it last
DAMAGE_FILE = "unickpt-damaged.json"
_FOLDER = re.compile(r"^checkpoint-(\d+)$")  # as transformers/trainer_utils.py
_ARCHIVES = ("rng_state*.pth", "scheduler.pt", "scaler.pt")  # torch.save makes zip archives
NO_ENGINE_STATE = "it has no DeepSpeed checkpoint (global_step*)"


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a Trainer run resumes from.

    Attributes:
        folder: ``.../checkpoint-N``; None if there is nothing to resume from.
        passed_over: newer folders, newest first, each with the reason.
    """

    folder: str | None
    passed_over: tuple[tuple[str, str], ...] = ()

    def line(self) -> str:
        """For the log: what was passed over, why, and what is used instead; '' if the newest one is used."""
        if not self.passed_over:
            return ""
        reasons = "; ".join(f"{os.path.basename(folder)} cannot be resumed: {reason}" for folder, reason in self.passed_over)
        if self.folder is None:
            return f"{reasons}. No checkpoint is left to resume from."
        return f"{reasons}. Resuming from {self.folder} instead."


def folders(output_dir: str | os.PathLike[str]) -> list[str]:
    """The ``checkpoint-N`` folders of a Trainer run, newest first."""
    found = [(int(match[1]), name) for name in os.listdir(output_dir) if (match := _FOLDER.match(name))]
    paths = [os.path.join(output_dir, name) for _, name in sorted(found, reverse=True)]
    return [path for path in paths if os.path.isdir(path)]


def is_one(folder: str | os.PathLike[str]) -> bool:
    """Whether a path has the name of a Trainer checkpoint."""
    return _FOLDER.match(os.path.basename(os.path.normpath(folder))) is not None


def choose(output_dir: str | os.PathLike[str]) -> Chosen:
    """The newest folder that can be resumed.

    Raises:
        CorruptCheckpointError: there are committed checkpoints, and all of them are damaged. A run that starts anew would
            replace them.
    """
    passed: list[tuple[str, str]] = []
    for folder in folders(output_dir):
        reason = unusable(folder)
        if not reason:
            return Chosen(folder, tuple(passed))
        passed.append((folder, reason))
    if passed and all(reason == NO_ENGINE_STATE for _, reason in passed):  # save_only_model: Trainer has a message for it
        return Chosen(passed[0][0])
    if any(_committed(folder) for folder, _ in passed):
        raise CorruptCheckpointError(Chosen(None, tuple(passed)).line() + " To start anew, use another output directory.")
    return Chosen(None, tuple(passed))


def unusable(folder: str) -> str:
    """Why a job cannot resume from a ``checkpoint-N`` folder, or ''.

    What says nothing of the checkpoint is no reason: a newer format, a refused permission, a storage that does not answer. The
    load then raises. Data files are compared by size and not read.
    """
    place = Path(folder)
    try:
        state = json.loads((place / STATE_FILE).read_text())
        if not isinstance(state, dict):
            return f"{STATE_FILE} is damaged"
    except FileNotFoundError:
        return f"it has no {STATE_FILE}, so its save did not finish"
    except ValueError:
        return f"{STATE_FILE} is damaged, so its save did not finish"
    for pattern in _ARCHIVES:
        for file in sorted(place.glob(pattern)):
            if not zipfile.is_zipfile(file):
                return f"{file.name} is not whole, so its save did not finish"
    if not any(place.glob("global_step*")):
        return NO_ENGINE_STATE
    return _engine_state_unusable(folder)


def is_usable(folder: str) -> bool:
    """Whether a job can resume from a ``checkpoint-N`` folder."""
    return not unusable(folder)


def note_damage(folder: str, reason: str) -> bool:
    """Write down that data of a folder turned out to be damaged while they were read, so that the next job passes it over.

    Returns:
        Whether it could be written. The note holds for the manifests that are there now, not for a later save.
    """
    text = json.dumps({"reason": reason, "manifests": _manifests(folder)})
    try:
        open_storage(folder).write_atomic(DAMAGE_FILE, text.encode())
    except (StorageError, OSError):
        return False
    return True


def forget_damage(folder: str) -> None:
    """Remove the note: the folder was loaded after all."""
    open_storage(folder).delete(DAMAGE_FILE)


def advice(folder: str) -> str:
    """Which folder beside this one can be resumed, as a sentence; '' if none can."""
    with contextlib.suppress(UnickptError, OSError):
        for other in folders(os.path.dirname(os.path.abspath(folder))):
            if not os.path.samefile(other, folder) and not unusable(other):
                return f"{other} can be resumed: pass it as resume_from_checkpoint, or pass True."
    return ""


def left_by_rotation(folder: str, limit: int, best: str | None) -> list[str]:
    """The folders beside one just written that Trainer keeps (``rotate_checkpoints`` in transformers/trainer_utils.py).

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
    """The other ``checkpoint-N`` folders of the same run, newest first."""
    parent, name = os.path.split(os.path.normpath(folder))
    return [other for other in folders(parent or ".") if os.path.basename(other) != name]


def has_our_files(folder: str) -> bool:
    """Whether a save of unickpt was begun in a ``checkpoint-N`` folder."""
    place = Path(folder)
    return any(any(place.glob(f"global_step*/{name}")) for name in (MANIFEST_FILE, "data/rank*.safetensors"))


def _engine_state_unusable(folder: str) -> str:
    candidates, reasons = Candidates(folder), list[str]()
    try:
        noted = _noted_damage(folder)
        while (tag := candidates.next().tag) is not None:
            if _is_native(Path(folder) / tag):
                return ""  # only DeepSpeed can judge it
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
    return "; ".join(reasons) or "it has no 'latest' file, so its save did not finish"


def _is_native(directory: Path) -> bool:
    return not is_checkpoint(directory) and any(directory.glob("*.pt"))


def _committed(folder: str) -> bool:
    return any(Path(folder).glob(f"global_step*/{MANIFEST_FILE}"))


def _manifests(folder: str) -> dict[str, str]:
    """Checksums of the manifests in a folder, by tag."""
    found = {}
    for path in sorted(Path(folder).glob(f"*/{MANIFEST_FILE}")):
        with contextlib.suppress(OSError):
            found[path.parent.name] = digest(path.read_bytes())
    return found


def _noted_damage(folder: str) -> dict[str, str]:
    """tag -> reason, of the checkpoints in a folder that are noted as damaged and were not saved again since."""
    try:
        note: Any = json.loads((Path(folder) / DAMAGE_FILE).read_text())
        manifests, reason = dict(note["manifests"]), str(note["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    now = _manifests(folder)
    return {tag: reason for tag, checksum in manifests.items() if now.get(tag) == checksum}
