#!/usr/bin/env bash
# The docs site, from nothing: an environment in .venv-docs, then `zensical build --strict` into build/site.
#
#   scripts/docs.sh [serve]        (serve: show it on http://127.0.0.1:8000 and follow changes; UNICKPT_PYTHON: see venv.sh)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${UNICKPT_DOCS_VENV:-.venv-docs}
[ -x "$venv/bin/python" ] || "${UNICKPT_PYTHON:-python3}" -m venv "$venv"
stamp=$venv/unickpt-installed
wanted=$(sha256sum pyproject.toml)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  # The requirements of the docs extra alone: the API pages are read from the source, so neither torch nor unickpt is needed.
  "$venv/bin/python" - <<'PYTHON' >"$venv/requirements.txt"
import re

text = open("pyproject.toml").read()
print("\n".join(re.findall(r'"([^"]+)"', re.search(r"^docs = \[(.*)\]$", text, re.M).group(1))))
PYTHON
  PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip install -qq -r "$venv/requirements.txt"
  echo "$wanted" >"$stamp"
fi
if [ "${1:-build}" = serve ]; then
  exec "$venv/bin/python" -m zensical serve
fi
exec "$venv/bin/python" -m zensical build --strict
