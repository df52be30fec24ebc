"""Try several Megatron-LM trees and write what each shows: ``docs/evidence/megatron-versions.md``.

    MEGATRON_TREES=/folder python -m evidence.megatron.versions [--tags core_v0.16.1 ...]
        [--scripts "pp2 or old_format"] [--folder DIR] [--out FILE]

With ``EMERGING_OPTIMIZERS=/folder2``, which holds trees of Emerging-Optimizers by tag, the scenarios of Muon, NorMuon and SOAP
run with the one that the tree of Megatron names in its ``pyproject.toml``.

The folder holds unpacked trees, ``<tag>/megatron/...``. Each is put first on the PYTHONPATH of the test workers;
everything else comes from the environment that runs this script. What fails is named with the last line of its error.
With ``--folder`` rows are kept there: those of tags that are not asked for this time stay on the page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree


from tests.jobs import pairs
from tests.support.repository import REPO
from unickpt.testing.launch import environment, torchrun

TAGS = ("core_v0.16.1", "core_v0.19.0", "core_v0.18.2", "core_v0.17.1", "core_v0.14.0", "core_v0.12.3", "dev")
PAIRS = (
    ("gpt-tp2-dist", "gpt-dp2-plain"), ("gpt-dp2-plain", "gpt-tp2-dist"), ("gpt-pp2-dist", "gpt-dp2-dist"),
    ("gpt-dp2-dist", "gpt-dp2-dist"), ("gpt-one-fp32", "gpt-tp2-dist"), ("gpt-cp2-dist", "gpt-one-fp32"),
    ("moe-dp2-dist", "moe-pp2-plain"), ("moe-ep2dp2-dist", "moe-one-fp32"),
)  # fmt: skip
EMERGING = ("muon_resumes_under_another_layout", "states_that_are_not_elementwise_load_where_the_parameter_is_divided_alike")
COLUMNS = {
    "hooks": "hooks", "scenarios": "scenarios, 2 ranks", "own": "pairs of layouts", "from": "from {newest}",
    "into": "into {newest}", "scripts": "`pretrain_gpt.py`", "emerging": "Muon, NorMuon, SOAP",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tags", nargs="+", default=list(TAGS), choices=TAGS)
    parser.add_argument("--scripts", default="pp2 or old_format", help="which tests of test_training.py, as for pytest -k")
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=COLUMNS, help="the others stay as they were")
    parser.add_argument("--folder", type=Path, help="where to work and keep rows (default: a temporary folder)")
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "evidence" / "megatron-versions.md")
    args = parser.parse_args()
    trees = Path(os.environ["MEGATRON_TREES"]).resolve()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        kept = folder / "rows.json"
        rows: dict[str, dict[str, str]] = json.loads(kept.read_text()) if kept.is_file() else {}
        for tag in args.tags:
            rows[tag] = rows.get(tag, {}) | examine(trees, tag, TAGS[0], folder, args.scripts, args.columns)
            print(tag, rows[tag], flush=True)
            kept.write_text(json.dumps(rows, indent=1))
            args.out.write_text(page({t: rows[t] for t in TAGS if t in rows}, TAGS[0], args.scripts))


def examine(trees: Path, tag: str, newest: str, folder: Path, chosen: str, columns: list[str]) -> dict[str, str]:
    """Cells of a tree's row."""
    place = folder / tag
    place.mkdir(parents=True, exist_ok=True)
    env = {"PYTHONPATH": f"{REPO}{os.pathsep}{trees / tag}", "GLOO_SOCKET_IFNAME": "lo"}
    others = {**env, "PYTHONPATH": f"{REPO}{os.pathsep}{trees / newest}"}
    checks: dict[str, Callable[[], str]] = {
        "hooks": lambda: hooks(env),
        "scenarios": lambda: scenarios(place, env),
        "own": lambda: matrix(place / "own", PAIRS, env, env),
        "from": lambda: matrix(place / "from", PAIRS, others, env),
        "into": lambda: matrix(place / "into", PAIRS, env, others),
        "scripts": lambda: scripts(trees / tag, place, chosen),
        "emerging": lambda: emerging(trees / tag, place, env),
    }
    wanted = [column for column in columns if tag != newest or column not in ("from", "into")]
    return {column: attempt(place / f"{column}.log", checks[column]) for column in wanted}


def attempt(log: Path, check: Callable[[], str]) -> str:
    """The check's result, or the end of its error; all of that is in ``log``."""
    try:
        return check()
    except AssertionError as err:
        log.write_text(str(err))
        return f"failed: {last_error(str(err))}"


def last_error(text: str) -> str:
    """The last line of ``text`` that names an error of the job itself."""
    lines = [line for line in text.splitlines() if "Error" in line and "ChildFailedError" not in line]
    return (lines[-1] if lines else text).strip()[:160]


