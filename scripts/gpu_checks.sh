#!/usr/bin/env bash
# Everything that only a GPU can show, in at most nine minutes: a table, and gpu_checks.json.
#
#   scripts/gpu_checks.sh [--dry] [--only GROUP ...] [--minutes 9] [--out FILE.json]
#
# Needs Python 3.12 with torch 2.11 or newer and CUDA, this checkout, and no network: what else it needs is installed from
# the wheels that scripts/gpu_wheels.sh has put into build/gpu_wheels, into a folder of its own.
#
#   UNICKPT_PYTHON  the Python with torch (default: python3)
#   UNICKPT_WHEELS  folder with the wheels (default: build/gpu_wheels; nothing is installed if there is none)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${UNICKPT_PYTHON:-python3}
wheels=${UNICKPT_WHEELS:-build/gpu_wheels}
if [ -d "$wheels" ]; then
  site=build/gpu_site
  if [ ! -e "$site/installed" ]; then
    rm -rf "$site"
    # --no-deps: torch is there, and nothing may replace it
    "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$wheels"/*.whl
    touch "$site/installed"
  fi
  export PYTHONPATH=$PWD/$site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
exec "$python" -m benchmarks.gpu_checks "$@"
