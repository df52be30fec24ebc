"""The public API: what it exports, that all of it is documented, and that it saves and loads."""

from __future__ import annotations

import copy
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import unickpt
from tests.support import handmade
from tests.support.forked_jobs import fork_ranks
from tests.support.opened_files import opened_files
from tests.support.repository import REPO
from unickpt.base.errors import MismatchError, SaveFailedError
from unickpt.checkpoint.checkpoint_folder import read_manifest
from unickpt.checkpoint.storage.open import open_storage
from unickpt.testing.launch import environment

STATE = {"layer.weight": torch.arange(32.0).reshape(8, 4), ("layer.weight", "exp_avg"): torch.full((8, 4), 0.5)}


def blank() -> dict[Any, Any]:
    return {key: torch.zeros_like(value) for key, value in STATE.items()}


def test_every_public_name_is_documented_and_no_other() -> None:
    pages = [REPO / "docs/reference/python-api.md", *sorted((REPO / "docs/reference/api").glob("*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    assert sorted(re.findall(r"^::: unickpt\.(\w+)$", text, re.M)) == sorted(unickpt.__all__)
    assert 'examples/python_api.py"' in text


@pytest.mark.parametrize("name", unickpt.__all__)
def test_a_public_name_has_a_complete_docstring(name: str) -> None:
    value = getattr(unickpt, name)
    text = inspect.getdoc(value) or ""
    assert text
    if inspect.isfunction(value):
        for section in ("Example:", "Args:", "Returns:", "Raises:"):
            assert section in text, section
        missing = [word for word in inspect.signature(value).parameters if not re.search(rf"^ +{word}: ", text, re.M)]
        assert not missing


def test_importing_unickpt_imports_only_the_standard_library() -> None:
    code = "import sys, unickpt; print(sorted({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)))"
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(REPO)!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(), timeout=60)
    assert done.stdout.strip() == "['__main__', 'unickpt']"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'frobnicate'"):
        _ = unickpt.frobnicate


def test_the_example_saves_on_two_ranks_and_loads_on_one(tmp_path: Path) -> None:
    fork_ranks(2, "examples.python_api", "save", str(tmp_path))
    command = [sys.executable, "-m", "examples.python_api", "load", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=REPO, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loaded step 100, epoch 3\n")
    assert unickpt.verify_checkpoint(tmp_path / "step100").problems == ()
    checkpoint = unickpt.Checkpoint.open(tmp_path / "step100")
    assert [checkpoint.rank_objects(rank).value for rank in (0, 1)] == [{"sampler": 0}, {"sampler": 1}]


def test_one_process_saves_and_loads_bit_for_bit(tmp_path: Path) -> None:
    result = unickpt.save_checkpoint(STATE, tmp_path / "a", step=7, objects={"note": (1, 2)})
    assert result.size_bytes > 256
    assert unickpt.latest_checkpoint(tmp_path) == str(tmp_path / "a")
    found = blank()
    loaded = unickpt.load_checkpoint(tmp_path, found)
    assert all(torch.equal(found[key], STATE[key]) for key in STATE)
    assert (loaded.step, loaded.objects) == (7, {"note": (1, 2)})
    assert loaded.report.count()["restored"] == 3


def test_a_load_opens_manifest_and_index_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unickpt.save_checkpoint(STATE, tmp_path / "a")
    opened = opened_files(monkeypatch)
    unickpt.load_checkpoint(tmp_path, blank())
    assert sorted(name for name in opened if not name.startswith("data/")) == ["index.safetensors", "latest", "manifest.json"]


def test_a_derived_weight_is_rounded_as_the_saving_job_had_it(tmp_path: Path) -> None:
    directory = handmade.save_single(tmp_path)
    found = {"layer.weight": torch.zeros(handmade.LAYER_SHAPE)}  # float32: the stored weight is bfloat16
    loaded = unickpt.load_checkpoint(directory, found)
    assert torch.equal(found["layer.weight"], handmade.weight().float())
    part = unickpt.LocalShard(torch.zeros(2, 3, dtype=torch.bfloat16), start=(2, 1), global_shape=handmade.LAYER_SHAPE)
    unickpt.load_checkpoint(directory, {"layer.weight": part})
    assert torch.equal(part.data, handmade.weight()[2:, 1:4])
    assert ("embed.weight", "left out") in {(entry.name, entry.outcome) for entry in loaded.report.entries}


def test_a_load_skips_a_damaged_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        unickpt.save_checkpoint({"w": torch.full((100,), float(step))}, tmp_path / f"s{step}", step=step)
    handmade.flip_bit(tmp_path / "s2/data/rank00000.safetensors", -1)
    state = {"w": torch.zeros(100)}
    loaded = unickpt.load_checkpoint(tmp_path, state)
    assert (loaded.step, state["w"][0].item()) == (1, 1.0)
    assert "s2" in loaded.report.skipped[0]
    with pytest.raises(unickpt.CorruptCheckpointError, match=r"w \(weight\)"):
        unickpt.load_checkpoint(tmp_path / "s2", state)
    with pytest.raises(unickpt.CorruptCheckpointError):
        unickpt.load_checkpoint(tmp_path, state, fall_back=False)


def test_mismatches_are_reported_before_anything_is_read(tmp_path: Path) -> None:
    unickpt.save_checkpoint(STATE, tmp_path / "a")
    found = {"layer.weight": torch.zeros(8, 4), "other": torch.zeros(1)}
    with pytest.raises(unickpt.MismatchError, match=r"has no other \(weight\)"):
        unickpt.load_checkpoint(tmp_path, found)
    assert not found["layer.weight"].any()
    with pytest.raises(unickpt.MismatchError, match=r"\[8, 4\] in the checkpoint and \[4, 8\] in the state dict"):
        unickpt.load_checkpoint(tmp_path, {"layer.weight": torch.zeros(4, 8)})
    with pytest.raises(unickpt.NotACheckpointError, match="no 'latest' file"):
        unickpt.load_checkpoint(tmp_path / "nowhere", found)


def test_parameters_that_are_not_requested_are_a_warning_or_with_strict_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unickpt.save_checkpoint({**STATE, "adapter.weight": torch.ones(2)}, tmp_path / "a", step=1)
    state = blank()
    with pytest.raises(MismatchError, match=r"1 parameters that no rank requested: adapter.weight.*strict=False"):
        unickpt.load_checkpoint(tmp_path, state, strict=True)
    assert not any(value.any() for value in state.values())
    unickpt.load_checkpoint(tmp_path, state)
    assert "no rank requested 1 of its parameters: adapter.weight" in caplog.text
    assert torch.equal(state["layer.weight"], STATE["layer.weight"])
    caplog.clear()
    unickpt.load_checkpoint(tmp_path, {("layer.weight", "exp_avg"): torch.zeros(8, 4)}, strict=True)
    assert not caplog.records


def test_a_save_that_fails_raises_and_leaves_earlier_checkpoints(tmp_path: Path) -> None:
    unickpt.save_checkpoint(STATE, tmp_path / "a")
    hole = unickpt.LocalShard(torch.zeros(4, 4), start=(0, 0), global_shape=(8, 4))
    with pytest.raises(unickpt.SaveFailedError, match=r"layer\.weight"):
        unickpt.save_checkpoint({"layer.weight": hole}, tmp_path / "b")
    assert unickpt.latest_checkpoint(tmp_path) == str(tmp_path / "a")
    for state in ({"w": "no tensor"}, {3: torch.zeros(1)}):
        with pytest.raises(unickpt.SaveFailedError, match="ConfigError"):
            unickpt.save_checkpoint(state, tmp_path / "c")  # type: ignore[arg-type]
    with pytest.raises(unickpt.ConfigError, match="asynchronous"):
        unickpt.save_checkpoint(STATE, tmp_path / "d", options=unickpt.SaveOptions(asynchronous=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest"]


@pytest.mark.parametrize(
    ("start", "shape", "words"),
    [((5, 0), (8, 4), r"\[5, 9\) leaves dimension 0"), ((0,), (8, 4), "dimensions"), ((-1, 0), (8, 4), "leaves")],
)
def test_a_shard_must_lie_within_its_tensor(start: tuple[int, ...], shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(unickpt.ConfigError, match=words):
        unickpt.LocalShard(torch.zeros(4, 4), start, shape)


def test_a_copy_takes_the_place_of_an_older_copy_that_is_still_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    best = None
    for step in range(3):
        new = copy.deepcopy(state)
        unickpt.save_checkpoint(new, tmp_path / "best", step=step)
        best = new
    assert best is not None
    assert read_manifest(open_storage(str(tmp_path / "best"))).step == 2
    assert len([text for text in caplog.messages if "is replaced by one of" in text]) == 2


def test_the_checkpoint_of_another_model_that_this_process_holds_is_not_replaced(tmp_path: Path) -> None:
    actor, critic, student = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1), torch.nn.Linear(2, 2)
    unickpt.save_checkpoint(actor.state_dict(), tmp_path / "last")
    with pytest.raises(SaveFailedError, match="another model"):
        unickpt.save_checkpoint(critic.state_dict(), tmp_path / "last")
    unickpt.save_checkpoint(critic.state_dict(), tmp_path / "critic")
    unickpt.save_checkpoint(actor.state_dict(), tmp_path / "last")
    for step in range(2):  # copies that the process does not keep
        unickpt.save_checkpoint({"a": torch.ones(2 + step)}, tmp_path / "copies", step=step)
    unickpt.load_checkpoint(tmp_path / "last", student.state_dict())
    unickpt.save_checkpoint(student.state_dict(), tmp_path / "last")
