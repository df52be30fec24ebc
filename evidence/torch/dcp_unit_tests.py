"""Run torch's own unit tests of DCP, stock and with unickpt: ``docs/evidence/torch-dcp-unit-tests.md``.

    python -m evidence.torch.dcp_unit_tests --tests pytorch/test/distributed/checkpoint [--files test_planner.py ...]
        [--folder DIR] [--limit 300] [--out docs/evidence/torch-dcp-unit-tests.md]

``--tests`` is the folder of the tests in a source tree of PyTorch. They need the packages expecttest and zstandard. The tests
run on a CPU with gloo, through ``evidence/torch/unit_plugin.py``: without unickpt, then those that pass under ``UNICKPT=1``,
and without it with a ``UnickptWriter`` and a ``UnickptReader`` wherever a test passes torch's own. Each file is a job of its
own with a time limit. Results stay in the folder, and files with a result are not run again.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import tempfile
from importlib.metadata import version as installed_version
from pathlib import Path

from evidence import unit_jobs
from evidence.unit_jobs import Outcomes, counts
from tests.support.repository import REPO

STOCK, SWITCH, EXPLICIT = "stock", "switch", "explicit"
VARIABLES = {
    STOCK: {"UNICKPT_AUTOLOAD": "0"},
    SWITCH: {"UNICKPT": "1"},
    EXPLICIT: {"UNICKPT_UNIT_EXPLICIT": "1"},
}
TEST_LIMIT_S = 60  # of torch's harness, for one test
JOBS = 3  # for one file
# Why a test that passes stock does not with unickpt
_SLOW = "passes no storage class, so it is as stock: torch.compile took longer than the limit on a busy machine"
REASONS = {
    "e2e/test_e2e_save_and_load.py::TestE2ESaveAndLoad::test_e2e_compile_True_model_type0": _SLOW,
    "e2e/test_e2e_save_and_load.py::TestE2ESaveAndLoad::test_e2e_compile_True_model_type1": _SLOW,
    "e2e/test_e2e_save_and_load.py::TestE2ESaveAndLoad::test_e2e_compile_True_model_type2": _SLOW,
    "test_compatibility.py::TestDCPCompatbility::test_storage_meta": (
        "expects the number of the save that torch's writer draws (`save_id`); unickpt stores none"
    ),
    "e2e/test_e2e_save_and_load.py::TestCheckpointOrderingAndOverwrite::test_overwrite": (
        "passes `overwrite=False`, which `UnickptWriter` does not have: a save replaces a checkpoint when it is complete"
    ),
}
NOT_RUN = {
    "of Hugging Face's files, whose storage classes unickpt does not replace": (
        "test_hf_storage test_hf_safetensor_e2e test_hugging_face_storage test_quantized_hf_storage "
        "test_consolidate_hf_safetensors"
    ),
    "with storage classes of their own": "test_fsspec test_async_process_executor _experimental/*",
    "for devices": "test_cuobj_rdma_storage test_pg_transport",
    "of 8 ranks, without a save": "e2e/test_fsdp_ep",
    "of state dicts and helpers": (
        "test_state_dict test_state_dict_utils test_state_dict_stager test_shared_and_pinned_memory test_optimizer* "
        "test_grad_dtype test_traverse test_nested_dict test_dedup_tensors test_utils"
    ),
    "of modules that 2.13 lacks": "test_cooperative_planner test_metadata_warning test_restricted_metadata_unpickler",
    "that PyTorch no longer has; those that were looked at need names that 2.13 lacks": (
        "test_pg_aware_planner test_2d_* test_fsdp_checkpoint test_debug_hsdp_load test_dtensor_size_debug "
        "test_list_state_dict test_async_executor e2e/test_fsdp"
    ),
}
REVISIONS = (
    "test_checkpoint f34fa151, test_dcp_to_torch_save 801a8c9f, test_dtensor_checkpoint 6112c47f, test_file_system_checkpoint "
    "17aebe80, test_fsdp_model_state 0f5d91ff, test_fsdp_tp_checkpoint_conversion 9c491bc3, test_planner 26a39059, "
    "test_torch_save_to_dcp dd0b8707, test_tp_checkpoint 108671c3, e2e/test_fine_tuning 6f3d4fe1, e2e/test_pipeline 45918c74, "
    "fsdp/test_fsdp_dsd a56e71ae"
)  # of PyTorch's main branch


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tests", type=Path, required=True, help="test/distributed/checkpoint of a source tree of PyTorch")
    parser.add_argument("--files", nargs="+", help="of this folder (default: all)")
    parser.add_argument("--folder", type=Path, help="where to work and keep results (default: a temporary folder)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one file")
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "evidence" / "torch-dcp-unit-tests.md")
    args = parser.parse_args()
    tests = args.tests.resolve()
    files = args.files or sorted(str(path.relative_to(tests)) for path in tests.rglob("test_*.py"))
    rows: dict[str, dict[str, Outcomes]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for file in files:
            place = (args.folder or Path(temporary)).resolve() / file.removesuffix(".py").replace("/", "-")
            rows[file] = {STOCK: examine(tests, file, place, args.limit, None, STOCK)}
            passing = [name for name, found in rows[file][STOCK].items() if found["outcome"] == "passed"]
            for mode in (SWITCH, EXPLICIT):
                rows[file][mode] = examine(tests, file, place, args.limit, passing, mode) if passing else {}
                for name, found in rows[file][mode].items():
                    if found["outcome"] != "passed":
                        print("   ", mode, name, found["outcome"], found["reason"], flush=True)
            print(file, *(f"{mode}: {counts(found)}" for mode, found in rows[file].items()), flush=True)
            args.out.write_text(page(rows, args.limit, args.files))


def examine(tests: Path, file: str, place: Path, limit: float, only: list[str] | None, mode: str) -> Outcomes:
    """Return the outcome of each of a file's tests, or of those in ``only``.

    Tests that a job does not reach, because one before them hangs, run in another job.
    """
    found = outcomes(tests, file, place / mode, limit, only, mode)
    for job in range(2, JOBS + 1):
        left = [name for name, test in found.items() if test["outcome"] == "not reached"]
        if left:
            found |= outcomes(tests, file, place / mode / str(job), limit, left, mode)
    return found


def outcomes(tests: Path, file: str, place: Path, limit: float, only: list[str] | None, mode: str) -> Outcomes:
    """Run one job, or read its results if it has run before."""
    kept = place / "outcomes.json"
    if not kept.exists():
        place.mkdir(parents=True, exist_ok=True)
        for old in ("results.jsonl", "saves"):
            (place / old).unlink(missing_ok=True)
        run(tests, file, place, limit, only, mode)
        kept.write_text(json.dumps(read(place), indent=1))
    found: Outcomes = json.loads(kept.read_text())
    return found


def run(tests: Path, file: str, place: Path, limit: float, only: list[str] | None, mode: str) -> None:
    """Run one file, its output in ``log``."""
    ours = place / "pytest.ini"  # in place of the tree's options
    ours.write_text("[pytest]\n")
    command = [
        sys.executable, "-m", "pytest", "-p", "evidence.torch.unit_plugin", "-p", "no:cacheprovider", "-c", str(ours),
        "--rootdir", str(tests), "-q", "--tb=short", "-W", "ignore", "--show-capture=no", str(tests / file),
    ]  # fmt: skip
    extra = {
        "TMPDIR": str(place), "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_LIMIT_S), **VARIABLES[mode],
    }  # fmt: skip
    unit_jobs.run(command, place, limit, extra, only)


def read(place: Path) -> Outcomes:
    """Return by test: its outcome, why, and how often it saved through unickpt."""
    path = place / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    names = next((line["tests"] for line in lines if line["event"] == "collected"), [])
    found: Outcomes = {name: {"outcome": "not reached", "reason": "", "saves": 0} for name in names}
    for line in lines:
        if line["event"] == "begin":
            found[line["test"]] |= {"outcome": "timed out", "reason": "timed out"}
        elif line["event"] == "end":
            found[line["test"]] |= {"outcome": line["outcome"], "reason": cause(line["reason"]), "saves": line["saves"]}
    return found


def cause(text: str) -> str:
    """Return the line of a traceback that names the error."""
    errors = re.findall(r"^(?:E +)?((?:[\w.]+\.)?\w*(?:Error|Exception|Warning)\b(?:: .*)?)$", text, re.M)
    own = [each for each in errors if "Process" not in each and "Connection closed by peer" not in each]  # of another rank
    return (own or errors or text.splitlines() or [""])[-1 if own else 0]


def page(rows: dict[str, dict[str, Outcomes]], limit: float, files: list[str] | None) -> str:
    """Return the document."""
    only = f" --files {' '.join(files)}" if files else ""
    lines = [
        "# torch's own unit tests of DCP",
        "",
        "Do torch's own tests of `torch.distributed.checkpoint` (DCP) still pass when unickpt saves and loads?",
        "",
        f"`python -m evidence.torch.dcp_unit_tests --tests pytorch/test/distributed/checkpoint{only}`",
        "",
        f"torch {installed_version('torch')}, Python {platform.python_version()}, CPU and gloo, 2 to 4 ranks.",
        "",
        answer(rows),
        "",
        "The test files are unchanged. Their tests for several GPUs run on the CPU, and their ranks are forked. *Stock* is",
        "without unickpt's hooks. The tests that pass run again in two ways. *Switch*: `UNICKPT=1`. *Explicit*: without the",
        "switch, a `UnickptWriter` and a `UnickptReader` are wherever a test passes `FileSystemWriter` and `FileSystemReader`.",
        f"*Saved* are tests in which unickpt writes a checkpoint. Each test has {TEST_LIMIT_S} seconds, each file {limit:.0f}.",
        "",
        "| file | tests | stock: pass | stock: other | switch: pass | saved | explicit: pass | saved |",
        "|---" * 8 + "|",
    ]
    sums = [0] * 6
    for file, found in rows.items():
        numbers = numbers_of(found)
        sums = [a + b for a, b in zip(sums, numbers, strict=True)]
        others = ", ".join(f"{n} {outcome}" for outcome, n in counts(found[STOCK]).items() if outcome != "passed")
        shown = [*map(str, numbers[:2]), others or ("-" if found[STOCK] else "not collected"), *map(str, numbers[2:])]
        lines.append(f"| {file} | {' | '.join(shown)} |")
    shown = [*map(str, sums[:2]), "", *map(str, sums[2:])]
    lines += [f"| all | {' | '.join(shown)} |", "", "## Pass stock and fail with unickpt", ""]
    different = differences(rows)
    for (name, outcome, reason), modes in different.items():
        why = REASONS.get(name, "reason not known")
        lines.append(f"- `{name}` ({' and '.join(modes)}): {why} ({outcome}: `{shortened(reason)}`)")
    lines += [] if different else ["None."]
    lines += ["", "## Do not pass stock", ""]
    lines += [
        f"- `{name}`: {test['outcome']}: `{shortened(test['reason'])}`"
        for found in rows.values()
        for name, test in found[STOCK].items()
        if test["outcome"] != "passed"
    ]
    lines += ["", "## Not run", "", "| tests | files |", "|---|---|"]
    lines += [f"| {why} | {', '.join(f'`{file}`' for file in files.split())} |" for why, files in NOT_RUN.items()]
    lines += ["", f"Not tested: GPUs and NCCL. Revisions of the files, as far as they are noted: {REVISIONS}.", ""]
    return "\n".join(lines)


def numbers_of(found: dict[str, Outcomes]) -> list[int]:
    """Return the numbers of a row: tests, those that pass stock, and for both ways those that pass, and those that save."""
    passing = {mode: [test for test in every.values() if test["outcome"] == "passed"] for mode, every in found.items()}
    ours = [n for mode in (SWITCH, EXPLICIT) for n in (len(passing[mode]), sum(test["saves"] > 0 for test in passing[mode]))]
    return [len(found[STOCK]), len(passing[STOCK]), *ours]


def answer(rows: dict[str, dict[str, Outcomes]]) -> str:
    every = [numbers_of(found) for found in rows.values()]
    stock, switch, explicit = (sum(each[at] for each in every) for at in (1, 2, 4))
    return f"Of {stock} tests that pass stock, {switch} pass under the switch and {explicit} with the explicit classes."


def differences(rows: dict[str, dict[str, Outcomes]]) -> dict[tuple[str, str, str], list[str]]:
    """Return the ways in which tests fail that pass stock."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows.values():
        for mode in (SWITCH, EXPLICIT):
            for name, test in row[mode].items():
                if test["outcome"] != "passed":
                    found.setdefault((name, test["outcome"], shortened(test["reason"])), []).append(mode)
    return found


def shortened(reason: str) -> str:
    """Return an error without folders and line breaks."""
    return re.sub(r"/\S*/", "", reason.replace("`", "'").replace("|", "/").replace("\n", " "))[:200]


if __name__ == "__main__":
    main()
