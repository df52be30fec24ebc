"""Which of Megatron's persistent and non-persistent checkpoints a job resumes from: the choice, without Megatron's scripts."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from megatron_unickpt.pretraining.non_persistent import SUBDIRECTORY, choices_of
from tests.support.saves import saved
from unickpt.checkpoint.checkpoint_folder import TRACKER, iteration_name


def made(folder: Path, *iterations: int, native: int | None = None) -> Path:
    """A folder of the scripts with these iterations in our format, and one in Megatron's own."""
    folder.mkdir(parents=True, exist_ok=True)
    for iteration in iterations:
        saved(folder, iteration_name(iteration))
        (folder / "latest").unlink()
    if native is not None:
        (folder / iteration_name(native)).mkdir()
        (folder / iteration_name(native) / "common.pt").touch()
    newest = max([*iterations, *([] if native is None else [native])])
    (folder / TRACKER).write_text(str(newest))
    return folder


def order(folder: Path, options: Namespace, step: int | None = None) -> list[str]:
    """Everything that is tried if all of it is damaged."""
    choices, found = choices_of(options, str(folder), step), list[str]()
    while (choice := choices()).directory:
        found.append(str(Path(choice.directory).relative_to(folder.parent)))
    return found


def options(folder: Path | None = None, kind: str | None = "global") -> Namespace:
    return Namespace(non_persistent_ckpt_type=kind, non_persistent_global_ckpt_dir=None if folder is None else str(folder))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made(tmp_path / "run" / SUBDIRECTORY, 3, 5)
    return made(tmp_path / "run", 2, 4)


def test_the_newer_of_both_is_tried_first(run: Path) -> None:
    inside = f"run/{SUBDIRECTORY}"
    expected = [f"{inside}/iter_0000005", "run/iter_0000004", f"{inside}/iter_0000003", "run/iter_0000002"]
    assert order(run, options()) == expected
    made(run, 6)
    assert order(run, options()) == ["run/iter_0000006", *expected]
    made(run / SUBDIRECTORY, 6)
    assert order(run, options())[:2] == [f"{inside}/iter_0000006", "run/iter_0000006"], "of two equal ones, as Megatron does"


def test_a_job_without_non_persistent_checkpoints_does_not_look(run: Path) -> None:
    assert order(run, options(kind=None)) == order(run, options(kind="local")) == ["run/iter_0000004", "run/iter_0000002"]
    assert order(run, Namespace()) == ["run/iter_0000004", "run/iter_0000002"]


def test_non_persistent_checkpoints_have_their_own_folder(run: Path, tmp_path: Path) -> None:
    other = made(tmp_path / "scratch", 7)
    assert order(run, options(other)) == ["scratch/iter_0000007", "run/iter_0000004", "run/iter_0000002"]
    assert order(run, options(tmp_path / "nowhere")) == ["run/iter_0000004", "run/iter_0000002"]
    assert order(tmp_path / "empty", options(other)) == ["scratch/iter_0000007"], "before the first persistent one"


def test_a_step_that_is_named_is_loaded_wherever_it_is(run: Path) -> None:
    assert order(run, options(), 4) == ["run/iter_0000004"]
    assert order(run, options(), 3) == [f"run/{SUBDIRECTORY}/iter_0000003"]
    assert order(run, options(), 9) == []


def test_megatron_loads_its_own_format_if_it_is_newer(tmp_path: Path) -> None:
    run = made(tmp_path / "a", 2, native=6)
    made(run / SUBDIRECTORY, 5)
    assert order(run, options()) == []
    made(run / SUBDIRECTORY, 6)
    assert order(run, options())[0] == f"a/{SUBDIRECTORY}/iter_0000006"
    run = made(tmp_path / "b", 2, 6)
    made(run / SUBDIRECTORY, 3, native=6)
    assert order(run, options()) == []
    (run / SUBDIRECTORY / TRACKER).write_text("3")
    assert order(run, options())[0] == "b/iter_0000006"


def test_a_step_or_a_tracked_checkpoint_that_neither_folder_has(run: Path) -> None:
    choice = choices_of(options(), str(run), 9)()
    assert not choice.directory
    assert choice.missing.count("--ckpt-step 9") == 2
    assert choices_of(options(), str(run), 3)().step == 3
    empty = run.parent / "empty"
    empty.mkdir()
    (empty / TRACKER).write_text("7")
    assert "names iteration 7" in choices_of(options(), str(empty), None)().missing
    made(empty / SUBDIRECTORY, 2)
    assert choices_of(options(), str(empty), None)().step == 2
