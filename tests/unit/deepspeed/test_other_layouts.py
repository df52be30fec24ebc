"""The text that is appended to DeepSpeed's refusal of its own checkpoint under another layout."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from ds_unickpt.loading.other_layouts import FilesLayout, with_advice
from tests.hostile.source_folders import deepspeed_state


class TwoArgumentsError(Exception):
    """An error whose text is not what it was made of."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")
        self.first = first


class Engine:
    """The properties of a DeepSpeedEngine that a layout consists of."""

    def __init__(self, stage: int, world: int, bf16: bool = False, *, universal: bool = False) -> None:
        self.universal = universal
        self.stage, self.seq_dp_world_size, self.dp_world_size, self.mp_world_size, self.bf16 = stage, world, world, 1, bf16

    def zero_optimization_stage(self) -> int:
        return self.stage

    def bfloat16_enabled(self) -> bool:
        return self.bf16

    def fp16_enabled(self) -> bool:
        return False

    def load_universal_checkpoint(self) -> bool:
        return self.universal


def stock(folder: Path, stage: int = 2, world: int = 2, optimizers: int | None = None) -> Path:
    """Write the files of a save directory of DeepSpeed as far as their names and first entries tell the layout."""
    place = folder / "global_step3"
    place.mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    state: dict[str, Any] = {**deepspeed_state(), "dp_world_size": world, "ds_config": {"zero_optimization": {"stage": stage}}}
    names = [f"zero_pp_rank_{rank}_" for rank in range(world)] if stage == 3 else [""]
    for name in names:
        torch.save(state, place / f"{name}mp_rank_00_model_states.pt")
    for rank in range(world if optimizers is None else optimizers) if stage else ():
        torch.save({}, place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


@pytest.mark.parametrize(
    ("stage", "world", "bf16", "loads"),
    [
        (2, 2, False, True),
        (1, 2, False, True),
        (2, 3, False, False),
        (3, 2, False, False),
        (0, 2, False, False),
        (2, 2, True, False),
    ],
)
def test_advice_is_given_for_another_layout_only(stage: int, world: int, bf16: bool, loads: bool, tmp_path: Path) -> None:
    error = AssertionError()
    told = with_advice(error, Engine(stage, world, bf16), stock(tmp_path / "a b"), None, enabled=False)
    assert (told is error) is loads
    if not loads:
        source = tmp_path / "a b" / "global_step3"
        new = tmp_path / "a b" / "converted" / "global_step3"
        assert f"    unickpt convert '{source}' '{new}'\nThen call load_checkpoint({str(new)!r}), with" in str(told)
        assert '"unickpt": {"enabled": true} in the DeepSpeed JSON' in str(told)
        assert "under ZeRO stage 2, fp32, 2 data parallel ranks" in str(told)


def test_without_zero_any_number_of_ranks_fits(tmp_path: Path) -> None:
    error = RuntimeError("another model")
    assert with_advice(error, Engine(0, 5), stock(tmp_path, stage=0), None, enabled=True) is error


@pytest.mark.parametrize(
    "error",
    [
        AssertionError(),
        KeyError("param_groups"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "zero_pp_rank_2"),
        TwoArgumentsError("one", "two"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "odd"),
    ],
)
def test_an_error_keeps_its_class_and_its_text(error: Exception, tmp_path: Path) -> None:
    told = with_advice(error, Engine(2, 3), stock(tmp_path), "global_step3", enabled=True)
    assert isinstance(told, type(error))
    assert str(told).startswith(str(error))
    assert f"Then call load_checkpoint({str(tmp_path / 'converted')!r}, tag='global_step3')." in str(told)
    assert vars(told) == vars(error)
    first = [traceback.format_exception_only(type(each), each)[0].partition(":")[0].strip() for each in (told, error)]
    assert first[0] == first[1], "a traceback names the class as before"


def test_missing_files_are_named_because_no_command_helps(tmp_path: Path) -> None:
    told = with_advice(FileNotFoundError("x"), Engine(2, 2), stock(tmp_path, optimizers=1), None, enabled=True)
    assert "1 of its 2 optimizer files are missing, such as *zero_pp_rank_1_mp_rank_00_optim_states.pt" in str(told)
    assert "    unickpt convert" not in str(told)


def test_a_folder_of_another_kind_gives_no_advice(tmp_path: Path) -> None:
    error = KeyError("x")
    for load_dir in (tmp_path, tmp_path / "missing", "s3://bucket/run"):
        assert with_advice(error, Engine(2, 2), load_dir, None, enabled=False) is error


def test_pipelines_count_as_model_parallel_ranks() -> None:
    assert not FilesLayout(1, "fp32", 2, 1).loads(FilesLayout(1, "fp32", 2, 2))
    assert FilesLayout(2, "fp32", 2, 2).loads(FilesLayout(1, "", 2, 2))


@pytest.mark.parametrize("name", ["layers.0.weight", "head"])
def test_a_parameter_that_a_universal_folder_lacks_is_named(name: str, tmp_path: Path) -> None:
    place = stock(tmp_path) / "global_step3"
    (place / "zero" / "head").mkdir(parents=True)
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", str(place / "zero" / name))
    told = with_advice(missing, Engine(3, 2, universal=True), tmp_path, "global_step3", enabled=False)
    assert (f"no states of {name}, which this job trains" in str(told)) is (name != "head")
    assert told.filename == missing.filename  # type: ignore[attr-defined]
