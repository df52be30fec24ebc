"""Names of parameters that an optimizer numbers, with members whose shape is unknown because they never had a gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.hostile.source_folders import deepspeed_state
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main
from unickpt.transform.convert.parameter_order import NoOrderError, match_names


def test_a_member_of_unknown_shape_takes_the_only_place_that_is_left() -> None:
    shapes = {"a": (2,), "frozen": (3,), "b": (2,)}
    assert match_names(shapes, [[(2,), None, (2,)]]) == [["a", "frozen", "b"]]
    assert match_names(shapes, [[(2,), (2,)], [None]]) == [["a", "b"], ["frozen"]]


def test_a_member_of_unknown_shape_with_several_places_is_refused() -> None:
    with pytest.raises(NoOrderError, match="several"):
        match_names({"a": (2,), "b": (3,), "c": (4,)}, [[(2,), None]])


def test_a_checkpoint_without_zero_may_have_a_parameter_without_states(tmp_path: Path) -> None:
    """A job that gives frozen parameters to its optimizer."""
    state = deepspeed_state()
    state["module"] = {"frozen": torch.ones(4), **state["module"]}
    state["optimizer"]["state"] = {1: state["optimizer"]["state"][0]}
    state["optimizer"]["param_groups"][0]["params"] = [0, 1]
    (tmp_path / "tag").mkdir()
    torch.save(state, tmp_path / "tag" / "mp_rank_00_model_states.pt")
    assert main(["convert", str(tmp_path / "tag"), str(tmp_path / "made")]) == 0
    found = {info.key for info in Checkpoint.open(tmp_path / "made").index.tensors}
    assert {("frozen", "weight"), ("w", "exp_avg"), ("w", "master")} <= found
    assert ("frozen", "exp_avg") not in found
