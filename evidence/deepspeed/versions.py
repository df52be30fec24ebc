"""Try several DeepSpeed versions and write what each shows: ``docs/evidence/deepspeed-versions.md``.

    python -m evidence.deepspeed.versions [--versions 0.19.8 0.18.6 0.17.6] [--folder DIR]
        [--out docs/evidence/deepspeed-versions.md]

Each version is installed beside the others (``pip install --no-deps --target``) and put first on
PYTHONPATH of the test workers; everything else comes from the environment that runs this script.
Nothing is hidden: a scenario that fails is named in the table with the last line of its error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from packaging.version import Version

from tests.jobs import pairs
from tests.jobs.deepspeed.zero_names import layouts
from tests.support.repository import REPO
from unickpt.testing.launch import torchrun

VERSIONS = ("0.19.8", "0.18.6", "0.17.6")
WORLDS = (1, 2)
GROUPS = ("state", "promises", "errors")
PARALLELISMS = {"pipelines": "pipelines", "3D parallelism through an `mpu`": "mpu", "experts": "experts", "AutoTP": "tensors"}
COMPILED = ("cpu_adam_offloaded", "cpu_adam_to_torch_adam_and_back", "lion", "fused_adam_without_zero_in_bf16")
# Their world of two ranks loads what their world of one rank has saved. Here each scenario runs on two ranks only.
AFTER_ONE_RANK = (
    "a_job_resumes_at_any_world_size_and_logs_what_changed",
    "every_spelling_keeps_the_global_batch_of_the_checkpoint",
)
# What a DeepSpeed cannot do itself, and compressed gradients, which are for 0.19.8: (below which version, scenario)
NOT_IN_DEEPSPEED = (
    (Version("0.19.3"), "aligned_partitions"),
    (Version("0.19.3"), "empty_and_one_element_parameters"),
    (Version("0.19.8"), "residuals_of_compressed_gradients_return_to_their_ranks"),
    (Version("0.18"), "fp16_from_zero_1"),
)
NOTES = """
- **Layouts**: a quarter of all pairs of layouts on 1 and 2 ranks, and every layout with itself. All weights, masters, moments
  and other state are equal bit for bit. Scenarios are those of `tests/jobs/deepspeed/scenarios_*.py`.
- **0.18.7 to 0.18.9** cannot train ZeRO-1 or ZeRO-2 with this version of torch. Their own step fails with "Output 0 of Split
  is a view and is being modified inplace": `stage_1_and_2.py` flattens parameters without `.detach()`, which 0.19.0 added.
  Therefore 0.18.6 represents the series. The hooks accept 0.18.7 to 0.18.9, because their functions are those of 0.18.6 or
  0.19.0, and another torch can run them.
- **Before 0.19**, three scenarios are left out: `zero_optimization.parameter_alignment`, parameters of size zero under ZeRO-1
  and 2, and compressed gradients. The hooks that compress gradients know the functions of 0.19.8 only. In other versions
  gradients are exchanged as DeepSpeed does it, with a warning.
- **0.17 and 0.18** on gloo: `GatheredParameters` of several parameters waits for the last one only
  (`_allgather_params_coalesced` in `partition_parameters.py`). The others may come later. 0.19.8 waits
  for all. The scenarios gather parameters one at a time. On GPUs a stream keeps the order.
- **0.17** cannot train fp16 under ZeRO-1 on several ranks, and that scenario is left out. The ranks do not agree on an
  overflow (`has_overflow` in `stage_1_and_2.py` reduces only if gradients are partitioned; 0.18 always does). The rank that
  skips its step leaves the other one waiting. 0.17 also makes `FP16_Optimizer` or `FP16_UnfusedOptimizer` where others make
  `BF16_Optimizer`, because `BFLOAT16` and `DDP_BFLOAT16` are the same text in its `runtime/constants.py`.
- **Parallelisms**: the pairs of layouts that the test suite runs with the installed version (`test_matrix.py`). In 0.18.6
  DeepSpeed's own step fails with experts under `BF16_Optimizer` on a CPU (`to_tensor` in `runtime/utils.py` gives a float to
  `FloatTensor`), and AutoTP ends with a segmentation fault in its compiled all-reduce for CPUs (`inference_all_reduce`), in the
  first forward pass. The AutoTP of 0.17.6 has no `partition_config`, by which the test divides its model.
- Scenarios that need DeepSpeed's compiled optimizers (DeepSpeedCPUAdam, Lion, FusedAdam), or two worlds one after the other,
  run in the test suite with the installed version only.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--versions", nargs="+", default=list(VERSIONS))
    parser.add_argument("--folder", type=Path, help="where to install and work (default: a temporary folder)")
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "evidence" / "deepspeed-versions.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        rows = {version: examine(folder, version, newest=args.versions[0]) for version in args.versions}
    args.out.write_text(page(rows, args.versions))
    print(args.out.read_text())


