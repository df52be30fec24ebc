#!/usr/bin/env bash
# The tests, from nothing: an environment in .venv-test, then pytest with the arguments given.
#
#   scripts/test.sh [arguments of pytest]        (environment variables: see venv.sh)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh
use_venv deepspeed,megatron,hf,demo,docs,dev .venv-test
exec python -m pytest "$@"
