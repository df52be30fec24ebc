"""Every layout resumes under every other one, bit for bit, and the loss continues.

CI loads a few pairs of each matrix. ``UNICKPT_FULL_MATRIX=1`` loads all of them, and further matrices; with
``UNICKPT_MATRIX_PART=2/4``, of large matrices those into the second quarter of the targets. ``-k '[mpu]'`` takes one matrix.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import pairs
from tests.jobs.deepspeed import (
    auto_expert_names,
    expert_names,
    megatron_names,
    pipeline_names,
    tensor_expert_names,
    tensor_names,
    zero_names,
)
from tests.jobs.megatron import layout_pairs
from tests.jobs.pairs import DEEPSPEED, MEGATRON, TORCH, Pairs, Rounding
from tests.jobs.torch import layouts as torch_layouts
from tests.support.extent import FULL
from unickpt.checkpoint.load.checkpoint import Checkpoint

pytestmark = [pytest.mark.timeout(3 * 3600)] if FULL else []


def _all(source: Any, target: Any) -> bool:
    return True


def _fp32(source: Any, target: Any) -> bool:
    """Experts: in bf16, rounding sends a token to another expert, which moves a loss."""
    return source.precision == target.precision == "fp32"


def _without_muon(source: Any, target: Any) -> bool:
    """Muon orthogonalises in bf16, which makes a difference in the last place large."""
    return "muon" not in (source.optimizer, target.optimizer)


def _without_sequence(source: Any, target: Any) -> bool:
    """DeepSpeed does not reduce the gradients of sequence-parallel ranks under ZeRO 0 to 2, so their losses differ."""
    return source.sequence == target.sequence == 1


@dataclass(frozen=True)
class Matrix:
    """Layouts that load each other's checkpoints.

    Attributes:
        worker, arguments: module that saves and loads, and its arguments.
        loaded: the pairs, as (source, target).
        rounding: how far rounding sets losses apart.
        compared: whether the losses of a pair are compared. None: of no pair.
        why_not: why it cannot run here.
    """

    worker: str
    arguments: tuple[str, ...]
    loaded: Pairs
    rounding: Rounding = pairs.between_precisions
    compared: Callable[[Any, Any], bool] | None = _all
    why_not: str = ""


def _deepspeed(jobs: str, loaded: Pairs, **more: Any) -> Matrix:
    return Matrix(DEEPSPEED, (jobs,), loaded, **more)


NO_AUTO_EP = "" if auto_expert_names.HAS_AUTO_EP else "this DeepSpeed has no AutoEP"
NO_MEGATRON = "" if importlib.util.find_spec("megatron") else "megatron-core is not installed"
MATRICES = {
    # ZeRO 0 to 3 in fp32 and bf16, and BF16_Optimizer, on 1 to 4 ranks
    "zero": _deepspeed("zero", zero_names.pairs(FULL), rounding=pairs.between_dtypes),
    # 1 to 4 stages x 1 to 3 data-parallel ranks x ZeRO 0 and 1, and the same model as a plain module under ZeRO 0 to 3
    "pipelines": _deepspeed("pipelines", pairs.part(pipeline_names.pairs(FULL))),
    # 1 to 4 ranks x 1 to 4 expert-parallel ranks x ZeRO 0 to 2
    "experts": _deepspeed("experts", pairs.part(expert_names.pairs(FULL))),
    # AutoTP: 1 to 4 tensor-parallel x 1 and 2 data-parallel ranks x ZeRO 0 to 3, vocabulary whole, by rows and by columns
    "tensors": _deepspeed("tensors", pairs.part(tensor_names.pairs(FULL))),
    # Megatron-style tensor parallelism (``mpu``), in pipelines and as plain modules. Its table is made by
    # ``python -m evidence.deepspeed.megatron_table``
    "mpu": _deepspeed("mpu", megatron_names.pairs()),
    # experts in tensor-parallel jobs (``mpu``), divided or whole; in the full matrix also pipelines and sequence parallelism
    "tensor-experts": _deepspeed("tensor-experts", pairs.part(tensor_expert_names.pairs(FULL)), compared=_without_sequence),
    # AutoEP: 1, 2, 4 ranks x 1 to 4 expert-parallel ranks x ZeRO 0 to 3
    "auto-experts": _deepspeed("auto-experts", pairs.part(auto_expert_names.pairs(FULL)), compared=_fp32, why_not=NO_AUTO_EP),
    # every parallel shape and optimizer wrapper of megatron-core, against its own sharded state dicts and ``torch_dist`` format
    "megatron": Matrix(MEGATRON, (), layout_pairs.pairs(full=FULL), pairs.by_moved_weights, why_not=NO_MEGATRON),
    # one rank, DDP, FSDP2, HSDP, tensor parallelism, both together; fp32, bf16, mixed; AdamW, fused, SGD, Muon
    "torch": Matrix(TORCH, (), torch_layouts.pairs(FULL), pairs.between_dtypes, compared=_without_muon),
}
if FULL:
    MATRICES |= {
        "piped-experts": _deepspeed("piped-experts", expert_names.piped_pairs(), compared=_fp32),
        "experts-with-sequence": _deepspeed("experts", expert_names.sequence_pairs(), compared=None),
        "experts-with-autotp": _deepspeed("experts", expert_names.tensor_pairs(), compared=_fp32),
        "auto-experts-with-autotp": _deepspeed("auto-experts", auto_expert_names.tensor_pairs(), why_not=NO_AUTO_EP),
        "auto-experts-with-sequence": _deepspeed(
            "auto-experts", auto_expert_names.sequence_pairs(), compared=None, why_not=NO_AUTO_EP
        ),
        # parameters to average keep the values of each rank, or take the mean
        "averaged": _deepspeed("averaged", megatron_names.averaged_pairs(), compared=None),
        "mpu-with-sequence": _deepspeed("mpu", megatron_names.sequence_pairs(), compared=None),
    }
COMPARED = [name for name, matrix in MATRICES.items() if matrix.compared is not None]


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Matrix, Path]:
    """Save all sources of a matrix, then load them."""
    matrix, folder = MATRICES[request.param], tmp_path_factory.mktemp(request.param)
    if matrix.why_not:
        pytest.skip(matrix.why_not)
    pairs.run(matrix.worker, *matrix.arguments, pairs=matrix.loaded, folder=folder, timeout_s=7200 if FULL else 900)
    return matrix, folder


@pytest.mark.parametrize("ran", MATRICES, indirect=True)
def test_every_state_is_bit_equal_after_load(ran: tuple[Matrix, Path]) -> None:
    matrix, folder = ran
    assert pairs.problems(matrix.loaded, folder) == {}


@pytest.mark.parametrize("ran", COMPARED, indirect=True)
def test_losses_continue_as_in_an_uninterrupted_run(ran: tuple[Matrix, Path]) -> None:
    matrix, folder = ran
    assert matrix.compared is not None
    chosen = [pair for pair in matrix.loaded if matrix.compared(*pair)]
    assert pairs.strayed(chosen, folder, matrix.rounding, matrix.loaded) == {}


@pytest.mark.parametrize("ran", ["megatron"], indirect=True)
def test_every_trained_parameter_has_its_hyperparameters_and_its_step(ran: tuple[Matrix, Path]) -> None:
    """Includes parameters whose states are only on later ranks of their data parallel group."""
    matrix, folder = ran
    bad = []
    for layout in dict.fromkeys(source for source, _ in matrix.loaded):
        checkpoint = Checkpoint.open(folder / layout.name)
        record = checkpoint.manifest.optimizer
        assert record is not None
        trained = {info.name for info in checkpoint.index.tensors if info.state == "exp_avg"}
        grouped = {name for group in record.groups for name in group.parameters}
        stepped = {name for group in record.scalars for name in group.parameters if "step" in group.hyperparameters}
        if not trained or grouped != trained or stepped != trained:
            bad.append(f"{layout.name}: {sorted(trained - grouped)[:3]}, {sorted(trained - stepped)[:3]}")
    assert not bad, bad


# ------------------------------------------------------------------------------------ which pairs CI takes


def test_the_chosen_pairs_of_zero_cover_every_pair_of_values() -> None:
    def values(layout: zero_names.Layout) -> list[object]:
        return [("world", layout.world), ("kind", layout.stage, layout.precision)]

    every = [layout for world in zero_names.WORLDS for layout in zero_names.layouts(world)]
    met = {pair for a, b in zero_names.pairs(FULL) for pair in itertools.product(values(a), values(b))}
    assert met == {pair for a in every for b in every for pair in itertools.product(values(a), values(b))}


def test_the_chosen_pairs_of_megatron_cover_every_pair_of_values() -> None:
    chosen, every = layout_pairs.pairs(), layout_pairs.layouts()
    assert set(layout_pairs.HARD) <= {(a.name, b.name) for a, b in chosen}
    for field in ("tp", "pp", "vpp", "cp", "ep", "dp", "optimizer"):
        values = {getattr(layout, field) for layout in every}
        assert {(getattr(a, field), getattr(b, field)) for a, b in chosen} == {(a, b) for a in values for b in values}, field
