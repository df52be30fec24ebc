"""Run DeepSpeed's own unit tests of checkpoints, stock and with the ``unickpt`` key: ``docs/evidence/deepspeed-unit-tests.md``.

    python -m evidence.deepspeed.unit_tests --deepspeed-tree /path/to/DeepSpeed [--files checkpoint/test_sparse.py ...]
        [--folder DIR] [--limit 120] [--minutes 60] [--only stock] [--out docs/evidence/deepspeed-unit-tests.md]

The tree holds the source of DeepSpeed with ``tests/unit`` (releases on PyPI have no tests); the DeepSpeed that is tested is
the installed one. CPU and gloo, through ``evidence/deepspeed/unit_plugin.py``.
Each file of ``tests/unit/checkpoint`` runs
twice: first without our hooks, then, with the key in every config, the tests that pass. With ``--folder``, results are kept
there, and a run that was cut or limited by ``--minutes`` continues where it stopped.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from evidence.unit_jobs import counts
from tests.support.repository import REPO
from unickpt.testing.launch import environment

UNIT = "tests/unit"
RANKS = 4  # as many as the tests ask for at most; with fewer accelerators they skip
ATTEMPTS = 3  # of a test that ends pytest itself
# Why a test that passes stock does not pass with the key; parts of test names
_FILES = "reads DeepSpeed's own files in the checkpoint's folder; unickpt does not write them (`unickpt export` makes weights)"
REASONS = {
    "test_convert_zero_checkpoint_to_fp32_state_dict": _FILES,
    "test_checkpoint_shared_weights": _FILES,
    "test_save_exclude_frozen_weights": _FILES,
    "test_save_exclude_custom_frozen_weights": _FILES,
    "TestAutoEPZero3Universal": _FILES,
    "test_save_load_same_ep_and_metadata": _FILES,
    "test_zero3_ep_save_load_same_topology_2gpu": _FILES,
    "test_elastic_checkpoint_change_dp": (
        "expects that optimizer states of another data-parallel size are refused (ZeRORuntimeException); unickpt loads them"
    ),
}

# Why tests pass with the key and leave no unickpt checkpoint, by file
WITHOUT = {
    "checkpoint/test_autotp_uc_checkpoint.py": (
        "32 call functions of DeepSpeed's own converter without a job; "
        "the other has tensor-parallel ranks whose parameters nothing describes (a limit)"
    ),
    "checkpoint/test_reshape_checkpoint.py": "without a job: they read file names and metadata",
    "checkpoint/test_latest_checkpoint.py": "`test_missing_latest` loads from an empty folder and does not save",
    "checkpoint/test_tag_validation.py": "saves without a folder, with an unknown setting, or with another tag on each rank",
    "checkpoint/test_zero_optimizer.py": (
        "`test_save_tensor_clone` (4), `test_chmod_exception_handling` (3) and "
        "`test_elastic_checkpoint_is_deprecated_for_zero3` (1) save no checkpoint"
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--deepspeed-tree", type=Path, required=True, help="source tree of DeepSpeed, with tests/unit")
    parser.add_argument("--files", nargs="+", help=f"of {UNIT} (default: all of {UNIT}/checkpoint)")
    parser.add_argument("--folder", type=Path, help="where results are kept (default: a temporary folder)")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one test, and for each fixture of its own")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further test after this time")
    parser.add_argument("--only", choices=("stock", "unickpt"), help="run one half; the other half's kept results are used")
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "evidence" / "deepspeed-unit-tests.md")
    args = parser.parse_args()
    tree = args.deepspeed_tree.resolve()
    if not (tree / UNIT / "common.py").exists():
        parser.error(f"{tree} has no {UNIT}/common.py: give a checkout of DeepSpeed's repository")
    files = args.files or sorted(str(p.relative_to(tree / UNIT)) for p in (tree / UNIT / "checkpoint").glob("test_*.py"))
    end = time.time() + 60 * args.minutes
    rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        for file in files:
            place = folder / file.removesuffix(".py").replace("/", "-")
            stock = examine(tree, file, place / "stock", args.limit, end if args.only != "unickpt" else 0)
            passing = [name for name, test in stock.items() if test["outcome"] == "passed"]
            ours = examine(tree, file, place / "unickpt", args.limit, end if args.only != "stock" else 0, passing)
            rows[file] = (stock, ours, not_collected(place / "stock"))
            print(file, counts(stock), counts(ours), flush=True)
    args.out.write_text(page(rows, args.limit, tree, args.files))


def examine(
    tree: Path, file: str, place: Path, limit: float, end: float, only: list[str] | None = None
) -> dict[str, dict[str, Any]]:
    """The outcome of each test of a file; ``only``: of these, with the key. Runs what has no outcome yet until ``end``."""
    place.mkdir(parents=True, exist_ok=True)
    report = place / "results.jsonl"
    for _ in range(ATTEMPTS):
        found = outcomes(report)
        finished = bool(found) and all(test["outcome"] != "not reached" for test in found.values())
        if only is not None:
            finished = all(found.get(name, {"outcome": "not reached"})["outcome"] != "not reached" for name in only)
        if finished or time.time() > end or not_collected(place):
            break
        run(tree, file, place, limit, end, only)
    return outcomes(report) if only is None else {name: outcomes(report).get(name, NOT_REACHED) for name in only}


NOT_REACHED: dict[str, Any] = {"outcome": "not reached", "reason": "", "universal": False}


def outcomes(report: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    found: dict[str, dict[str, Any]] = {}
    begun: dict[str, int] = {}
    for line in lines:
        if line["event"] == "collected":
            for name in line["tests"]:
                found.setdefault(name, NOT_REACHED)
        elif line["event"] == "begin":
            begun[line["test"]] = begun.get(line["test"], 0) + 1
        elif line["event"] == "end":
            found[line["test"]] = line
    for name, times in begun.items():
        if found[name] is NOT_REACHED and times >= ATTEMPTS:
            found[name] = {**NOT_REACHED, "outcome": "died", "reason": "pytest ended"}
    return found


def not_collected(place: Path) -> str:
    """Why a file has no tests here."""
    report = place / "results.jsonl"
    lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    return next((str(line["reason"]) for line in lines if line["event"] == "not collected"), "")


def run(tree: Path, file: str, place: Path, limit: float, end: float, only: list[str] | None) -> None:
    """One file under pytest, its output in ``log``."""
    temporary = place / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    command = [
        sys.executable, "-m", "pytest", "-p", "evidence.deepspeed.unit_plugin", "-p", "no:cacheprovider", "-c",
        str(tree / "tests" / "pytest.ini"), "--rootdir", str(tree / "tests"), "--basetemp", str(temporary), "-s", "--tb=short",
        "-W", "ignore", str(tree / UNIT / file),
    ]  # fmt: skip
    extra = {
        "UNICKPT_UNIT_REPORT": str(place / "results.jsonl"),
        "UNICKPT_UNIT_LIMIT": str(limit),
        "UNICKPT_UNIT_END": str(end),
        "LOCAL_SIZE": str(RANKS),
    }
    if only is None:
        extra["UNICKPT_AUTOLOAD"] = "0"  # without our hooks
    else:
        (place / "only").write_text("\n".join(only))
        extra |= {"UNICKPT_UNIT_KEY": "1", "UNICKPT_UNIT_ONLY": str(place / "only")}
    with (place / "log").open("a") as log:
        subprocess.run(command, cwd=place, env=environment(**extra), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    shutil.rmtree(temporary, ignore_errors=True)


def tally(found: dict[str, dict[str, Any]], skips: bool = True) -> list[int]:
    """Numbers of tests that passed, failed in some way, were skipped (unless those count as failed), were not run."""
    known = counts(found)
    passed, skipped, missing = (known.get(outcome, 0) for outcome in ("passed", "skipped", "not reached"))
    if skips:
        return [passed, len(found) - passed - skipped - missing, skipped, missing]
    return [passed, len(found) - passed - missing, missing]


def page(rows: dict[str, Any], limit: float, tree: Path, files: list[str] | None) -> str:
    """The document."""
    only = f" --files {' '.join(files)}" if files else ""
    source = (tree / "version.txt").read_text().strip() if (tree / "version.txt").exists() else "unknown"
    lines = [
        "# DeepSpeed's own unit tests",
        "",
        "Do DeepSpeed's own tests still pass with the `unickpt` key?",
        "",
        "{answer}",
        "",
        f"`python -m evidence.deepspeed.unit_tests --deepspeed-tree /path/to/DeepSpeed{only}`",
        "",
        f"DeepSpeed {installed_version('deepspeed')} (tests: source tree of version {source}), "
        f"torch {installed_version('torch')}, Python {platform.python_version()}, CPU and gloo, up to {RANKS} ranks.",
        "",
        "The tests' files are unchanged. `evidence/deepspeed/unit_plugin.py` lists what it adapts so that they run on CPU.",
        "Stock: without unickpt's hooks. With the key: the tests that pass stock run again, with",
        '`"unickpt": {"enabled": true}` in every DeepSpeed config. *Saved by unickpt*: a unickpt checkpoint is left on disk.',
        f"Each test has {limit:.0f} seconds. *Not run* counts the tests that `--minutes` left out.",
        "",
        "| file | tests | stock: pass | fail | skipped | not run | key: pass | fail | not run | pass, saved by unickpt |",
        "|---" * 10 + "|",
    ]
    sums = [0] * 9
    for file, (stock, ours, reason) in rows.items():
        universal = sum(test["outcome"] == "passed" and bool(test["universal"]) for test in ours.values())
        numbers = [len(stock), *tally(stock), *tally(ours, skips=False), universal]
        sums = [a + b for a, b in zip(sums, numbers, strict=True)]
        why = re.sub(r"/\S*/", ".../", reason.removeprefix("Skipped: ").strip().splitlines()[-1]) if reason else ""
        name = f"{file} (not collected: {why})" if reason and not stock else file
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    lines[lines.index("{answer}")] = f"{sums[5]} of the {sums[1]} tests that pass stock do."
    lines += [f"| all | {' | '.join(map(str, sums))} |", "", "## Pass stock and fail with the key", ""]
    done = ("passed", "not reached")
    failing = [(n, t) for _, ours, _ in rows.values() for n, t in ours.items() if t["outcome"] not in done]
    by_reason: dict[str, list[str]] = {}
    for name, test in failing:
        reason = next((text for part, text in REASONS.items() if part in name), "fails for an unknown reason")
        by_reason.setdefault(reason, []).append(f"| `{_shown(name)}` | {test['outcome']}: `{_first(test)}` |")
    for reason, tests in by_reason.items():
        lines += [f"Each of these {reason}:", "", "| test | outcome |", "|---|---|", *tests, ""]
    lines += [] if failing else ["None.", ""]
    lines += ["## Pass with the key and leave no unickpt checkpoint", "", "| file | tests | why |", "|---|---|---|"]
    for file, (_, ours, _) in rows.items():
        names = [name for name, test in ours.items() if test["outcome"] == "passed" and not test["universal"]]
        why = WITHOUT.get(file) or _why_none(tree / UNIT, file, names)
        lines += [f"| `{file}` | {len(names)} | {why} |"] if names else []
    lines += ["", "## Fail stock", ""]
    grouped: dict[tuple[str, str], list[str]] = {}
    for stock, _, _ in rows.values():
        for name, test in stock.items():
            if test["outcome"] not in (*done, "skipped"):
                grouped.setdefault((_shown(name).partition("[")[0], _first(test)), []).append(name)
    lines += ["| test | cases | error |", "|---|---|---|"] if grouped else []
    for (name, first), tests in grouped.items():
        lines.append(f"| `{name}` | {len(tests)} | `{first}` |")
    return "\n".join(lines + ([] if grouped else ["None."])) + "\n"


def _why_none(unit: Path, file: str, names: list[str]) -> str:
    """Return why tests leave no checkpoint: they call no function that saves one, or the reason is not known."""
    called = _calls(unit, file)
    saving = [name for name in names if _saves(name.rpartition("::")[2].partition("[")[0], called)]
    if not saving:
        return "none of them saves a checkpoint"
    shown = ", ".join(f"`{_shown(name).partition('::')[2]}`" for name in saving)
    return f"{len(names) - len(saving)} save no checkpoint; reason not known of {shown}"


def _calls(unit: Path, file: str) -> dict[str, set[str]]:
    """Return the names that each function of a test file and of its helper modules calls or takes as a fixture."""
    tree = ast.parse((unit / file).read_text())
    helpers = [
        each.module for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("unit.")
    ]
    found: dict[str, set[str]] = {}
    for path in [unit / file, *(unit.parent / f"{str(name).replace('.', '/')}.py" for name in helpers)]:
        for node in ast.walk(ast.parse(path.read_text())) if path.exists() else ():
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
                names = {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in calls}
                found.setdefault(node.name, set()).update(names, (argument.arg for argument in node.args.args))
    return found


def _saves(function: str, called: dict[str, set[str]]) -> bool:
    seen, open_names = set(), [function]
    while open_names:
        name = open_names.pop()
        if name in ("save_checkpoint", "save_16bit_model"):
            return True
        if name not in seen:
            seen.add(name)
            open_names += called.get(name, ())
    return False


def _shown(name: str) -> str:
    return name.removeprefix("unit/").removeprefix("tests/unit/")


def _first(test: dict[str, Any]) -> str:
    first = (test["reason"].splitlines() or [test["outcome"]])[0].replace("`", "'").replace("|", "/")
    return re.sub(r"/\S*/", ".../", first)[:120]


if __name__ == "__main__":
    main()
