"""The state of DeepSpeed's curriculum sampler (``runtime/data_pipeline/data_sampling/data_sampler.py``).

Its own ``state_dict`` has NumPy's global generator, although the sampler draws from a generator of its own. It also lacks the
order of the samples in its clusters: that is in files beside the data, which later shuffles overwrite.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from unickpt.format.checksums import digest

GENERATOR, CLUSTERS = "generator", "clusters"  # keys that unickpt adds to the sampler's own state
_OWN_GENERATOR = "np_rng_state"  # NumPy's global generator, which the generators of the ranks restore
_MOST_BYTES = 64 << 20  # of the clusters that a checkpoint stores; of larger ones it has digests


def captured(sampler: Any) -> dict[str, Any]:
    """Return the state of the sampler of rank 0, which draws the samples of all ranks."""
    clusters = [np.copy(cluster[0]) for cluster in getattr(sampler, "data_clusters", [])]
    stored: list[Any] = clusters
    if sum(cluster.nbytes for cluster in clusters) > _MOST_BYTES:
        stored = [_digest(cluster) for cluster in clusters]
    return {**sampler.state_dict(), GENERATOR: sampler.np_rng, CLUSTERS: stored}


def restore(sampler: Any, saved: dict[str, Any]) -> str:
    """Set the state of a sampler. Returns why it will draw other samples than the saved one; '' if it draws the same."""
    state = {key: value for key, value in saved.items() if key not in (GENERATOR, CLUSTERS)}
    before = np.random.get_state()
    problem = ""
    if int(sampler.global_rank) == 0:
        problem = _restored_clusters(sampler, state, saved.get(CLUSTERS))
        sampler.data_clusters, sampler.data_cluster_sizes = [], []
    if problem:
        return problem
    sampler.load_state_dict(state)
    np.random.set_state(before)
    for metric, schedule in sampler.curriculum_schedulers.items():  # a schedule never goes back by itself
        lowest = schedule.state["min_difficulty"]
        schedule.state["current_difficulty"] = sampler.current_difficulties.get(metric, lowest)
    if GENERATOR not in saved:
        return "its generator was not saved, so it draws other samples from here on"
    sampler.np_rng = saved[GENERATOR]
    return ""


def _restored_clusters(sampler: Any, state: dict[str, Any], stored: Any) -> str:
    """Bring the files of the clusters into their saved order. Returns why that is not possible, or ''."""
    from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset
    from deepspeed.runtime.data_pipeline.data_sampling.utils import close_mmap_dataset_builder, create_mmap_dataset_builder

    settings = sampler.data_efficiency_config["data_sampling"]["curriculum_learning"]
    names = [name.split("/")[-1] for name in state["data_cluster_paths"]]
    if stored is not None and len(stored) != len(names):
        return f"the checkpoint has {len(stored)} clusters for {len(names)} names; nothing of it is set"
    for name, wanted in zip(names, stored or [None] * len(names), strict=True):
        path = os.path.join(settings["data_cluster_path"], name)
        found = None
        if os.path.isfile(f"{path}.idx"):
            held = MMapIndexedDataset(path, skip_warmup=True)  # unmaps its file when it is deleted
            found = np.copy(held[0])
            del held
        if isinstance(wanted, np.ndarray):
            if found is None or not np.array_equal(found, wanted):
                builder = create_mmap_dataset_builder(path, sampler.index_dtype)
                builder.add_item_numpy(wanted)
                close_mmap_dataset_builder(builder, path)
        elif found is None:
            return f"{path}.idx does not exist; nothing of it is set, and it starts from its first sample"
        elif wanted is not None and _digest(found) != wanted:
            return f"{path}.bin was shuffled again after the save; nothing of it is set, and it starts from its first sample"
    return ""


def _digest(cluster: np.ndarray[Any, Any]) -> str:
    return digest(np.ascontiguousarray(cluster).tobytes())
