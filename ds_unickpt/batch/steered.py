"""What a job does when torchrun starts it again: whether it keeps its global batch, and what it continues from."""

from __future__ import annotations

import os

from ds_unickpt.batch import batches
from ds_unickpt.batch.batches import Batch
from unickpt.base.errors import UnickptError
from unickpt.base.options.job import Options
from unickpt.base.round_folder import ROUND
from unickpt.checkpoint.checkpoint_folder import read_manifest
from unickpt.checkpoint.load.candidates import Candidates
from unickpt.checkpoint.load.failure import DAMAGE, failure_of
from unickpt.checkpoint.storage.base import join
from unickpt.checkpoint.storage.open import open_storage


def under_steering() -> bool:
    """Whether ``torchrun --rdzv-backend unickpt`` started this process."""
    return bool(os.environ.get(ROUND))


def in_later_round() -> bool:
    """Whether ``torchrun --rdzv-backend unickpt`` has started the workers of this job before."""
    number = os.environ.get(ROUND, "").rpartition(".")[2]
    return number.isdecimal() and int(number) > 1


def keeps_batch(options: Options) -> bool:
    """Whether the global batch stays when the number of ranks changes."""
    return options.keep_global_batch == "always" or (options.keep_global_batch == "steering" and under_steering())


def saved_batch(folder: str) -> Batch | None:
    """Return the batch of the newest checkpoint in a folder. None if there is no checkpoint, or if it does not tell.

    Reads one manifest.

    Raises:
        UnickptError: the folder or a manifest cannot be read for a reason that is no damage.
    """
    candidates = Candidates(folder, newest=True)
    while (tag := candidates.next().tag) is not None:
        where = join(folder, tag)
        try:
            manifest = read_manifest(open_storage(where))
        except UnickptError as err:
            if failure_of(err, rank=0, where=where).kind not in DAMAGE:
                raise
            continue
        topology = manifest.writer.topology
        return batches.of_saved(manifest.objects, topology.get("data", topology.get("world_size")) or 1)
    return None
