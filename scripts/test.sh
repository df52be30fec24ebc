#!/usr/bin/env bash
# The tests, from nothing: an environment, then pytest with the arguments given.
#
#   scripts/test.sh [arguments of pytest]           in .venv-test, with all frameworks
#   scripts/test.sh --unit [arguments of pytest]    in .venv-unit, with the core and torch: tests that need no framework
#
# Environment variables: see venv.sh. Without arguments it runs everything, with workers that share the files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh
extras=deepspeed,megatron,hf,demo,docs,dev venv=.venv-test tests=() workers=2
if [ "${1:-}" = --unit ]; then
  extras=test venv=.venv-unit tests=(tests/unit tests/hostile) workers=3 # many of them wait: 2:46 instead of 3:23 on two cores
  shift
fi
use_venv $extras $venv
[ $# -gt 0 ] || set -- -n "$workers" --dist loadfile --no-loadscope-reorder
paths=""
for each in "$@"; do [ ! -e "${each%%::*}" ] || paths=yes; done
[ -n "$paths" ] || set -- "${tests[@]}" "$@" # options alone, such as -k NAME, do not change which folders are looked into
exec python -m pytest "$@"
