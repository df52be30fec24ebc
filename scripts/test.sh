#!/usr/bin/env bash
# The tests, from nothing: an environment in .venv-test, then pytest with the arguments given.
#
#   scripts/test.sh [arguments of pytest]        (environment variables: see venv.sh)
#
# Without arguments it runs everything, with two workers that share the files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh
use_venv deepspeed,megatron,hf,demo,docs,dev .venv-test
[ $# -gt 0 ] || set -- -n 2 --dist loadfile --no-loadscope-reorder
exec python -m pytest "$@"
