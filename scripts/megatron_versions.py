"""Try several Megatron-LM trees and write what each shows: ``docs/megatron-versions.md``.

    MEGATRON_TREES=/folder python scripts/megatron_versions.py [--tags core_v0.16.1 ...] [--scripts "pp2 or old_format"]
        [--folder DIR] [--out FILE]

The folder holds unpacked trees, ``<tag>/megatron/...``. Each is put first on the PYTHONPATH of the test workers;
everything else comes from the environment that runs this script. What fails is named with the last line of its error.
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

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from tests.launch import environment, torchrun  # noqa: E402

TAGS = ("core_v0.16.1", "core_v0.14.0", "core_v0.12.3", "dev")
PAIRS = (
    ("gpt-tp2-dist", "gpt-dp2-plain"), ("gpt-dp2-plain", "gpt-tp2-dist"), ("gpt-pp2-dist", "gpt-dp2-dist"),
    ("gpt-dp2-dist", "gpt-dp2-dist"), ("gpt-one-fp32", "gpt-tp2-dist"), ("gpt-cp2-dist", "gpt-one-fp32"),
    ("moe-dp2-dist", "moe-pp2-plain"), ("moe-ep2dp2-dist", "moe-one-fp32"),
)  # fmt: skip
# Without TransformerEngine 0.12 has neither a distributed optimizer nor tensor parallel training on the CPU.
OLD_PAIRS = (("gpt-dp2-plain", "gpt-pp2-plain"), ("gpt-pp2-plain", "gpt-one-fp32"), ("gpt-one-fp32", "gpt-dp2-plain"))
COLUMNS = {
    "hooks": "hooks", "scenarios": "scenarios, 2 ranks", "own": "pairs of layouts", "from": "from {newest}",
    "into": "into {newest}", "scripts": "`pretrain_gpt.py`",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tags", nargs="+", default=list(TAGS))
    parser.add_argument("--scripts", default="pp2 or old_format", help="which tests of test_training.py, as for pytest -k")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "megatron-versions.md")
    args = parser.parse_args()
    trees = Path(os.environ["MEGATRON_TREES"]).resolve()
    rows: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        for tag in args.tags:
            rows[tag] = examine(trees, tag, args.tags[0], folder, args.scripts)
            print(tag, rows[tag], flush=True)
            args.out.write_text(page(rows, args.tags[0], args.scripts))


def examine(trees: Path, tag: str, newest: str, folder: Path, chosen: str) -> dict[str, str]:
    """Every cell of a tree's row."""
    place = folder / tag
    place.mkdir(parents=True, exist_ok=True)
    env = {"PYTHONPATH": f"{REPO}{os.pathsep}{trees / tag}", "GLOO_SOCKET_IFNAME": "lo"}
    others = {**env, "PYTHONPATH": f"{REPO}{os.pathsep}{trees / newest}"}
    row = {"hooks": hooks(env)}
    pairs = OLD_PAIRS if row["hooks"].startswith("0.12") else PAIRS
    row["scenarios"] = attempt(place / "scenarios.log", lambda: scenarios(place, env))
    row["own"] = attempt(place / "own.log", lambda: matrix(place / "own", pairs, env, env))
    if tag != newest:
        row["from"] = attempt(place / "from.log", lambda: matrix(place / "from", pairs, others, env))
        row["into"] = attempt(place / "into.log", lambda: matrix(place / "into", pairs, env, others))
    row["scripts"] = attempt(place / "scripts.log", lambda: scripts(trees / tag, place, chosen))
    return row


def attempt(log: Path, check: Callable[[], str]) -> str:
    """The check's result, or the end of its error; all of that is in ``log``."""
    try:
        return check()
    except AssertionError as err:
        log.write_text(str(err))
        lines = [line for line in str(err).splitlines() if "Error" in line and "ChildFailedError" not in line]
        return f"failed: {lines[-1].strip()[:160] if lines else str(err)[:160]}"


