#!/usr/bin/env bash
# Style, types, directions of imports and generated docs, with the programs that are in PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ruff check .
ruff format --check .
mypy
lint-imports
python scripts/make_docs.py --check