def install(folder: Path, version: str) -> Path:
    """The version, alone in a folder of its own."""
    target = folder / "installed" / version
    if not (target / "deepspeed").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(target)]
        subprocess.run([*command, f"deepspeed=={version}"], check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    return target


def examine(folder: Path, version: str, *, newest: str) -> dict[str, str]:
    """Every cell of a version's row."""
    env = {"PYTHONPATH": str(install(folder, version)), "TORCH_FR_BUFFER_SIZE": "4000"}
    env["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions" / version)
    place = folder / "matrix" / version
    place.mkdir(parents=True, exist_ok=True)
    row = {"hooks": hooks(env)}
    row["layouts"] = attempt(place / "layouts.log", lambda: matrix(place, place, env, save=True))
    for group in GROUPS:
        here = folder / "scenarios" / version / group
        row[group] = attempt(place / f"{group}.log", lambda here=here, g=group: scenarios(here, g, version, env))
    for name, each in PARALLELISMS.items():
        row[name] = attempt(place / f"{each}.log", lambda each=each: parallelism(each, env))
    if version != newest:
        row["from newest"] = attempt(place / "from.log", lambda: matrix(folder / "matrix" / newest, place, env, save=False))
        newest_env = {**env, "PYTHONPATH": str(install(folder, newest))}
        row["into newest"] = attempt(
            place / "into.log", lambda: matrix(place, folder / "matrix" / newest, newest_env, save=False)
        )
    print(version, row, flush=True)
    return row


def attempt(log: Path, check: Any) -> str:
    """The check's result, or the end of its error; all of that is in ``log``."""
    try:
        found: str = check()
    except AssertionError as err:
        log.write_text(str(err))
        return f"failed: {last_error(str(err))[:200]}"
    return found


def last_error(output: str) -> str:
    """Return the last line that names an error of Python; the output itself if there is none."""
    found = re.findall(
        r"^(?:E +)?((?!\S*ChildFailed)[\w.]*(?:Error|Exception): .+|Fatal Python error: .+)$", output, re.MULTILINE
    )
    return found[-1] if found else output


def hooks(env: dict[str, str]) -> str:
    """Which version the hooks saw, and whether they accepted it."""
    code = (
        "import deepspeed; from unickpt.base.hooks import status\n"
        "print(deepspeed.__version__, *sorted({each.state for each in status()}))"
    )
    full = {**os.environ, "DS_ACCELERATOR": "cpu", **env}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=full)
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else f"failed: {done.stderr[-200:]}"


def matrix(sources: Path, targets: Path, env: dict[str, str], *, save: bool) -> str:
    """Load sources of one folder into this version; ``targets`` keeps the results. A quarter of all pairs."""
    every = list(enumerate(layout for world in WORLDS for layout in layouts(world)))
    chosen = [(s, t) for (j, t), (i, s) in itertools.product(every, every) if (i + 3 * j) % 4 == 0 or s == t]
    pairs.write(chosen, sources)
    for kind in ("save", "load") if save else ("load",):
        torchrun(WORLDS[-1], pairs.DEEPSPEED, str(sources), "zero", "--only", kind, env=env, timeout_s=1200)
    results = pairs.results(chosen, sources)
    (targets / "last.json").write_text(json.dumps(list(results.values())))
    bad = [f"{source} to {target}: {found['problems'][0]}" for (source, target), found in results.items() if found["problems"]]
    return f"{len(results) - len(bad)} of {len(results)} pairs equal" + "".join(f"; {b[:120]}" for b in bad[:3])


def parallelism(matrix: str, env: dict[str, str]) -> str:
    """Run the pairs of layouts of a parallelism that the test suite has."""
    test = f"tests/integration/test_matrix.py::test_every_state_is_bit_equal_after_load[{matrix}]"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test]
    full = {**os.environ, "DS_ACCELERATOR": "cpu", **env, "PYTHONPATH": f"{env['PYTHONPATH']}{os.pathsep}{REPO}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=full)
    assert done.returncode == 0, done.stdout
    return "all pairs equal"


def scenarios(place: Path, group: str, version: str, env: dict[str, str]) -> str:
    """Return the number of scenarios that passed on two ranks, and those that failed."""
    place.mkdir(parents=True, exist_ok=True)
    package = "tests.jobs.deepspeed"
    code = f"from {package}.scenario_worker import scenarios as s; print(*s({group!r}))"
    full = {**os.environ, **env, "DS_ACCELERATOR": "cpu"}
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, env=full, check=True)
    absent = {name for below, name in NOT_IN_DEEPSPEED if Version(version) < below}
    names = [name for name in listed.stdout.splitlines()[-1].split() if name not in absent.union(COMPILED, AFTER_ONE_RANK)]
    torchrun(
        2,
        "tests.jobs.deepspeed.scenario_worker",
        group,
        str(place),
        *names,
        env=env,
        timeout_s=900,
    )
    found: dict[str, dict[str, str]] = json.loads((place / "w2.json").read_text())
    failed = {name: next(iter(f.values())).strip().splitlines()[-1] for name, f in found.items() if f}
    return f"{len(found) - len(failed)} of {len(found)}" + "".join(f"; {n}: {e[:160]}" for n, e in failed.items())


def page(rows: dict[str, dict[str, str]], versions: list[str]) -> str:
    """Return the page as Markdown."""
    checks = {
        "hooks": "hooks: version, state",
        "layouts": "pairs of layouts",
        "state": "scenarios: state",
        "promises": "scenarios: guarantees",
        "errors": "scenarios: bad input",
        **{name: f"pairs of layouts: {name}" for name in PARALLELISMS},
        "from newest": f"saved by {versions[0]}, loaded here",
        "into newest": f"saved here, loaded by {versions[0]}",
    }
    lines = [
        "# DeepSpeed versions",
        "",
        "Which versions of DeepSpeed work?",
        "",
        "0.17.6, 0.18.6 and 0.19.8 do. What fails below is DeepSpeed's own, or an option that the version lacks.",
        "",
        f"`python -m evidence.deepspeed.versions --versions {' '.join(versions)}`",
        "",
        f"Python {platform.python_version()}, torch {installed_version('torch')}, CPU.",
        "",
        "| | " + " | ".join(versions) + " |",
        "|---" * (len(versions) + 1) + "|",
    ]
    for key, title in checks.items():
        lines.append(f"| {title} | " + " | ".join(rows[v].get(key, "-").replace("|", "\\|") for v in versions) + " |")
    return "\n".join(lines) + "\n" + NOTES


if __name__ == "__main__":
    main()
