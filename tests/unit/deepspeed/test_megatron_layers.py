"""The parts of parameters of Megatron-style layers, against DeepSpeed's own merge of them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.ds_to_universal import merge_tp_slices

from ds_unickpt.framework import megatron_layers, tensor_parallel
from ds_unickpt.framework.fallbacks import MPU_LAYOUT
from ds_unickpt.held_state.vocabulary import PaddedRows, fitted
from ds_unickpt.loading.reads import mean
from ds_unickpt.placing.slices import Slice
from unickpt.base.errors import FormatError
from unickpt.checkpoint.load.vocabulary import Rows
from unickpt.transform.convert.deepspeed.patterns import Cut, cut_of

COLUMN: dict[str, Any] = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
ROW: dict[str, Any] = {"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 1}
WHOLE: dict[str, Any] = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}
SUB = "parameter_with_sub_params"
# name -> (universal_checkpoint_info, attributes, shape of the whole parameter)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "columns": ({}, COLUMN, (8, 3)),
    "rows": ({}, ROW, (3, 8)),
    "vector": ({}, COLUMN, (8,)),
    "replica": ({"tp_replicated_parameter_patterns": ["weight"]}, {}, (8, 3)),
    "listed rows": ({"parameter_with_row_parallelism_patterns": ["weight"]}, ROW, (3, 8)),
    "listed rows alone": ({"parameter_with_row_parallelism_patterns": ["wei(g|G)ht"]}, {}, (3, 8)),
    "vocabulary": ({"vocabulary_parameter_patterns": ["weight"], "original_vocab_size": 8}, {}, (8, 3)),
    "halves": ({"parameter_with_2_sub_params_cat_dim_0": ["weight"]}, COLUMN, (16, 3)),
    "count": ({SUB: [{"patterns": ["weight"], "shape": (3, -1), "partition_dim": 0}]}, COLUMN, (24, 2)),
    "sizes": ({SUB: [{"patterns": ["weight"], "shape": ((8, 4, 4), 3), "partition_dim": 0}]}, COLUMN, (16, 3)),
    "sizes of a vector": ({SUB: [{"patterns": ["weight"], "shape": ((8, 4),), "partition_dim": 0}]}, {}, (12,)),
    "columns of sub-parameters": (
        {SUB: [{"patterns": ["weight"], "shape": (3, (4, 8)), "partition_dim": 1}]}, {}, (3, 12)),
    "heads of sub-parameters": (
        {SUB: [{"patterns": ["weight"], "shape": (2, (8, 4), -1), "partition_dim": 1}]}, {}, (24, 3)),
    "uneven": (
        {SUB: [{"patterns": ["weight"], "shape": ((6, 2), 3), "partition_dim": 0}], "universal_checkpoint_version": 0.4,
         "sub_param_shard_widths": {"weight": [[2, 1, 2, 1], [1, 1, 0, 0]]}}, {}, (8, 3)),
}  # fmt: skip


def _engine(local: torch.Tensor, rank: int, ranks: int, info: Any, attributes: dict[str, Any]) -> Any:
    """The attributes of an engine, a module and an mpu that are read."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(local)
    vars(module.weight).update(attributes)
    module.universal_checkpoint_info = info  # type: ignore[assignment]
    mpu = SimpleNamespace(get_tensor_model_parallel_rank=lambda: rank, get_tensor_model_parallel_world_size=lambda: ranks)
    return SimpleNamespace(module=module, mpu=mpu, autotp_size=lambda: 1, has_moe_layers=False)


def _slice(local: torch.Tensor, rank: int, ranks: int, info: Any, attributes: dict[str, Any]) -> Slice:
    engine = _engine(local, rank, ranks, info, attributes)
    return tensor_parallel.slices(engine).of(engine.module.weight)


