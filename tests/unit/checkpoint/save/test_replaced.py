"""What a framework has saved itself does not stay beside a later checkpoint of unickpt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.needs import needs
from unickpt.checkpoint.save.replaced import remove_replaced


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_the_files_and_folders_of_the_framework_are_removed(tmp_path: Path) -> None:
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt", "mine.pt", "manifest.json"):
        (tmp_path / name).touch()
    for folder in ("mp_rank_00", "data"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model_optim_rng.pt").touch()
    remove_replaced(str(tmp_path), "it", ("*_states.pt",), ("mp_rank_*",))
    assert names(tmp_path) == ["data", "manifest.json", "mine.pt"]
    assert names(tmp_path / "data") == ["model_optim_rng.pt"]


def test_a_file_that_cannot_be_removed_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a_states.pt").mkdir()  # not a file: deleting it fails for every user
    (tmp_path / "a_states.pt" / "x").touch()
    remove_replaced(str(tmp_path), "it", (), ("*_states.pt",))
    assert not (tmp_path / "a_states.pt").exists()
    (tmp_path / "b_states.pt" / "deeper").mkdir(parents=True)
    remove_replaced(str(tmp_path), "it", (), ("*_states.pt",))
    assert "(b_states.pt). Delete them: it alone would load them." in caplog.messages[-1]


@needs("megatron")
def test_megatron_finds_a_checkpoint_of_unickpt_where_it_had_saved_itself(tmp_path: Path) -> None:
    from megatron_unickpt.framework import marks

    for name in ("__0_0.distcp", "common.pt", ".metadata", "manifest.json"):
        (tmp_path / name).touch()
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    marks.complete(str(tmp_path))
    assert names(tmp_path) == ["manifest.json", "metadata.json"]
    assert json.loads((tmp_path / "metadata.json").read_text())["sharded_backend"] == "unickpt"
    (tmp_path / "common.pt").touch()  # what a library adds later is its own
    marks.complete(str(tmp_path))
    assert (tmp_path / "common.pt").exists()
