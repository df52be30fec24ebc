"""Hooks on a framework whose source has changed, and the self-tests that decide about them."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from unickpt.base import hooks, self_test
from unickpt.base.errors import UnsupportedFrameworkError
from unickpt.base.hooks import Hook, fingerprint, judged

KNOWN = "0123456789ab"


def _hook(name: str, *, fingerprints: frozenset[str] = frozenset({KNOWN}), strict: bool = True, parameters: Any = ()) -> Hook:
    return Hook(
        f"it.{name}", "it_framework", name, lambda wrapped, _, args, kwargs: ("hooked", wrapped(*args, **kwargs)),
        SpecifierSet(">=1,<2"), fingerprints, "", "", "", parameters, strict,
    )  # fmt: skip


def save(path: str) -> str:
    return path


def load(path: str) -> str:
    return path


@pytest.fixture(autouse=True)
def framework(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module with two functions, and a registry of hooks without any."""
    module: Any = types.ModuleType("it_framework")
    module.save, module.load = save, load
    monkeypatch.setitem(sys.modules, "it_framework", module)
    for registry in ("_status", "_installed", "_waiting", "_refused"):
        monkeypatch.setattr(hooks, registry, {})
    for variable in (hooks.ALLOW_UNTESTED, hooks.REQUIRE, self_test.RUNNING):
        monkeypatch.delenv(variable, raising=False)
    return module


def install(*declared: Hook, version: str = "2.1", verify: Any = None) -> bool:
    return hooks.install(list(declared), framework="It", version=version, verify=verify)


def states() -> dict[str, str]:
    return {each.hook.name: each.state for each in hooks.status()}


def test_a_known_source_is_trusted_under_any_version_and_another_one_under_none() -> None:
    strict, edited = _hook("save"), _hook("save", strict=False)
    assert judged(strict, "1.5", KNOWN) == ("installed", "")
    assert judged(strict, "2.1", KNOWN) == ("installed", "2.1 is not tested (<2,>=1 is), but the source is the same")
    assert judged(strict, "1.5", "other")[0] == "unverified"
    assert judged(edited, "1.5", "other")[0] == "installed"  # users edit it
    assert judged(edited, "2.1", "other")[0] == "unverified"


def test_a_changed_source_waits_for_its_self_test_and_is_hooked_if_it_passes(framework: Any) -> None:
    asked = []

    def verify(version: str, found: list[str]) -> str:
        asked.append((version, found))
        return ""

    assert install(_hook("save"), verify=verify)
    assert install(_hook("load"), verify=verify)
    assert states() == {"it.save": "unverified", "it.load": "unverified"}
    assert asked == []  # jobs that do not use unickpt do not wait
    assert hooks.unsettled("It")
    assert hooks.settle("It") == ""
    assert asked == [("2.1", [fingerprint(load), fingerprint(save)])]
    assert states() == {"it.save": "installed", "it.load": "installed"}
    assert framework.save("x") == ("hooked", "x")
    assert (hooks.settle("It"), len(asked)) == ("", 1)


def test_if_the_self_test_fails_the_framework_has_its_own_functions_again(
    framework: Any, caplog: pytest.LogCaptureFixture
) -> None:
    known = _hook("load", fingerprints=frozenset({fingerprint(load)}))
    assert install(_hook("save"), known, verify=lambda *_: "its self-test failed: moments differ")
    held = framework.save  # as by ``from it_framework import save``
    assert held("x") == ("hooked", "x")
    assert hooks.settle("It") == "its self-test failed: moments differ"
    assert framework.save is save
    assert framework.load is load  # one hook without the others is of no use
    assert held("x") == "x"
    assert set(states().values()) == {"refused"}
    (said,) = [record.getMessage() for record in caplog.records]
    assert "moments differ" in said
    assert hooks.ALL in said
    assert not install(known, verify=lambda *_: "")  # a module that is imported later
    assert hooks.settle("It") != ""


def test_ranks_agree_about_a_self_test() -> None:
    assert install(_hook("save"), verify=lambda *_: "")
    assert hooks.settle("It", lambda own: own or "rank 3: its self-test failed") == "rank 3: its self-test failed"
    assert states() == {"it.save": "refused"}


def test_without_a_self_test_a_strict_hook_of_unknown_source_is_refused(framework: Any) -> None:
    assert not install(_hook("save"))
    assert install(_hook("load", strict=False))
    assert states() == {"it.save": "refused", "it.load": "installed"}
    assert framework.save is save


def test_a_job_that_requires_the_hooks_ends_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hooks.REQUIRE, "1")
    with pytest.raises(UnsupportedFrameworkError, match="save has no parameter directory"):
        install(_hook("save", parameters=("directory",)))
    assert install(_hook("load"), verify=lambda *_: "its self-test failed")
    with pytest.raises(UnsupportedFrameworkError, match="its self-test failed"):
        hooks.settle("It")
    assert not hooks.install([_hook("save")], framework="It", version="2.1", lost="no advice in errors")  # goes on without it


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A self-test that counts its runs; ``say`` in its folder is its error."""
    monkeypatch.setenv(self_test.CACHE, str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "it_self_test.py").write_text(
        "import os, pathlib, sys, time\n"
        "here = pathlib.Path(__file__).parent\n"
        "with open(here / 'runs', 'a') as file:\n"
        "    file.write('x')\n"
        "assert os.environ['UNICKPT_ALLOW_UNTESTED'] == '1' and 'RANK' not in os.environ\n"
        "text = (here / 'say').read_text() if (here / 'say').exists() else ''\n"
        "time.sleep(600 if text == 'sleep' else 0)\n"
        "sys.exit(text or None)\n"
    )
    return tmp_path


def verified(version: str = "2.1", **limits: float) -> str:
    return self_test.verified("it_self_test", "It", version, ["f"], **limits)


def test_a_self_test_that_passed_runs_once_per_version(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert [verified(), verified(), verified("2.2")] == ["", "", ""]
    assert (program / "runs").read_text() == "xx"


def test_a_failure_is_kept_for_the_other_ranks_and_then_tried_again(program: Path) -> None:
    (program / "say").write_text("exp_avg differs")
    assert [verified(), verified()] == ["its self-test failed: exp_avg differs"] * 2
    assert (program / "runs").read_text() == "x"
    (kept,) = (program / "cache" / "self-tests").glob("*.json")
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"time": 0}))
    (program / "say").unlink()
    assert verified() == ""


def test_a_self_test_that_hangs_is_ended(program: Path) -> None:
    (program / "say").write_text("sleep")
    assert verified(limit_s=1.0) == "its self-test has not ended after 1 s"


def test_inside_of_a_self_test_none_runs(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(self_test.RUNNING, "1")
    assert verified() == ""
    assert not (program / "runs").exists()


def test_without_a_home_directory_results_are_in_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(self_test.CACHE, str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert self_test.cache_folder().parent == tmp_path


def test_a_self_test_that_cannot_run_is_a_reason_and_no_error(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a full disk, or a file system without locks: training goes on with the framework's own functions."""
    (program / "file").touch()
    monkeypatch.setattr(self_test, "cache_folder", lambda: program / "file")
    reason = hooks.self_test("it_self_test", "It")("2.1", ["f"])
    assert reason.startswith("its self-test cannot run (NotADirectoryError")
    assert "UNICKPT_CACHE" in reason
