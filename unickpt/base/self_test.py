"""Self-tests of adapters: whether hooks work in a framework whose source has changed since the release.

A self-test is a module of an adapter. It trains a tiny model, saves it, loads it into a model of another seed and compares
every bit, in a process of its own on the CPU. One process of a host runs it. Its result is kept per version: one that passed
until the versions change, one that failed for ten minutes, in which the other ranks of the host read it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version as installed_version
from pathlib import Path

from unickpt import __version__

CACHE = "UNICKPT_CACHE"
RUNNING = "UNICKPT_SELF_TEST"  # set in the process of a self-test
LIMIT_S = 600.0  # of a self-test; it takes some seconds, and DeepSpeed may compile an operator first
FAILURE_KEPT_S = 600.0
_OF_THE_JOB = ("TORCHELASTIC_", "SLURM_", "PMI_", "PMIX_", "OMPI_", "MASTER_", "UNICKPT_", "NCCL_", "CROSS_")
_OF_THE_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")


def verified(module: str, framework: str, version: str, fingerprints: list[str], *, limit_s: float = LIMIT_S) -> str:
    """Return '' if the self-test of an adapter passes, or has passed; otherwise why not. Blocks while it runs.

    Args:
        module: module of the self-test; ``python -m`` runs it, and it exits with 0 if it passes.
        framework, version: what it tests.
        fingerprints: of the functions whose source is unknown.
    """
    if os.environ.get(RUNNING):
        return ""
    folder = cache_folder()
    kept = folder / f"{framework.lower()}-{_key(module, framework, version, fingerprints)}.json"
    with open(kept.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reason = _known(kept)
        if reason is None:
            reason = _run(module, limit_s)
            document = {"framework": framework, "version": version, "time": time.time(), "reason": reason}
            partial = kept.with_suffix(".partial")
            partial.write_text(json.dumps(document))
            partial.replace(kept)
    return reason


def last_result(framework: str, version: str) -> str | None:
    """Return the newest result for a version, '' or why it failed; None if there is none, or a failure that is too old."""
    files = sorted(cache_folder().glob(f"{framework.lower()}-*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    return next((_known(file) for file in files if _version_in(file) == version), None)


def _version_in(file: Path) -> str:
    try:
        return str(json.loads(file.read_text())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def cache_folder() -> Path:
    """Return the folder of this user for results; a temporary one if the home directory cannot be written."""
    base = os.environ.get(CACHE) or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "unickpt")
    folder = Path(base) / "self-tests"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"unickpt-self-tests-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise
        return folder


def _key(module: str, framework: str, version: str, fingerprints: list[str]) -> str:
    """Return a digest of everything that a result depends on."""
    versions = [__version__, installed_version("torch"), platform.python_version(), platform.machine()]
    facts = [module, framework, version, *versions, *sorted(fingerprints)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _known(kept: Path) -> str | None:
    """Return the kept result; None if there is none, or a failure that is too old."""
    try:
        document = json.loads(kept.read_text())
        reason, age_s = str(document["reason"]), time.time() - float(document["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return reason if not reason or 0 <= age_s < FAILURE_KEPT_S else None


def _run(module: str, limit_s: float) -> str:
    """Run a self-test. Returns '' if it passes, and otherwise its last line."""
    with tempfile.TemporaryDirectory(prefix="unickpt-self-test-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, folder], env=_environment(), cwd=folder, timeout=limit_s,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"its self-test has not ended after {limit_s:.0f} s"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return "" if done.returncode == 0 else f"its self-test failed: {lines[-1] if lines else f'exit code {done.returncode}'}"


def _environment() -> dict[str, str]:
    """Return the environment of a process of its own: no rank of a job, no GPU. It finds the same packages."""
    own = {name: text for name, text in os.environ.items() if not name.startswith(_OF_THE_JOB) and name not in _OF_THE_RANK}
    path = os.pathsep.join([each for each in sys.path if os.path.isabs(each)])
    return own | {
        RUNNING: "1", "UNICKPT_ALLOW_UNTESTED": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": path,
    }  # fmt: skip