def _local(name: str, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The shape of one of four ranks."""
    info, attributes, _ = CASES[name]
    if name == "uneven":
        return (sum(each[rank] for each in info["sub_param_shard_widths"]["weight"]), *shape[1:])
    if name == "replica":
        return shape
    dim = 1 if attributes == ROW or name in ("listed rows alone", "columns of sub-parameters") else 0
    return (*shape[:dim], shape[dim] // 4, *shape[dim + 1 :])


@pytest.mark.parametrize("name", [name for name in CASES if name != "uneven"])
def test_the_parts_are_those_that_deepspeed_merges(name: str, tmp_path: Path) -> None:
    info, attributes, shape = CASES[name]
    _assert_merges(name, info, attributes, shape, tmp_path)


def test_the_widths_of_ranks_are_those_of_deepspeed(tmp_path: Path) -> None:
    info, _, shape = CASES["uneven"]
    cut = cut_of("weight", info, "here")
    assert cut == Cut(0, parts=2, view=((6, 2), 3), widths=((2, 1, 2, 1), (1, 1, 0, 0)))
    from unickpt.transform.convert.deepspeed.tensor_parallel import divided

    shapes = [_local("uneven", shape, rank) for rank in range(4)]
    found = divided("weight", shapes, cut, "here")
    parts = [_filled(shapes[rank], found.placed[rank], shape) for rank in range(4)]
    assert torch.equal(_merged(tmp_path, info, parts), _whole(shape))


def _assert_merges(name: str, info: dict[str, Any], attributes: dict[str, Any], shape: tuple[int, ...], folder: Path) -> None:
    parts, stored = [], torch.zeros(shape)
    for rank in range(4):
        local = _local(name, shape, rank)
        found = _slice(torch.zeros(local), rank, 4, lambda: info, attributes)
        assert (found.shape, found.local) == (shape, local)
        parts.append(_filled(local, found.boxes, shape))
        for box in found.own:
            stored[box.whole.slices()] += 1
    assert torch.equal(stored, torch.ones(shape)), "every element is stored once"
    assert torch.equal(_merged(folder, info, parts, dim=1 if attributes == ROW else 0).view(shape), _whole(shape))


def _whole(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def _filled(local: tuple[int, ...], boxes: Any, shape: tuple[int, ...]) -> torch.Tensor:
    part = torch.full(local, -1.0)
    for box in boxes:
        part[box.local.slices()] = _whole(shape)[box.whole.slices()]
    return part


def _merged(folder: Path, info: dict[str, Any], parts: list[torch.Tensor], dim: int = 0) -> Any:
    """What DeepSpeed makes of the parts. Without a pattern it concatenates along dimension 0, and knows no attributes."""
    info = {**info, **({"parameter_with_row_parallelism_patterns": ["weight"]} if dim else {})}
    for rank, part in enumerate(parts):
        (folder / "slices" / "weight" / str(rank)).mkdir(parents=True)
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save(part.flatten(), folder / "slices" / "weight" / str(rank) / f"{state}.00")
    merge_tp_slices(info, str(folder), str(folder / "slices"), len(parts), ("weight", [part.shape for part in parts]))
    return torch.load(folder / "weight" / "fp32.pt", weights_only=False)["param"]


def test_a_stride_divides_equal_sub_parameters() -> None:
    found = _slice(torch.zeros(4, 3), 1, 2, {}, {**COLUMN, "partition_stride": 2})
    assert [(box.local.start[0], box.whole.start[0]) for box in found.boxes] == [(0, 2), (2, 6)]


@pytest.mark.parametrize(
    ("info", "attributes", "message"),
    [
        ({}, {}, "neither universal_checkpoint_info nor the parameter itself tells how the ranks divide weight"),
        (None, {}, "neither universal_checkpoint_info nor the parameter"),
        ({"parameter_with_row_parallelism_patterns": ["weight"]}, COLUMN, "divide along dimension 1 weight, but its attr"),
        ({"tp_replicated_parameter_patterns": ["weight"]}, COLUMN, "replicate weight, but its attributes .* divide along dim"),
        ({"vocabulary_parameter_patterns": ["weight"]}, WHOLE, "along dimension 0 weight, but its attributes .* replicate it"),
        ({}, {"tensor_model_parallel": True}, "weight has tensor_model_parallel=True with partition_dim -1"),
        ({}, {**COLUMN, "partition_stride": 3}, r"weight of shape \(4, 3\) cannot be divided into 3 equal parts"),
        ({}, {**COLUMN, "partition_dim": 2}, "cannot be concatenated along dimension 2"),
        ("text", COLUMN, "Module.universal_checkpoint_info is a str, expected a dict"),
        (lambda: {}["nothing"], COLUMN, r"Module.universal_checkpoint_info fails \(KeyError: 'nothing'\)"),
        ({"vocabulary_parameter_patterns": [3]}, COLUMN, "universal_checkpoint_info does not describe weight"),
        ({SUB: [{"patterns": ["weight"], "shape": ((9, 4), 3), "partition_dim": 0}]}, {}, "which 2 ranks cannot divide"),
        ({SUB: [{"patterns": ["weight"], "shape": ((8, 4), 3), "partition_dim": 0}]}, {}, r"sub-parameters have shape \(6, 3"),
        ({SUB: [{"patterns": ["weight"], "shape": (2, 3), "partition_dim": 2}]}, {}, "along dimension 2"),
    ],
)  # fmt: skip
def test_a_layout_that_is_not_told_is_refused_by_name(info: Any, attributes: dict[str, Any], message: str) -> None:
    engine = _engine(torch.zeros(4, 3), 1, 2, info, attributes)
    with pytest.raises(FormatError, match=message):
        tensor_parallel.slices(engine)
    assert MPU_LAYOUT.found is not None
    text = MPU_LAYOUT.found(engine)
    assert text.startswith("a tensor-parallel layout that cannot be read: ")


def test_a_parameter_to_average_is_whole_and_of_each_rank(tmp_path: Path) -> None:
    info = {"parameter_to_average_patterns": ["weight"]}
    for rank in range(2):
        found = _slice(torch.zeros(4, 3), rank, 2, info, WHOLE)
        assert (found.shape, found.boxes, found.averaged, found.replicated) == ((4, 3), found.own, True, False)
    values = [torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    assert torch.equal(mean(values).flatten(), _merged(tmp_path, info, values).flatten()), "the mean is DeepSpeed's"


def test_an_mpu_of_deepspeeds_sequence_parallelism_is_not_tensor_parallel() -> None:
    mpu = SimpleNamespace(initialize_sequence_parallel=print, get_sequence_parallel_world_size=lambda: 2)
    engine: Any = SimpleNamespace(mpu=mpu, autotp_size=lambda: 1)
    assert (megatron_layers.degree(engine), megatron_layers.rank(engine)) == (1, 0)
    assert megatron_layers.undescribed(engine) == ""


def test_padding_of_a_vocabulary_may_differ_and_entries_may_not() -> None:
    def rows(stored: int, own: int, known: int | None, entries: int | None) -> Rows | None:
        return PaddedRows({"words": entries}, {"words": known}).rows("words", "words", (stored, 3), (own, 3))

    assert rows(12, 16, 10, 10) == Rows(zeros=(12, 16))
    assert rows(16, 12, 10, 10) == Rows()
    assert "10 of them entries" in getattr(rows(16, 9, 10, None), "refused", "")
    assert "14 entries in this job" in getattr(rows(12, 16, 10, 14), "refused", "")
    assert getattr(rows(16, 12, None, 10), "refused", "")
    assert PaddedRows({"words": 1}).rows("words", "words", (4, 3), (4, 5)) is None
    assert PaddedRows({"words": 1}).rows("other", "other", (4, 3), (5, 3)) is None


def test_rows_that_a_checkpoint_lacks_are_left_out_of_the_slice() -> None:
    part = _slice(torch.zeros(6, 3), 1, 2, {"vocabulary_parameter_patterns": ["weight"]}, COLUMN)
    found = fitted(part, (8, 3))
    assert [(box.local.shape, box.whole.start) for box in found.boxes] == [((2, 3), (6, 0))]
    assert (part.complete, found.complete, fitted(part, (6, 3)).boxes) == (True, False, ())