def hooks(env: dict[str, str]) -> str:
    """Which version the hooks saw, and what became of them."""
    code = (
        "import megatron_unickpt.testing.cpu\n"  # what the development branch wants of a newer Python
        "import megatron.core.dist_checkpointing, megatron.core.optimizer.distrib_optimizer, megatron.training.checkpointing\n"
        "from megatron_unickpt.framework.versions import version; from unickpt.base import hooks\n"
        "print(version(), *sorted({s.state for s in hooks.status()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(**env))
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else f"failed: {done.stderr.strip()[-160:]}"


def scenarios(place: Path, env: dict[str, str]) -> str:
    """Run all scenarios in one job. If the job fails, run each in a job of its own: one error then hides no other."""
    from tests.jobs.megatron.scenarios import declared

    names = [name for name, worlds in declared().items() if 2 in worlds]
    try:
        outcome = run_scenarios(place, [], env)
    except AssertionError as err:
        (place / "scenarios.log").write_text(str(err))
        outcome = {}
        for name in names:
            try:
                outcome |= run_scenarios(place, [name], env)
            except AssertionError as alone:
                outcome[name] = {"0": str(alone)}
    failed = {name: last_error(next(iter(texts.values()))) for name, texts in outcome.items() if texts}
    for name in failed:
        (place / f"{name}.log").write_text("\n".join(outcome[name].values()))
    return summary(len(outcome), failed)


def emerging(tree: Path, place: Path, env: dict[str, str]) -> str:
    """The scenarios that need ``emerging_optimizers``, with the version that the tree names; '-' without one."""
    pinned = re.search(r"^emerging_optimizers = .*rev = \"([^\"]+)\"", (tree / "pyproject.toml").read_text(), re.MULTILINE)
    found = Path(os.environ.get("EMERGING_OPTIMIZERS", "")) / (pinned[1] if pinned else "none")
    if not found.is_dir():
        return "-"
    outcome = run_scenarios(place, list(EMERGING), {**env, "PYTHONPATH": f"{env['PYTHONPATH']}{os.pathsep}{found}"})
    failed = {name: last_error(next(iter(texts.values()))) for name, texts in outcome.items() if texts}
    return f"{summary(len(outcome), failed)} (Emerging-Optimizers {found.name})"


def run_scenarios(place: Path, names: list[str], env: dict[str, str]) -> dict[str, dict[str, str]]:
    """scenario -> rank -> failure, without scenarios that do not apply to the version."""
    torchrun(2, "tests.jobs.megatron.scenario_worker", str(place), *names, env=env, timeout_s=150 if names else 600)
    found: dict[str, dict[str, str]] = json.loads((place / "w2.json").read_text())
    return found


def summary(count: int, failed: dict[str, str]) -> str:
    cell = f"{count - len(failed)} of {count}"
    return "; ".join([cell, *(f"{name}: `{reason}`" for name, reason in failed.items())])


def matrix(folder: Path, names: Any, saving: dict[str, str], loading: dict[str, str]) -> str:
    """Save the sources with one tree, load them with another; every state compared bit by bit."""
    from megatron_unickpt.testing.layouts import Layout

    folder.mkdir(parents=True, exist_ok=True)
    chosen = [(Layout.parse(source), Layout.parse(target)) for source, target in names]
    pairs.write(chosen, folder)
    for kind, env in (("save", saving), ("load", loading)):
        torchrun(4, pairs.MEGATRON, str(folder), "--only", kind, env=env)
    found = pairs.problems(chosen, folder)
    return summary(len(chosen), {f"{source} to {target}": each[0][:160] for (source, target), each in found.items()})


def scripts(tree: Path, place: Path, chosen: str) -> str:
    """``tests/integration/megatron/test_training.py`` on this tree."""
    records = place / "scripts.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/integration/megatron/test_training.py"]
    command += ["-k", chosen, f"--junitxml={records}"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=environment(MEGATRON_LM=str(tree)))
    (place / "scripts.out").write_text(done.stdout)
    return outcome(records)


def outcome(records: Path) -> str:
    """How many passed, from pytest's own records."""
    count, failed = 0, {}
    for case in ElementTree.parse(records).iter("testcase"):
        count += case.find("skipped") is None
        for problem in [*case.iter("failure"), *case.iter("error")]:
            failed[case.attrib["name"]] = problem.attrib.get("message", "")[:160]
    return summary(count, failed)


def page(rows: dict[str, dict[str, str]], newest: str, chosen: str) -> str:
    """The document."""
    titles = [title.format(newest=newest) for title in COLUMNS.values()]
    lines = [
        "# Megatron versions", "", "Which trees of Megatron-LM work?", "",
        "`MEGATRON_TREES=/folder python -m evidence.megatron.versions`", "",
        f"Trees of Megatron-LM, unchanged; torch {installed_version('torch')}, Python {platform.python_version()}, CPU and "
        "gloo.", "", "| column | meaning |", "|---|---|",
        "| hooks | the version that the hooks see, and their state |",
        "| scenarios | passed scenarios of `tests/jobs/megatron/scenarios_*.py`. Scenarios about features that a "
        "version does not have are left out (a layer-wise optimizer before 0.15, metadata for optimizers before 0.13). |",
        "| pairs of layouts | pairs in which every weight, main parameter, moment, step and hyperparameter is equal bit for "
        "bit after a load under the other layout, and training continues |",
        f"| from {newest}, into {newest} | the same pairs, saved by one version and loaded by the other |",
        "| Muon, NorMuon, SOAP | passed scenarios with NVIDIA's Emerging-Optimizers of the version that the tree names. The "
        "scenario of NorMuon and SOAP needs Megatron 0.18. |",
        f"| `pretrain_gpt.py` | passed tests of `tests/integration/megatron/test_training.py` with `-k \"{chosen}\"` |", "",
        f"| tree | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|",
    ]  # fmt: skip
    for tag, row in rows.items():
        lines.append(f"| {tag} | " + " | ".join(row.get(column, "-").replace("|", "/") for column in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
