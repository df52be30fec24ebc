"""The state of a data loader in ``client_state``: each rank's own on the same number of ranks, else resharded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ds_unickpt.checkpoint_engine import ours_of
from unickpt.base.errors import MismatchError
from unickpt.base.listing import some
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.resume import AgreedFailureError, Together
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.training.data.resharding import ReshardableLoader

KEY = "data_loader"  # in ``client_state``


def restore(engine: Any, path: str, loader: ReshardableLoader | None, client_state: Mapping[str, Any]) -> None:
    """Set the state of a loader after a load from ``path``. Every rank calls it, also one that has no loader.

    Raises:
        UnickptError: a rank cannot set it. Raised on every rank.
    """
    ours, directory = ours_of(engine), os.path.dirname(path)

    def part() -> None:
        if loader is not None:
            loader.load_state_dict(_state(engine, directory, loader, client_state))

    if ours is None:
        part()
        return
    ours.exchange.begin("loader")
    try:
        Together(ours.exchange, directory).step("loader", part)
    except AgreedFailureError as agreed:
        raise agreed.error from agreed.error.__cause__


def _state(engine: Any, directory: str, loader: ReshardableLoader, client_state: Mapping[str, Any]) -> dict[str, Any]:
    if KEY not in client_state:
        raise MismatchError(
            f'{directory} has no state of a data loader: save it with client_state={{"{KEY}": loader.state_dict()}}'
        )
    own: dict[str, Any] = client_state[KEY]
    if not is_checkpoint(directory):  # DeepSpeed wrote it, and loads it on the same number of ranks only
        return own
    checkpoint = Checkpoint.open(directory)
    world, now = int(checkpoint.manifest.writer.topology.get("world_size") or 1), int(engine.world_size)
    if world == now:
        return own
    of_job = checkpoint.objects().value.get("client_state") or {}
    stored = [checkpoint.rank_objects(rank).value.get("client_state", of_job) for rank in range(world)]
    saved = [rank for rank, state in enumerate(stored) if state.get(KEY) is not None]
    if len(saved) < world:  # such as rank 0 alone, which reads for all
        raise MismatchError(
            f"{directory}: of {world} ranks, only {some(saved)} saved the state of a data loader, so these states cannot be "
            f"divided among the {now} of this job. Set the position by hand"
        )
    states = loader.reshard([state[KEY] for state in stored], now)
    if len(states) != now:
        raise MismatchError(f"{type(loader).__name__}.reshard returned {len(states)} states for {now} ranks")
    return states[int(engine.global_rank)]
