#!/usr/bin/env bash
# Gather the wheels that scripts/gpu_checks.sh installs where there is no network: DeepSpeed, megatron-core, and what they and
# this package need, without torch. Prints their sizes; fails above 60 MiB.
#
#   scripts/gpu_wheels.sh [FOLDER]        (default: build/gpu_wheels)
#
#   UNICKPT_PYTHON  a Python with pip, of any version (default: python3)
#   UNICKPT_TARGET  version of the Python that the wheels are for (default: 3.12)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-build/gpu_wheels}
python=${UNICKPT_PYTHON:-python3}
target=${UNICKPT_TARGET:-3.12}
limit=$((60 << 20))
mkdir -p "$folder"
rm -f "$folder"/*.whl
export PIP_DISABLE_PIP_VERSION_CHECK=1
download() {
  "$python" -m pip download --quiet --dest "$folder" --only-binary=:all: --implementation cp --python-version "$target" \
    --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux_2_27_x86_64 \
    --platform manylinux_2_28_x86_64 "$@"
}
# None of these needs torch.
download safetensors xxhash wrapt "numpy<2.4" packaging rich einops hjson msgpack ninja psutil py-cpuinfo pydantic tqdm
download --no-deps megatron-core==0.16.1 # of what it needs, torch alone is not above
# DeepSpeed has no wheel. It is built without operators, which torch would compile when they are used; no check uses them.
DS_BUILD_OPS=0 "$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" deepspeed==0.19.8
"$python" - "$folder" "$target" <<'PYTHON'
"""Every requirement of every wheel is there, torch excepted."""
import email
import sys
import zipfile
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename

folder, target = Path(sys.argv[1]), sys.argv[2]
wheels = {parse_wheel_filename(path.name)[0]: path for path in folder.glob("*.whl")}
missing = []
for path in wheels.values():
    with zipfile.ZipFile(path) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        wanted = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []
    for requirement in map(Requirement, wanted):
        here = {"python_version": target, "sys_platform": "linux", "platform_system": "Linux", "extra": ""}
        if requirement.marker is None or requirement.marker.evaluate(here):
            if canonicalize_name(requirement.name) not in {*wheels, "torch"}:
                missing.append(f"{requirement} of {path.name}")
if missing:
    sys.exit(f"missing: {', '.join(missing)}")
PYTHON
du -b "$folder"/*.whl | sort -rn | awk '{ sub(".*/", "", $2); printf "%10d  %s\n", $1, $2 }'
total=$(cat "$folder"/*.whl | wc -c)
echo "$(ls "$folder"/*.whl | wc -l) wheels, $total bytes, $((total >> 20)) MiB of $((limit >> 20))"
[ "$total" -lt "$limit" ]
