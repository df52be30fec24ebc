#!/usr/bin/env bash
# The demonstration, from nothing: an environment in .venv-demo, then examples/demo/run.py with the arguments given.
#
#   scripts/demo.sh [--chain 2x4,3x2,1x3,0x1] [--steps 20]        (environment variables: see venv.sh)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh
use_venv deepspeed,demo .venv-demo
exec python examples/demo/run.py "$@"
