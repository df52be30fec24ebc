"""``unickpt doctor`` and the answer of ``unickpt hooks status``: what they read, what it means, and that it holds no secret."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from tests.support.cli import python
from unickpt.base.hooks import Hook, fingerprint_of_source
from unickpt.cli.doctor import answers, bounded, declared, frameworks, path_probe, text
from unickpt.cli.doctor.answers import Kind
from unickpt.cli.doctor.declared import DeclaredHook, Role
from unickpt.cli.doctor.facts import Acting, Facts
from unickpt.cli.doctor.frameworks import ExaminedHook, Framework
from unickpt.cli.doctor.installation import Autoload, Extension
from unickpt.cli.doctor.machine import Clock, Machine
from unickpt.cli.doctor.masking import variable, without_secrets

SAVE = "def save(self, folder, tag=None):\n    return folder\n"


def hook(attribute: str = "Engine.save", role: Role = Role.NEEDED, **changes: Any) -> DeclaredHook:
    values: dict[str, Any] = {
        "name": f"deepspeed.{attribute}", "module": "deepspeed.engine", "attribute": attribute, "wrapper": lambda *_: None,
        "versions": SpecifierSet(">=0.17"), "fingerprints": frozenset({fingerprint_of_source(SAVE)}), "why": "", "upstream": "",
        "until": "", "parameters": ("folder",),
    }  # fmt: skip
    return DeclaredHook(Hook(**{**values, **changes}), role)


@pytest.fixture(autouse=True)
def _no_results_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICKPT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def deepspeed(tmp_path: Path) -> Path:
    folder = tmp_path / "deepspeed"
    folder.mkdir()
    (folder / "git_version_info_installed.py").write_text("version='0.19.8'\n")
    (folder / "engine.py").write_text("class Engine:\n" + "".join(f"    {line}\n" for line in SAVE.splitlines()))
    return folder


@pytest.mark.parametrize(
    ("changes", "state", "reason"),
    [
        ({}, "acts", ""),
        ({"versions": SpecifierSet(">=0.20")}, "acts", "0.19.8 is not tested (>=0.20 is), but the source is the same"),
        ({"parameters": ("name",)}, "refused", "Engine.save has no parameter name"),
        ({"fingerprints": frozenset({"0"})}, "unverified", "the source of Engine.save is unknown"),
        ({"fingerprints": frozenset({"0"}), "strict": False}, "acts", "the source of Engine.save is unknown"),
        ({"attribute": "Engine.gone"}, "refused", "deepspeed.engine.Engine.gone is not there"),
        ({"module": "deepspeed.gone"}, "absent", "deepspeed.gone is not installed"),
    ],
)
def test_a_hook_acts_by_version_parameters_and_source(changes: Any, state: str, reason: str, deepspeed: Path) -> None:
    found = frameworks.framework("deepspeed", [deepspeed], [hook(**changes)])
    assert (found.version, found.problem) == ("0.19.8", "")
    (examined,) = found.hooks
    assert examined.state == state
    assert examined.reason.startswith(reason)
    assert bool(examined.reason) == bool(reason)
    assert found.acts == (state in ("acts", "unverified"))


def test_a_function_that_a_version_lacks_is_refused_only_where_unickpt_needs_it(deepspeed: Path) -> None:
    found = frameworks.framework("deepspeed", [deepspeed], [hook(), hook("Engine.gone", Role.BESIDE)])
    assert found.acts
    assert found.hooks[1].state == "absent"


@pytest.mark.parametrize(("result", "state"), [("", "acts"), ("its self-test failed: KeyError", "refused")])
def test_the_last_self_test_decides_about_a_changed_source(result: str, state: str, deepspeed: Path, tmp_path: Path) -> None:
    changed = hook(fingerprints=frozenset({"0"}))
    (tmp_path / "cache/self-tests").mkdir(parents=True)
    document = {"framework": "DeepSpeed", "version": "0.19.8", "time": time.time(), "reason": result}
    (tmp_path / "cache/self-tests/deepspeed-1.json").write_text(json.dumps(document | {"version": "0.19.7"}))
    (found,) = frameworks.framework("deepspeed", [deepspeed], [changed]).hooks
    assert found.state == "unverified"
    (tmp_path / "cache/self-tests/deepspeed-2.json").write_text(json.dumps(document))
    (found,) = frameworks.framework("deepspeed", [deepspeed], [changed]).hooks
    assert (found.state, found.reason) == (state, result or "its self-test has passed")


def test_what_is_allowed_in_spite_of_it_acts(deepspeed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICKPT_ALLOW_UNTESTED", "1")
    found = frameworks.framework("deepspeed", [deepspeed], [hook(parameters=("name",))])
    assert (found.hooks[0].state, found.hooks[0].reason) == ("acts", "despite: Engine.save has no parameter name")


def test_a_framework_that_cannot_be_parsed_is_a_problem_and_not_an_error(deepspeed: Path) -> None:
    (deepspeed / "engine.py").write_text("class Engine\n")
    found = frameworks.framework("deepspeed", [deepspeed], [hook()])
    assert found.problem.startswith("SyntaxError: ")
    assert not found.acts


DEEPSPEED = Framework(
    "deepspeed", "DeepSpeed", "0.19.8", "/site/deepspeed", (ExaminedHook("save", "deepspeed.engine", Role.NEEDED, "acts", ""),)
)
CHANGED = replace(DEEPSPEED, hooks=(ExaminedHook("save", "deepspeed.engine", Role.NEEDED, "unverified", "has changed"),))
REFUSED = replace(
    DEEPSPEED,
    package="megatron",
    name="megatron-core",
    hooks=(ExaminedHook("load", "megatron.core", Role.NEEDED, "refused", "has changed"),),
)
ACTING = Acting((DEEPSPEED,), Autoload(True, ""), (Extension("copying", True, ""),))
MACHINE = Machine("Linux", 8 << 30, 4 << 30, None, 64 << 30, Clock("tsc", True, 0.5), "", {"kernel log": True, "NVML": False})
TORCH = {
    "torch": "2.13.0",
    "armed": True,
    "devices": ["GPU"],
    "cuda": "13.0",
    "hip": None,
    "nccl": "2.28",
    "backends": ["gloo"],
}
FACTS = Facts(ACTING, MACHINE, {"python": "3.11"}, {}, {}, TORCH, None)


@pytest.mark.parametrize(
    ("acting", "words"),
    [
        (ACTING, "yes: unickpt acts in DeepSpeed 0.19.8, in jobs"),
        (replace(ACTING, frameworks=(DEEPSPEED, REFUSED)), "yes: unickpt acts in DeepSpeed 0.19.8, in jobs"),
        (replace(ACTING, frameworks=(CHANGED,)), "yes: unickpt acts in DeepSpeed 0.19.8, in jobs"),
        (replace(ACTING, frameworks=(REFUSED,)), "no: it does not act in megatron-core 0.19.8 (load: has changed)"),
        (replace(ACTING, frameworks=()), "no: neither DeepSpeed nor megatron-core is installed"),
        (replace(ACTING, autoload=Autoload(True, "UNICKPT_AUTOLOAD=0")), "no: UNICKPT_AUTOLOAD=0 switches it off. If that"),
        (replace(ACTING, autoload=Autoload(False, "")), "no: no installation of unickpt in this Python"),
        (replace(ACTING, frameworks=(replace(DEEPSPEED, problem="OSError: gone"),)), "no: it does not act in DeepSpeed"),
    ],
)
def test_the_answer_is_yes_or_no_with_a_reason(acting: Acting, words: str) -> None:
    found = answers.answer(acting)
    assert found.text.startswith(words)
    assert found.acts == words.startswith("yes")
    assert text.acting_lines(acting)[0] == found.text
    assert "hooks act" not in "".join(text.acting_lines(acting)[1:]) or found.acts


def test_nothing_is_to_do_where_all_is_well() -> None:
    assert answers.actions(FACTS) == []
    assert text.lines(FACTS, [])[4] == "to do:      nothing"


PLACE = {
    "tried": "/runs",
    "exists": True,
    "filesystem": "ext4",
    "device": "/dev/sda",
    "direct": True,
    "problem": "",
    "free_bytes": 1,
}


@pytest.mark.parametrize(
    ("changes", "kind", "needed"),
    [
        ({"acting": replace(ACTING, frameworks=(DEEPSPEED, REFUSED))}, Kind.FRAMEWORK, True),
        ({"acting": replace(ACTING, frameworks=(CHANGED,))}, Kind.FRAMEWORK, False),
        ({"acting": replace(ACTING, autoload=Autoload(False, ""))}, Kind.ENTRY_POINT, True),
        ({"acting": replace(ACTING, autoload=Autoload(True, "UNICKPT_AUTOLOAD=0"))}, Kind.SWITCHED_OFF, True),
        ({"acting": replace(ACTING, extensions=(Extension("copying", False, "slow"),))}, Kind.EXTENSION, False),
        ({"acting": replace(ACTING, extensions=(Extension("copying", False, "slow", True),))}, Kind.EXTENSION, True),
        ({"torch": {"problem": "no answer in 90 s"}}, Kind.TORCH, True),
        ({"torch": {**TORCH, "armed": False}}, Kind.ENTRY_POINT, True),
        ({"torch": {**TORCH, "devices": []}, "machine": replace(MACHINE, driver="NVRM")}, Kind.TORCH, False),
        ({"place": {**PLACE, "problem": "Permission denied"}}, Kind.STORAGE, True),
        ({"place": {"problem": "no answer in 20 s"}}, Kind.STORAGE, True),
        ({"place": {**PLACE, "filesystem": "overlay"}}, Kind.STORAGE, False),
        ({"machine": replace(MACHINE, shared_bytes=64 << 20)}, Kind.SHARED_MEMORY, False),
        ({"machine": replace(MACHINE, clock=Clock("tsc", False, None))}, Kind.CLOCK, False),
        ({"machine": replace(MACHINE, driver="NVRM", told={"network": True, "NVML": False})}, Kind.HARDWARE, False),
    ],
)
def test_what_is_wrong_is_one_action_and_told_in_the_text(changes: dict[str, Any], kind: Kind, needed: bool) -> None:
    facts = replace(FACTS, **changes)
    (action,) = answers.actions(facts)
    assert (action.kind, action.needed) == (kind, needed)
    lines = text.lines(facts, [action])
    assert [line.partition(":")[0] for line in lines[:5]] == ["active", "for", "extensions", "storage", "to do"]
    assert lines[4].endswith("1 needed" if needed else "1 advised")
    assert text.document(facts, [action])["sound"] == (not needed)


@pytest.mark.parametrize(
    "secret",
    [
        "s3://AKIAABCDEFGHIJKLMNOP:wJalrXUtnFEMI@bucket/runs",
        "https://hooks.example.com/services/T0000/wJalrXUtnFEMI",
        "http://10.0.0.7:4711/wJalrXUtnFEMI",
        "gs://bucket/a?token=wJalrXUtnFEMI",
        "login failed: password=wJalrXUtnFEMI",
        "hf_wJalrXUtnFEMIwJalrXUtnFEMI",
    ],
)
def test_a_text_with_a_secret_is_shown_without_it(secret: str) -> None:
    assert "wJalrXUtnFEMI" not in without_secrets(f"before {secret} after")
    assert without_secrets(f"before {secret} after").endswith("after")


def test_a_variable_with_the_name_of_a_secret_is_hidden_and_others_are_not() -> None:
    for name in ("UNICKPT_TOKEN", "NCCL_SECRET_FILE", "TORCH_AUTH", "UNICKPT_WEBHOOK", "DS_API_KEY", "UNICKPT_PASSWORD"):
        assert variable(name, "anything") == "***"
    assert variable("NCCL_SOCKET_IFNAME", "eth0") == "eth0"
    assert variable("PYTHONPATH", "/a/b:/c") == "/a/b:/c"
    assert variable("MASTER_ADDR", "10.0.0.7") == "10.0.0.7"
    assert variable("UNICKPT_TOKEN", "") == ""


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    found = path_probe.of_folder(tmp_path)
    assert (found["tried"], found["exists"], found["problem"]) == (str(tmp_path), True, "")
    assert found["filesystem"]
    assert isinstance(found["direct"], bool)
    found = path_probe.of_folder(tmp_path / "new" / "run")
    assert (found["tried"], found["exists"], found["problem"]) == (str(tmp_path), False, "")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert path_probe.of_folder(tmp_path / "file")["problem"] == "is a file"
    assert "read-only" in path_probe.of_folder(Path("/sys"))["problem"].lower() or os.geteuid() == 0


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n"
        "2 1 0:5 / /mnt/my\\040runs rw,noatime - nfs4 server:/runs rw\n"
        "3 1 0:6 / /mnt/my\\040runs rw - lustre 10.0.0.1@tcp:/fs rw\n"
        "4 1 0:7 / /mnt/my rw - xfs /dev/sdb rw\n"
    )
    assert path_probe.mounted(Path("/mnt/my runs/a"), table) == ("lustre", "10.0.0.1@tcp:/fs")
    assert path_probe.mounted(Path("/mnt/my/a"), table) == ("xfs", "/dev/sdb")
    assert path_probe.mounted(Path("/mnt/mystery"), table) == ("ext4", "/dev/sda1")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("def main(given): print('a greeting'); print('{\"given\": 1}')", {"given": 1}),
        ("def main(given): raise RuntimeError(given[0])", {"problem": "exit code 1: RuntimeError: asked"}),
        ("def main(given):\n    import os\n    os.kill(os.getpid(), 9)", {"problem": "killed by signal 9"}),
        ("def main(given): pass", {"problem": "exit code 0"}),
        ("def main(given):\n    while True: pass", {"problem": "no answer in 0.5 s"}),
    ],
)
def test_a_probe_answers_or_has_a_problem(
    program: str, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pretended_probe.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    seconds = 0.5 if "while" in program else 60
    assert bounded.answer_of("pretended_probe", ["asked"], seconds, os.environ) == expected


def test_a_program_that_cannot_be_started_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded.sys, "executable", "/nowhere/python")
    assert (
        "No such file or directory: '/nowhere/python'" in bounded.answer_of("pretended_probe", [], 1.0, os.environ)["problem"]
    )


def test_doctor_prints_one_document_without_secrets(tmp_path: Path, run_json: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICKPT_PRETENDED_TOKEN", "wJalrXUtnFEMI")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    code, document = run_json("doctor", tmp_path)
    assert code == (0 if document["sound"] else 1)
    assert document["schema"] == 1
    assert (document["place"]["tried"], document["place"]["problem"]) == (str(tmp_path), "")
    assert document["variables"]["UNICKPT_PRETENDED_TOKEN"] == "***"
    assert document["variables"]["NCCL_DEBUG"] == "WARN"
    assert "wJalrXUtnFEMI" not in json.dumps(document)
    assert "problem" not in document["torch"]
    assert document["versions"]["torch"]
    assert all(action["text"] for action in document["to_do"])


def test_doctor_begins_with_five_lines(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "answer_of", lambda *_: TORCH)  # the test above starts the processes
    _, out, _ = run("doctor")
    assert [line.partition(":")[0] for line in out.splitlines()[:5]] == ["active", "for", "extensions", "storage", "to do"]
    assert {"versions", "machine", "torch", "hooks", "variables"} <= set(out.splitlines())


def test_hooks_status_answers_without_an_import_of_torch_or_a_framework() -> None:
    program = (
        "import sys\n"
        "from unickpt.cli.main import main\n"
        "assert main(['hooks', 'status']) in (0, 1)\n"
        "heavy = ('torch', 'numpy', 'deepspeed', 'megatron', 'transformers', 'ds_unickpt', 'megatron_unickpt')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    first, *_, last = python("-c", program).stdout.splitlines()
    assert first.startswith(("yes: ", "no: "))
    assert last == "[]"


def test_the_file_of_declared_hooks_equals_the_declarations(hooks_in_a_process: tuple[str, ...]) -> None:
    assert hooks_in_a_process[3] == declared.FILE.read_text(), "unickpt hooks status --declared > unickpt/cli/doctor/hooks.json"


def test_what_the_source_files_say_is_what_an_import_finds(hooks_in_a_process: tuple[str, ...]) -> None:
    imported = {found["name"]: found for found in json.loads(hooks_in_a_process[0])["hooks"]}
    states = {
        "unverified": ("unverified",),
        "acts": ("installed", "not enabled", "not imported"),
        "refused": ("refused",),
        "absent": ("not imported", "refused"),
    }
    compared = 0
    for framework in frameworks.installed(declared.read()):
        for examined in framework.hooks:
            found = imported.get(examined.name)
            if found is not None and framework.package != "transformers":
                assert found["state"] in states[examined.state], (examined, found)
                compared += 1
    assert compared > 10