def hooks(env: dict[str, str]) -> str:
    """Which version the hooks saw, and what became of them."""
    code = (
        "import megatron.core.dist_checkpointing, megatron.core.optimizer.distrib_optimizer, megatron.training.checkpointing\n"
        "from megatron_unickpt.hooks import version; from unickpt import hooks\n"
        "print(version(), *sorted({s.state for s in hooks.status()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(**env))
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else f"failed: {done.stderr.strip()[-160:]}"


def scenarios(place: Path, env: dict[str, str]) -> str:
    done = torchrun(2, "tests.megatron.scenario_worker", str(place), env=env, timeout_s=600)
    (place / "scenarios.out").write_text(done.stdout)
    outcome: dict[str, dict[str, str]] = json.loads((place / "w2.json").read_text())
    failed = {name: next(iter(texts.values())).strip().splitlines()[-1][:160] for name, texts in outcome.items() if texts}
    return summary(len(outcome), failed)


def summary(count: int, failed: dict[str, str]) -> str:
    cell = f"{count - len(failed)} of {count}"
    return "; ".join([cell, *(f"{name}: `{reason}`" for name, reason in failed.items())])


def matrix(folder: Path, pairs: Any, saving: dict[str, str], loading: dict[str, str]) -> str:
    """Save the sources with one tree, load them with another; every state compared bit by bit."""
    from tests.megatron.layouts import Layout

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pairs.json").write_text(json.dumps(pairs))
    worlds = [{Layout.parse(pair[side]).world for pair in pairs} for side in (0, 1)]
    for world in sorted(worlds[0]):
        torchrun(world, "tests.megatron.matrix_worker", "save", str(folder), env=saving)
    failed, count = {}, 0
    for world in sorted(worlds[1]):
        torchrun(world, "tests.megatron.matrix_worker", "load", str(folder), env=loading)
        for result in json.loads((folder / f"results-w{world}.json").read_text()):
            count += 1
            if result["problems"]:
                failed[f"{result['source']} to {result['target']}"] = result["problems"][0][:160]
    return summary(count, failed)


def scripts(tree: Path, place: Path, chosen: str) -> str:
    """``tests/megatron/test_training.py`` on this tree."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-rf",
        "tests/megatron/test_training.py",
        "-k",
        chosen,
    ]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=environment(MEGATRON_LM=str(tree)))
    (place / "scripts.out").write_text(done.stdout)
    return outcome(done.stdout)


def outcome(output: str) -> str:
    """How many passed, from pytest's line of dots (the project's own options leave the summary out)."""
    dots = "".join(re.findall(r"^([.FEsx]+) ", output, re.MULTILINE))
    failed = dict(re.findall(r"^(?:FAILED|ERROR) \S+::(\S+) - (.{0,160})", output, re.MULTILINE))
    return summary(len(dots) - dots.count("s"), failed)


def page(rows: dict[str, dict[str, str]], newest: str, chosen: str) -> str:
    """The document."""
    titles = [title.format(newest=newest) for title in COLUMNS.values()]
    lines = [
        "# Versions of Megatron", "",
        "`MEGATRON_TREES=/folder python scripts/megatron_versions.py`", "",
        f"Trees of Megatron-LM, torch {installed_version('torch')}, Python {platform.python_version()}, CPU and gloo.",
        "Hooks: the version that they see, and their state. Scenarios: `tests/megatron/scenarios.py`. Pairs of layouts:",
        "saved under one, loaded under another, every weight, main parameter, moment, step and hyperparameter bit-equal, then",
        "trained on; within this version, from checkpoints that the newest wrote, and from this version's into the newest.",
        f"`pretrain_gpt.py`: `tests/megatron/test_training.py`, those of `-k \"{chosen}\"`.", "",
        f"| tree | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|",
    ]  # fmt: skip
    for tag, row in rows.items():
        lines.append(f"| {tag} | " + " | ".join(row.get(column, "-").replace("|", "/") for column in COLUMNS) + " |")
    lines += [
        "", "Without TransformerEngine 0.12 can train on the CPU neither with its distributed optimizer nor with tensor",
        "parallelism: its row has the pairs that it can train, and its scenarios fail for that reason.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
