"""What an exception or a signal means for a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from unickpt.base import failure_kinds
from unickpt.base.errors import ConfigError
from unickpt.base.failure_kinds import FailureKind, Remedy, rule_for, rules_from
from unickpt.base.first_failure import failed

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1 GiB is free."
)


class OwnError(Exception):
    """An exception of a program."""


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as err:
        return err


@pytest.mark.parametrize(
    ("error", "kind", "remedy"),
    [
        (KeyError("x"), FailureKind.PROGRAM, Remedy.STOP),
        (ModuleNotFoundError("no module"), FailureKind.PROGRAM, Remedy.STOP),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "bad"), FailureKind.PROGRAM, Remedy.STOP),
        (FileNotFoundError(2, "No such file"), FailureKind.PROGRAM, Remedy.STOP),
        (torch.OutOfMemoryError(OUT_OF_MEMORY), FailureKind.MEMORY, Remedy.STOP),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"), FailureKind.MEMORY,
         Remedy.STOP),
        (RuntimeError("CUDA error: device-side assert triggered"), FailureKind.PROGRAM, Remedy.STOP),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), FailureKind.DEVICE, Remedy.EVICT),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), FailureKind.DEVICE, Remedy.RESTART),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp, ncclRemoteError"), FailureKind.CONNECTION, Remedy.RESTART),
        (ConnectionResetError("peer"), FailureKind.CONNECTION, Remedy.RESTART),
        (OSError(28, "No space left on device"), FailureKind.STORAGE, Remedy.STOP),
        (OSError(5, "Input/output error"), FailureKind.STORAGE, Remedy.EVICT),
        (OSError(101, "Network is unreachable"), FailureKind.STORAGE, Remedy.RESTART),
        (KeyboardInterrupt(), FailureKind.ASKED, Remedy.RESTART),
        (OwnError("flaky"), FailureKind.UNKNOWN, Remedy.RESTART),
        (RuntimeError("flaky"), FailureKind.UNKNOWN, Remedy.RESTART),
    ],
    ids=lambda value: f"{type(value).__name__} {value}"[:40] if isinstance(value, BaseException) else "",
)  # fmt: skip
def test_each_exception_has_a_kind_and_a_remedy(error: BaseException, kind: FailureKind, remedy: Remedy) -> None:
    found = failed(raised(error), None, True)
    assert (found.kind, found.remedy, found.error) == (kind, remedy, type(error).__name__)


def test_real_misuse_of_torch_is_the_programs() -> None:
    with pytest.raises(RuntimeError) as err:
        print(torch.ones(2, 3) @ torch.ones(2, 3))
    assert failed(err.value, err.value.__traceback__, True).kind is FailureKind.PROGRAM


def test_sizes_of_memory_stay_in_the_text() -> None:
    assert (
        "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"
        in failed(torch.OutOfMemoryError(OUT_OF_MEMORY), None, False).text
    )


def test_what_the_loss_of_a_peer_has_caused_is_no_fault_of_the_program() -> None:
    error = ValueError("no batch")
    error.__cause__ = ConnectionResetError("peer")
    found = failed(error, None, False)
    assert (found.kind, found.remedy, found.follows) == (FailureKind.CONNECTION, Remedy.RESTART, True)


@pytest.mark.parametrize(
    ("name", "kind"), [("SIGKILL", FailureKind.KILLED), ("SIGTERM", FailureKind.ASKED), ("SIGABRT", FailureKind.CONNECTION)]
)
def test_signals_have_kinds(name: str, kind: FailureKind) -> None:
    assert rule_for([name], "").kind is kind


def test_a_file_extends_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "failures.json"
    path.write_text(
        json.dumps([{"error": "OwnError", "message": "fl.ky", "kind": "device", "do": "evict"}, {"error": "KeyError"}])
    )
    monkeypatch.setenv(failure_kinds.VARIABLE, str(path))
    assert failed(OwnError("flaky"), None, False).remedy is Remedy.EVICT
    assert failed(OwnError("other"), None, False).remedy is Remedy.RESTART
    assert failed(KeyError("x"), None, False).remedy is Remedy.RESTART
    assert failed(TypeError("x"), None, False).remedy is Remedy.STOP


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"), ("{}", "not a list"), ('[{"message": "x"}]', "rule 1: expected error"),
        ('[{"error": "("}]', "rule 1"), ('[{"error": "A", "do": "wait"}]', "rule 1"), ('[{"error": "A", "too": 1}]', "rule 1"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_and_the_table_alone_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    path = tmp_path / "failures.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        rules_from(path)
    monkeypatch.setenv(failure_kinds.VARIABLE, str(path))
    assert failed(KeyError("x"), None, False).remedy is Remedy.STOP
