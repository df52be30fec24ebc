"""The state of DeepSpeed's curriculum sampler (``runtime/data_pipeline/data_sampling/data_sampler.py``).

Its own ``state_dict`` has NumPy's global generator, although the sampler draws from a generator of its own. It also lacks the
order of the samples in its clusters: that is in files beside the data, which later shuffles overwrite.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from unickpt.checkpoint.format.checksums import digest

GENERATOR, CLUSTERS = "generator", "clusters"  # keys that unickpt adds to the sampler's own state
_MOST_BYTES = 64 << 20  # of the clusters that a checkpoint stores; of larger ones it has digests
_DIGEST = "_unickpt_digest"  # on a cluster of the sampler; a shuffle makes another object


def captured(sampler: Any) -> dict[str, Any]:
    """Return the state of the sampler of rank 0, which draws the samples of all ranks."""
    clusters = list(getattr(sampler, "data_clusters", []))
    if sum(cluster[0].nbytes for cluster in clusters) > _MOST_BYTES:
        stored: list[Any] = [_kept_digest(cluster) for cluster in clusters]
    else:
        stored = [np.copy(cluster[0]) for cluster in clusters]
    return {**sampler.state_dict(), GENERATOR: sampler.np_rng, CLUSTERS: stored}


def refusal(sampler: Any, saved: dict[str, Any]) -> str:
    """Return why the state cannot be set: the files of its clusters are not there any more. '' if it can.

    Only rank 0 has the clusters, so the other ranks need its answer. All of them draw together.
    """
    names, stored = _names(saved), saved.get(CLUSTERS)
    if stored is not None and len(stored) != len(names):
        return f"the checkpoint has {len(stored)} clusters for {len(names)} names"
    for name, wanted in zip(names, stored or [None] * len(names), strict=True):
        if isinstance(wanted, np.ndarray):
            continue
        path = _path(sampler, name)
        if not os.path.isfile(f"{path}.idx"):
            return f"{path}.idx does not exist"
        if wanted is not None and _digest_of_file(path) != wanted:
            return f"{path}.bin was shuffled again after the save"
    return ""


def restore(sampler: Any, saved: dict[str, Any]) -> str:
    """Set a state that ``refusal`` accepts. Returns why the sampler will draw other samples than the saved one, or ''."""
    state = {key: value for key, value in saved.items() if key not in (GENERATOR, CLUSTERS)}
    begin(sampler)
    if int(sampler.global_rank) == 0:
        _restore_clusters(sampler, _names(saved), saved.get(CLUSTERS) or [])
    before = np.random.get_state()
    sampler.load_state_dict(state)
    np.random.set_state(before)
    for metric, schedule in sampler.curriculum_schedulers.items():  # a schedule never goes back by itself
        lowest = schedule.state["min_difficulty"]
        schedule.state["current_difficulty"] = sampler.current_difficulties.get(metric, lowest)
    if GENERATOR not in saved:
        return "its generator was not saved, so it draws other samples from here on"
    sampler.np_rng = saved[GENERATOR]
    return ""


def begin(sampler: Any) -> None:
    """Let a sampler start from its first sample, as a new one does."""
    sampler.np_rng = np.random.default_rng(sampler.data_efficiency_config["seed"])
    sampler.batch, sampler.consumed_samples, sampler.curriculum_step = [], 0, 0
    sampler.current_difficulties, sampler.data_cluster_paths, sampler.data_cluster_current_position = {}, [], []
    for schedule in sampler.curriculum_schedulers.values():
        schedule.state["current_difficulty"] = schedule.state["min_difficulty"]
    if int(sampler.global_rank) == 0:
        sampler.data_clusters, sampler.data_cluster_sizes = [], []


def _names(saved: dict[str, Any]) -> list[str]:
    return [str(name).split("/")[-1] for name in saved["data_cluster_paths"]]


def _path(sampler: Any, name: str) -> str:
    settings = sampler.data_efficiency_config["data_sampling"]["curriculum_learning"]
    return os.path.join(settings["data_cluster_path"], name)


def _restore_clusters(sampler: Any, names: list[str], stored: list[Any]) -> None:
    """Bring the files of the clusters into their saved order."""
    from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset
    from deepspeed.runtime.data_pipeline.data_sampling.utils import close_mmap_dataset_builder, create_mmap_dataset_builder

    for name, wanted in zip(names, stored, strict=False):
        if not isinstance(wanted, np.ndarray):
            continue
        path, equal = _path(sampler, name), False
        if os.path.isfile(f"{path}.idx"):
            held = MMapIndexedDataset(path, skip_warmup=True)  # unmaps its file when it is deleted
            equal = np.array_equal(held[0], wanted)
            del held
        if not equal:
            builder = create_mmap_dataset_builder(path, sampler.index_dtype)
            builder.add_item_numpy(wanted)
            close_mmap_dataset_builder(builder, path)


def _digest_of_file(path: str) -> str:
    from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset

    held = MMapIndexedDataset(path, skip_warmup=True)
    return _digest(held[0])


def _kept_digest(cluster: Any) -> str:
    """Return the digest of a cluster of the sampler. It is computed once for each order."""
    if not hasattr(cluster, _DIGEST):
        setattr(cluster, _DIGEST, _digest(cluster[0]))
    found: str = getattr(cluster, _DIGEST)
    return found


def _digest(cluster: np.ndarray[Any, Any]) -> str:
    return digest(np.ascontiguousarray(cluster).data)
