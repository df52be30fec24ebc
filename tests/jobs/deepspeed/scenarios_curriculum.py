"""DeepSpeed's curriculum sampler, whose own ``state_dict`` lacks its generator and the order of its clusters."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed import comm as dist
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDatasetBuilder

from ds_unickpt.held_state import curriculum
from tests.jobs.deepspeed.scenario_worker import scenario

SAMPLES, WIDTH = 32, 8


class Numbered(torch.utils.data.Dataset[Any]):
    """Samples that are their own numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((WIDTH,), float(number)), torch.tensor(int(number))


def _write_lengths(place: Path) -> None:
    """Write the length of each sample, and the samples of each length, as DeepSpeed's analyser does."""
    lengths = np.random.default_rng(0).integers(1, 5, SAMPLES) * 8
    of_length = MMapIndexedDatasetBuilder(f"{place}_samples.bin", dtype=np.int64)
    values = MMapIndexedDatasetBuilder(f"{place}_lengths.bin", dtype=np.int64)
    for length in sorted(set(lengths.tolist())):
        for builder, item in ((of_length, np.where(lengths == length)[0]), (values, np.array([length]))):
            builder.add_item(torch.tensor(item, dtype=torch.long))
            builder.end_document()
    of_length.finalize(f"{place}_samples.idx")
    values.finalize(f"{place}_lengths.idx")


def _job(folder: Path) -> tuple[Any, Any]:
    """Return an engine and an endless iterator of its batches."""
    metric = {
        "index_to_sample_path": f"{folder}/data_samples", "index_to_metric_path": f"{folder}/data_lengths",
        "difficulty_type": "value", "clustering_type": "schedule_based", "min_difficulty": 8, "max_difficulty": 32,
        "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 8},
    }  # fmt: skip
    curriculum = {"enabled": True, "data_cluster_path": f"{folder}/clusters", "curriculum_metrics": {"length": metric}}
    sampling = {"enabled": True, "num_epochs": 100, "num_workers": 0, "curriculum_learning": curriculum}
    cfg = {
        "train_batch_size": 8, "steps_per_print": 10**9, "unickpt": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "data_efficiency": {"enabled": True, "seed": 42, "data_sampling": sampling},
    }  # fmt: skip
    model = torch.nn.Linear(WIDTH, 1)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=cfg, training_data=Numbered()
    )
    return engine, iter(loader)


def _drawn(engine: Any, batches: Any, steps: int) -> list[list[int]]:
    """Train further, and return the numbers of the samples of this rank."""
    found = []
    for _ in range(steps):
        x, numbers = next(batches)
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()
        found.append(numbers.tolist())
    return found


@scenario(2)
def the_curriculum_sampler_continues_with_the_same_samples(folder: Path) -> None:
    if dist.get_rank() == 0:
        _write_lengths(folder / "data")
    dist.barrier()
    engine, batches = _job(folder)
    _drawn(engine, batches, 4)
    assert engine.save_checkpoint(str(folder / "ck")) is True
    uninterrupted = _drawn(engine, batches, 12)  # shuffles the clusters again, and reaches the highest difficulty
    dist.barrier()
    for resumed, following in ((engine, batches), _job(folder)):  # a rollback, and a new job
        resumed.load_checkpoint(str(folder / "ck"))
        entries = {entry.name: entry.outcome for entry in resumed.checkpoint_engine.last_report.entries}
        assert entries["data_sampler"] == "restored"
        assert _drawn(resumed, following, 12) == uninterrupted
        dist.barrier()


@scenario(2)
def all_ranks_leave_out_a_sampler_whose_clusters_are_gone(folder: Path) -> None:
    most = curriculum._MOST_BYTES
    if dist.get_rank() == 0:
        _write_lengths(folder / "data")
    dist.barrier()
    engine, batches = _job(folder)
    first = _drawn(engine, batches, 4)
    curriculum._MOST_BYTES = 0  # the checkpoint has digests
    assert engine.save_checkpoint(str(folder / "ck")) is True
    curriculum._MOST_BYTES = most

    def resumed(engine: Any, batches: Any, steps: int) -> tuple[str, list[list[int]]]:
        engine.load_checkpoint(str(folder / "ck"))
        entries = {entry.name: entry.outcome for entry in engine.checkpoint_engine.last_report.entries}
        found = _drawn(engine, batches, steps)
        dist.barrier()
        return entries["data_sampler"], found

    assert resumed(engine, batches, 0) == ("restored", [])
    _drawn(engine, batches, 12)  # shuffles the clusters again
    dist.barrier()
    assert resumed(engine, batches, 4) == ("left out", first), "it begins as a new one, and makes the same clusters"
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "clusters")
    dist.barrier()
    assert resumed(*_job(folder), 4) == ("left out", first)
