"""Run Megatron's own unit tests of dist_checkpointing, stock and with unickpt: ``docs/evidence/megatron-unit-tests.md``.

    MEGATRON_LM=/path/to/Megatron-LM python -m evidence.megatron.unit_tests [--files test_torch_dist.py ...]
        [--folder DIR] [--limit 300] [--out docs/evidence/megatron-unit-tests.md]

The tests run on CPU and gloo, through ``evidence/megatron/unit_plugin.py``: first without unickpt's hooks, then those
that pass again, with unickpt for every save with torch_dist or without a named strategy. Each file is a job of its own with a
time limit. A test passes if it passes on all ranks. Results stay in the folder, and files with a result are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from evidence import unit_jobs
from evidence.unit_jobs import counts, missing_module
from tests.support.repository import REPO
from unickpt.testing.launch import free_port

FOLDER = "tests/unit_tests/dist_checkpointing"
WORLD = 8  # what the tests are written for: most begin with TP2 PP4
JOBS = 3  # for one file
FEWER_RANKS = {"test_mapping.py": 2, "test_safe_globals.py": 1}  # those that make their directories by themselves
# Why a test that passes stock does not with unickpt
_FILES = "reads torch_dist's own files (`.metadata`, `__0_0.distcp`)"
_CACHE = "reads the plan that torch_dist's strategy keeps between saves (`cached_global_metadata`); unickpt has no such plan"
_REFUSAL = "expects that the optimizer of another parallel layout is refused (RuntimeError); unickpt loads it"
REASONS = {
    "test_torch_dist.py::TestCachedMetadata::test_cached_metadata": _FILES,
    "test_torch_dist.py::TestCPUTensors::test_cpu_tensors_dont_take_too_much_space": _FILES,
    "test_async_save.py::TestAsyncSave::test_errors_are_reported": (
        "breaks torch_dist's writer and waits for its exception; unickpt does not use that writer, and the save succeeds"
    ),
    "test_global_metadata_reuse.py::TestGlobalMetadataReuse::test_global_metadata_reuse": _CACHE,
    "test_global_metadata_reuse.py::TestGlobalMetadataReuse::test_no_global_metadata_reuse_on_different_parallelism": _CACHE,
    "test_optimizer.py::TestFP32Optimizer::test_finetune_doesnt_load_optimizer": _REFUSAL,
    "test_optimizer.py::TestOptimizerResharding::test_finetune_doesnt_load_optimizer": _REFUSAL,
    "test_optimizer.py::TestDistributedOptimizer::test_finetune_doesnt_load_optimizer": _REFUSAL,
    "test_optimizer.py::TestDistributedOptimizer::test_bucket_space_optimizer_save_load": (
        "expects the keys of Megatron's buckets in the checkpoint; unickpt stores by parameter"
    ),
    "test_serialization.py::TestNonStrictLoad::test_unexpected_keys_handling_during_validation": (
        "expects torch's own CheckpointException for a missing tensor; unickpt raises Megatron's CheckpointingException"
    ),
    "test_serialization.py::TestNonStrictLoad::test_exact_load_handling": (
        "expects an empty log; unickpt writes a line (INFO) for each save, and a report for each load"
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", nargs="+", help=f"of {FOLDER} (default: all)")
    parser.add_argument("--folder", type=Path, help="where to work and keep results (default: a temporary folder)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one file")
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "evidence" / "megatron-unit-tests.md")
    args = parser.parse_args()
    tree = Path(os.environ["MEGATRON_LM"]).resolve()
    files = args.files or sorted(str(p.relative_to(tree / FOLDER)) for p in (tree / FOLDER).rglob("test_*.py"))
    rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        for file in files:
            place = (args.folder or Path(temporary)).resolve() / file.removesuffix(".py").replace("/", "-")
            stock = examine(tree, file, place / "stock", args.limit, None, unickpt=False)
            passing = [name for name, found in stock.items() if found["outcome"] == "passed"]
            ours = examine(tree, file, place / "unickpt", args.limit, passing, unickpt=True) if passing else {}
            rows[file] = (stock, ours, "" if stock else missing_module(place / "stock" / "log"))
            print(file, counts(stock), counts(ours), *([f"needs {rows[file][2]}"] if rows[file][2] else []), flush=True)
            for name in passing:
                if ours[name]["outcome"] != "passed":
                    print("   ", name, ours[name]["outcome"], ours[name]["reason"].splitlines()[:1], flush=True)
            args.out.write_text(page(rows, args.limit, args.files))


def examine(
    tree: Path, file: str, place: Path, limit: float, only: list[str] | None, *, unickpt: bool
) -> dict[str, dict[str, Any]]:
    """Return the outcome of each of a file's tests, or of those in ``only``.

    A test that fails or hangs can leave the ranks out of step. Tests that are not reached for this reason run in another job.
    """
    found = outcomes(tree, file, place, limit, only, unickpt=unickpt)
    for job in range(2, JOBS + 1):
        left = [name for name, test in found.items() if test["outcome"] == "not reached"]
        if left:
            found |= outcomes(tree, file, place / str(job), limit, left, unickpt=unickpt)
    return found


def outcomes(
    tree: Path, file: str, place: Path, limit: float, only: list[str] | None, *, unickpt: bool
) -> dict[str, dict[str, Any]]:
    """Run one job, or read its results if it has run before."""
    kept = place / "results.json"
    if not kept.exists():
        place.mkdir(parents=True, exist_ok=True)
        for old in place.glob("rank*.jsonl"):
            old.unlink()
        world = FEWER_RANKS.get(file, WORLD)
        ended = run(tree, file, place, limit, world, only, unickpt=unickpt)
        results = merged(place, world, ended)
        if only and not results:  # for example, torchrun found its port taken
            raise RuntimeError(f"no test of {file} was collected: see {place / 'log'}; run the command again")
        kept.write_text(json.dumps(results, indent=1))
    found: dict[str, dict[str, Any]] = json.loads(kept.read_text())
    return found


def run(tree: Path, file: str, place: Path, limit: float, world: int, only: list[str] | None, *, unickpt: bool) -> bool:
    """One file under torchrun, its output in ``log``; whether it ended within the limit."""
    ours = place / "pytest.ini"  # in place of the tree's options
    ours.write_text("[pytest]\n")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-addr", "127.0.0.1",
        "--master-port", str(free_port()), "-m", "pytest", "-p", "evidence.megatron.unit_plugin",
        "-p", "no:cacheprovider",
        "-c", str(ours), "--rootdir", str(tree), "-q", "--tb=short", "-W", "ignore", str(tree / FOLDER / file),
    ]  # fmt: skip
    extra = {"MEGATRON_LM": str(tree)}
    extra |= {"UNICKPT_UNIT_REPLACES": "1"} if unickpt else {"UNICKPT_AUTOLOAD": "0"}  # without our hooks
    chosen = None if only is None else [f"{FOLDER}/{name}" for name in only]
    return unit_jobs.run(command, place, limit, extra, chosen)


def merged(place: Path, world: int, ended: bool) -> dict[str, dict[str, Any]]:
    """Test by name: its outcome on all ranks, why, and how often it saved through unickpt."""
    found: dict[str, dict[str, Any]] = {}
    for rank in range(world):
        path = place / f"rank{rank}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for name in next((line["tests"] for line in lines if line["event"] == "collected"), []):
            found.setdefault(name, {"ranks": []})
        for line in lines:
            if line["event"] == "end":
                found[line["test"]]["ranks"].append({**line, "rank": rank})
            elif line["event"] == "begin":
                found[line["test"]]["begun"] = True
    return {name.removeprefix(f"{FOLDER}/"): together(test, world, ended) for name, test in found.items()}


def together(test: dict[str, Any], world: int, ended: bool) -> dict[str, Any]:
    ranks = test["ranks"]
    bad = next((r for r in ranks if r["outcome"] == "failed"), None)
    if bad is not None:
        outcome, reason = "failed", f"rank {bad['rank']}: {bad['reason']}"
    elif len(ranks) < world:
        outcome = ("died" if ended else "timed out") if test.get("begun") else "not reached"
        reason = outcome
    else:
        odd = next((r for r in ranks if r["outcome"] != "passed"), ranks[0])
        outcome, reason = odd["outcome"], odd["reason"]
    return {"outcome": outcome, "reason": reason, "saves": max((r["saves"] for r in ranks), default=0)}


def page(rows: dict[str, Any], limit: float, files: list[str] | None) -> str:
    """The document."""
    only = f" --files {' '.join(files)}" if files else ""
    fewer = ", ".join(f"{file}: {n}" for file, n in FEWER_RANKS.items())
    lines = [
        "# Megatron's own unit tests",
        "",
        "Do Megatron's own tests of `dist_checkpointing` still pass when unickpt saves and loads?",
        "",
        f"`MEGATRON_LM=/path/to/Megatron-LM python -m evidence.megatron.unit_tests{only}`",
        "",
        f"megatron-core {installed_version('megatron-core')}, torch {installed_version('torch')}, "
        f"Python {platform.python_version()}, CPU and gloo, {WORLD} ranks ({fewer}).",
        "",
        f"The tests of `{FOLDER}` in Megatron-LM are unchanged. *Stock* is without unickpt's hooks.",
        "*With unickpt*: the tests that pass stock run again, and every save with torch_dist or without a named strategy uses",
        "unickpt (also inside the fully parallel wrappers). A test passes if it passes on all ranks. Each job has",
        f"{limit:.0f} seconds. Tests that a job does not reach, because one before them hangs, run in another job, up to",
        f"{JOBS} jobs for a file.",
        "",
        "| file | tests | stock: pass | stock: other | with unickpt: pass | pass, saved by unickpt |",
        "|---" * 6 + "|",
    ]
    differences, sums = [], [0, 0, 0, 0]
    for file, (stock, ours, missing) in rows.items():
        other = "" if stock else f"not collected: needs {missing}" if missing else "not collected"
        other = other or ", ".join(f"{n} {outcome}" for outcome, n in counts(stock).items() if outcome != "passed")
        passing = [name for name, test in ours.items() if test["outcome"] == "passed"]
        numbers = [len(stock), counts(stock).get("passed", 0), len(passing), sum(ours[name]["saves"] > 0 for name in passing)]
        sums = [a + b for a, b in zip(sums, numbers, strict=True)]
        lines.append(f"| {file} | {numbers[0]} | {numbers[1]} | {other or '-'} | {numbers[2]} | {numbers[3]} |")
        differences += [(name, test) for name, test in ours.items() if test["outcome"] != "passed"]
    lines += [f"| all | {sums[0]} | {sums[1]} | | {sums[2]} | {sums[3]} |", "", "## Pass stock and fail with unickpt", ""]
    for name, test in differences:
        first = (test["reason"].splitlines() or [test["outcome"]])[0].replace("`", "'")
        shown = re.sub(r"/\S*/(?=tmp_dist_ckpt)", "", first)[:200]
        lines.append(f"- `{name}`: {REASONS.get(name.partition('[')[0], 'reason not known')} ({test['outcome']}: `{shown}`)")
    return "\n".join(lines + ([] if differences else ["None."])) + "\n"


if __name__ == "__main__":
    main()
