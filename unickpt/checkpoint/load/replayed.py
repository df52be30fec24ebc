"""The checkpoint that a job loads which ``unickpt replay-step`` has started: the one of the step, whatever ``latest`` names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unickpt.base.errors import MismatchError
from unickpt.base.step_replay import ReplayRequest, asked
from unickpt.checkpoint.checkpoint_folder import read_manifest
from unickpt.checkpoint.format.topology import describe
from unickpt.checkpoint.load.folders import TRAINER_FOLDER, all_manifests
from unickpt.checkpoint.storage.base import absolute, join, resolved, split
from unickpt.checkpoint.storage.open import open_storage


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a job loads.

    Attributes:
        directory: the checkpoint.
        name: its name in the folder that the job names; '' if the job names a checkpoint.
        step: of the optimizer.
        refused: why there is nothing to load, or ''.
    """

    directory: str = ""
    name: str = ""
    step: int = 0
    refused: str = ""


def replays(where: str) -> ReplayRequest | None:
    """Return the request of this process if a load concerns its folder: from it, or from a checkpoint in it.

    Raises:
        ConfigError: as ``asked``.
    """
    request = asked()
    if request is None:
        return None
    place = resolved(where)
    return request if resolved(request.directory) in (place, split(place)[0], _run_of(place)) else None


def _run_of(place: str) -> str:
    """Return the folder of a Trainer run by a checkpoint in one of its ``checkpoint-N`` folders; '' for any other place."""
    folder, _ = split(place)
    return split(folder)[0] if TRAINER_FOLDER.fullmatch(split(folder)[1]) else ""


def replayed(request: ReplayRequest, where: str) -> Replayed:
    """Return the checkpoint of the step.

    Args:
        request: what is asked.
        where: what the job names, which concerns the request.
    """
    whole = resolved(where) == resolved(request.directory)
    of_trainer = not whole and TRAINER_FOLDER.fullmatch(split(resolved(where))[1]) is not None
    folder = where if whole else request.directory if of_trainer else split(absolute(where))[0]
    every = all_manifests(folder)
    name = next((name for name, manifest in every if manifest.step == request.step), "")
    reason = ""
    if not name:
        steps = ", ".join(str(manifest.step) for _, manifest in every[:8])
        reason = f"{folder} has no complete checkpoint of step {request.step}; there are those of the steps: {steps or 'none'}"
    elif of_trainer and split(name)[0] != split(where)[1] and request.until > request.step:
        reason = (
            f"the job resumes from {split(where)[1]}, and step {request.step} is in {split(name)[0]}: pass that as "
            "resume_from_checkpoint, or pass True"
        )
    if reason:
        request.refuse(reason)
        return Replayed(refused=f"unickpt replay-step: {reason}")
    if of_trainer:  # DeepSpeed adds the name to the folder that Trainer has chosen
        return Replayed(join(folder, name), os.path.relpath(join(folder, name), where), request.step)
    return Replayed(join(folder, name), name if whole else "", request.step)


def replayed_folder(directory: str) -> str:
    """Return the ``checkpoint-N`` folder of a Trainer run from which a step is repeated; '' if nothing of it is repeated."""
    request = asked()
    if request is None or resolved(directory) != resolved(request.directory):
        return ""
    names = (name for name, manifest in all_manifests(directory) if manifest.step == request.step)
    return next((join(directory, split(name)[0]) for name in names if "/" in name), "")


def layout_of(directory: str) -> dict[str, Any]:
    """Return the layout that has saved a checkpoint."""
    return dict(read_manifest(open_storage(directory)).writer.topology)


def require_layout(request: ReplayRequest, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a job with another layout than the one that saved the checkpoint, unless the request allows it.

    Raises:
        MismatchError: the layout is another one.
    """
    other = sorted(key for key in saved.keys() & own.keys() if _plain(saved[key]) != _plain(own[key]))
    if not other or request.other_layout:
        return
    reason = (
        f"the checkpoint of step {request.step} was saved under {describe(saved)}, and this job has {describe(own)} "
        f"({', '.join(other)}). Another layout adds in another order. Start the layout that saved it, or allow this one with "
        "--other-layout: then the repetitions are compared with each other alone"
    )
    request.refuse(reason)
    raise MismatchError(f"unickpt replay-step: {reason}")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
