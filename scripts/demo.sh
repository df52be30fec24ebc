#!/usr/bin/env bash
# The demonstrations, from nothing: an environment in .venv-demo, then DeepSpeed's (examples/demo/run.py) with the
# arguments given, then Megatron's (examples/demo/megatron_run.py), then one training through DeepSpeed, PyTorch and Megatron.
#
#   scripts/demo.sh [--chain 2x4,3x2,1x3,0x1] [--steps 20]        (environment variables: see venv.sh)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh
use_venv deepspeed,megatron,demo .venv-demo
python examples/demo/run.py "$@"
echo
python examples/demo/megatron_run.py
echo
exec python -m evidence.three_frameworks
