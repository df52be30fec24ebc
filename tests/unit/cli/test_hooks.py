"""``unickpt hooks status``: states of hooks with and without the frameworks."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from typing import Any

import pytest

from tests.support.cli import REPOSITORY, python
from tests.support.extent import in_full


def test_hooks_status_of_an_installed_framework(hooks_in_a_process: tuple[str, ...]) -> None:
    document = json.loads(hooks_in_a_process[0])  # output of the framework's import is not part of it
    assert document["adapters"][0]["state"] == "imported"
    names = [hook["name"] for hook in document["hooks"]]
    assert {"deepspeed.configure", "deepspeed.load", "deepspeed.save", "deepspeed.zero_to_fp32"} <= set(names)
    for hook in document["hooks"]:
        known = not hook["known_fingerprints"] or hook["fingerprint"] in hook["known_fingerprints"]
        assert (hook["state"] == "installed") == known or hook["state"] in ("not imported", "not enabled"), hook


def test_hooks_status_lists_hooks_whose_framework_is_not_imported(hooks_in_a_process: tuple[str, ...]) -> None:
    states = {hook["name"]: hook["state"] for hook in json.loads(hooks_in_a_process[0])["hooks"]}
    assert {state for name, state in states.items() if name.startswith("transformers.")} == {"not imported"}
    assert states["deepspeed.load"] == "installed"


def test_hooks_status_gives_a_reason_for_a_hook_that_is_not_imported(hooks_in_a_process: tuple[str, ...]) -> None:
    reasons = {hook["reason"] for hook in json.loads(hooks_in_a_process[0])["hooks"] if hook["state"] == "not imported"}
    assert all("imports that module" in reason or "is not installed" in reason for reason in reasons), reasons


def test_hooks_status_lists_timing_hooks_and_whether_their_source_is_known(hooks_in_a_process: tuple[str, ...]) -> None:
    found = {hook["name"]: hook for hook in json.loads(hooks_in_a_process[0])["hooks"]}
    for name in ("forward", "backward", "step", "save", "load"):
        hook = found[f"deepspeed.timing.{name}"]
        assert (hook["state"], hook["reason"]) == ("not enabled", "")
        assert hook["fingerprint"] in hook["known_fingerprints"]


def test_the_page_of_hooks_equals_the_output_of_the_command(hooks_in_a_process: tuple[str, ...]) -> None:
    markdown = hooks_in_a_process[1]
    assert markdown == (REPOSITORY / "docs/developing/hooks.md").read_text(), (
        "unickpt hooks status --markdown > docs/developing/hooks.md"
    )


def test_the_limits_of_the_guide_equal_the_table_that_a_save_checks(hooks_in_a_process: tuple[str, ...]) -> None:
    document, table = hooks_in_a_process[0], hooks_in_a_process[2]
    page = (REPOSITORY / "docs/guides/deepspeed-coverage.md").read_text()
    marked = re.search(r"<!-- fallbacks[^>]*-->\n\n(.*?)\n<!-- end of fallbacks -->", page, re.S)
    assert marked is not None
    assert marked[1] == table, "unickpt hooks status --fallbacks, between the markers of docs/guides/deepspeed-coverage.md"
    assert [f"| {row['feature']} | {row['why']} |" for row in json.loads(document)["fallbacks"]] == table.splitlines()[2:]


def test_only_rows_of_the_table_make_deepspeed_save_by_itself() -> None:
    """Other modules of the adapter raise the error through a row (``Fallback.error``)."""
    files = [path for path in (REPOSITORY / "ds_unickpt").rglob("*.py") if "UnsupportedLayoutError(" in path.read_text()]
    assert [path.name for path in files] == ["fallbacks.py"]


def test_hooks_status_reports_a_framework_that_is_not_installed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unickpt.cli.hooks_command.find_spec", lambda _: None)
    monkeypatch.setattr("unickpt.base.hooks._status", {})
    code, out, _ = run("hooks", "status", "--all")
    assert code == 0
    assert "deepspeed (ds_unickpt): not installed" in out
    assert "hooks (0)" in out


def test_hooks_status_survives_a_broken_framework(run: Any, run_json: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        if name.startswith("unickpt."):
            return importlib.import_module(name)
        print("a framework that greets")
        raise RuntimeError("no libcudart")

    monkeypatch.setattr("unickpt.cli.hooks_command.find_spec", lambda _: object())
    monkeypatch.setattr("unickpt.cli.hooks_command.import_module", broken)
    code, document = run_json("hooks", "status")
    assert code == 0
    assert document["adapters"][0]["state"] == "failed"
    assert document["adapters"][0]["reason"] == "RuntimeError: no libcudart"


@pytest.mark.parametrize(
    ("framework", "missing"),
    [
        ("megatron", "megatron.core.optimizer.distrib_optimizer"),  # a module of the framework, after some hooks are installed
        # a module of the adapter that a hook imports when it is called
        pytest.param("megatron", "megatron_unickpt.held_state.optimizer", marks=in_full),
        ("deepspeed", "ds_unickpt.engine"),
        ("megatron", "megatron_unickpt.hooks"),  # autoload reports it in one line, and the import continues
        pytest.param("megatron", "wrapt", marks=in_full),
    ],
)
def test_hooks_status_reports_failed_after_an_import_error(framework: str, missing: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    program = (
        "import sys, importlib.abc\n"
        "class Broken(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {missing!r}: raise ImportError('cannot import name Gone')\n"
        "sys.meta_path.insert(0, Broken())\n"
        "from unickpt.cli.main import main\n"
        "assert main(['hooks', 'status', '--json']) == 0\n"
    )
    document = json.loads(python("-c", program).stdout)
    adapter = next(each for each in document["adapters"] if each["framework"] == framework)
    assert adapter["state"] == "failed"
    assert "cannot import name Gone" in adapter["reason"]
    for hook in document["hooks"]:
        if hook["target"].startswith(f"{framework}."):
            assert (hook["state"], "cannot import name Gone" in hook["reason"]) == ("failed", True), hook
