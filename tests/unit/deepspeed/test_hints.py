"""DeepSpeed's converters as programs, on a unickpt checkpoint. Python runs a copy of their module, which no hook reaches."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

import deepspeed.utils.zero_to_fp32 as stock_converter

from ds_unickpt.saving import hints
from tests.support.trainer_folders import made
from unickpt.checkpoint.load.validation import is_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules after import of package:RuntimeWarning")

FP32, UNIVERSAL = "deepspeed.utils.zero_to_fp32", "deepspeed.checkpoint.ds_to_universal"


def message_of(
    module: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Run a module as a program. Return what Python prints on its error."""
    monkeypatch.setattr(sys, "argv", [f"{module.rpartition('.')[2]}.py", *arguments])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    hints.explain_uncaught([sys.executable, "-m", module, *arguments])
    with pytest.raises((FileNotFoundError, ValueError)) as caught:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.excepthook(caught.type, caught.value, caught.tb)
    return capsys.readouterr().err


@pytest.mark.parametrize("place", ["checkpoint-5", "checkpoint-5/global_step5", ""])
def test_zero_to_fp32_ends_with_the_remedy(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given, checkpoint = made(tmp_path / "out", 5) / place, tmp_path / "out" / "checkpoint-5" / "global_step5"
    err = message_of(FP32, [str(given), str(tmp_path / "hf")], monkeypatch, capsys)
    assert "Traceback" not in err
    assert err.strip().splitlines()[-1].startswith(f"zero_to_fp32.py: {checkpoint} is a unickpt checkpoint")
    assert f"unickpt export {checkpoint} OUT" in err


def test_ds_to_universal_ends_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = made(tmp_path, 5) / "checkpoint-5" / "global_step5"
    for arguments in ([f"--input_folder={checkpoint}"], ["--input_folder", str(checkpoint.parent)]):
        err = message_of(UNIVERSAL, [*arguments, "--output_folder", str(tmp_path / "made")], monkeypatch, capsys)
        assert "Traceback" not in err
        assert f"unickpt export {checkpoint} OUT --to deepspeed-universal" in err


def test_another_error_of_a_converter_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "latest").write_text("global_step5")
    err = message_of(FP32, [str(tmp_path), str(tmp_path / "hf")], monkeypatch, capsys)
    assert "Traceback" in err
    assert "unickpt export" not in err


def test_a_training_job_keeps_its_excepthook() -> None:
    before = sys.excepthook
    hints.explain_uncaught([sys.executable, "train.py", "--zero_to_fp32", "yes"])
    assert sys.excepthook is before


def test_a_call_with_the_folder_of_the_checkpoint_itself_names_the_remedy(tmp_path: Path) -> None:
    """DeepSpeed looks for a file ``latest`` in it."""
    checkpoint = made(tmp_path, 5) / "checkpoint-5" / "global_step5"
    assert is_checkpoint(checkpoint)
    with pytest.raises(FileNotFoundError, match=f"unickpt export {checkpoint} OUT"):
        stock_converter.get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
