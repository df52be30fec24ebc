#!/usr/bin/env bash
# Build the source distribution and the wheel into dist/, and check what the wheel holds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${UNICKPT_WHEELS_VENV:-.venv-wheels}
[ -x "$venv/bin/python" ] || "${UNICKPT_PYTHON:-python3}" -m venv "$venv"
PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip install -qq build
rm -rf dist
"$venv/bin/python" -m build --outdir dist .
"$venv/bin/python" - dist/*.whl <<'PYTHON'
import sys
import zipfile

names = set(zipfile.ZipFile(sys.argv[1]).namelist())
needed = {
    "_unickpt_autoload.py",
    "unickpt/py.typed",
    "unickpt/cli/main.py",
    "unickpt/diagnosis/reports/report.html",
    "unickpt/diagnosis/recording/_fast.abi3.so",
    "unickpt/checkpoint/format/_casts.abi3.so",
    "unickpt/checkpoint/load/_checked_read.abi3.so",
    "unickpt/transform/dialects/data/megatron-core.llama.toml",
    "ds_unickpt/engine.py",
    "megatron_unickpt/hooks.py",
}
missing = sorted(needed - names)
strangers = sorted(n for n in names if n.split("/")[0] in ("tests", "evidence", "scripts", "benchmarks", "examples", "docs"))
if missing or strangers:
    sys.exit(f"the wheel lacks {missing} and should not hold {strangers}")
print(f"{sys.argv[1]}: {len(names)} files")
PYTHON
