"""The advisor against all choices that it can make, run on links of three speeds. Needs root (network namespaces) and ``tc``.

python -m evidence.compression.shaped_links --keep FILE
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.jobs.steering.namespaces import LINK, Network, missing
from tests.support.repository import REPO
from unickpt.planning.replay.sources import read_trace
from unickpt.training.compression.advisor import Candidate, advise

MEGABITS = (40.0, 200.0, 1000.0)
WIDTH, LAYERS, LAYER_S = 512, 3, 0.03
LIMIT_S, PORT = 400.0, 29_511


def shape(namespace: str, megabits: float) -> None:
    """Limit what a host sends. The burst is that of 2 ms, so that the kernel's clock does not limit the rate."""
    burst = f"{max(16, round(megabits / 4))}kb"
    subprocess.run(
        ["tc", "-n", namespace, "qdisc", "replace", "dev", LINK, "root", "tbf", "rate", f"{megabits:.0f}mbit", "burst", burst,
         "latency", "2s"], check=True,
    )  # fmt: skip


def run(network: Network, hosts: tuple[str, str], megabits: float, folder: Path) -> dict[str, Any]:
    """Run the job on a link of one speed, and ask the advisor."""
    rings, out, given = folder / "rings", folder / "out.json", folder / "task.json"
    task = {"width": WIDTH, "layers": LAYERS, "layer_s": LAYER_S, "rings": str(rings), "out": str(out)}
    given.write_text(json.dumps(task))
    for host in hosts:
        shape(network.namespace(host), megabits)
    started = []
    for rank, host in enumerate(hosts):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": network.address(hosts[0]),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": LINK,
            "OMP_NUM_THREADS": "1",
        }
        command = [*network.command(host), sys.executable, "-m", "evidence.compression.shaped_job", str(given)]
        started.append(subprocess.Popen(command, cwd=REPO, env=env))
    try:
        codes = [process.wait(LIMIT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0], codes
    found = json.loads(out.read_text())
    candidates = {name: Candidate(*values) for name, values in found["candidates"].items()}
    trace = read_trace([str(rings)])
    begin = time.perf_counter()
    advice = advise(trace, candidates)
    took_s = time.perf_counter() - begin
    chosen = ",".join(bucket.scheme for bucket in advice.buckets)
    return {
        "megabits": megabits,
        "took_s": took_s,
        "chosen": chosen,
        "step_s": advice.step_s,
        "advised_s": advice.advised_s,
        "exposed_s": [bucket.exposed_s for bucket in advice.buckets],
        **found,
    }


def measured() -> Iterator[dict[str, Any]]:
    """Yield one result for each speed."""
    hosts = ("a", "b")
    network = Network(hosts)
    try:
        for megabits in MEGABITS:
            with tempfile.TemporaryDirectory() as folder:
                yield run(network, hosts, megabits, Path(folder))
    finally:
        network.close()


def row(found: dict[str, Any]) -> str:
    """Return the row of a speed."""
    steps: dict[str, float] = found["steps_s"]
    best = min(steps, key=lambda name: steps[name])
    nothing, chosen = steps[",".join(["none"] * LAYERS)], steps[found["chosen"]]
    cells = (
        f"{found['megabits']:.0f}",
        f"{nothing * 1e3:.0f}",
        found["chosen"].replace(",", ", "),
        f"{found['advised_s'] * 1e3:.0f}",
        f"{chosen * 1e3:.0f}",
        best.replace(",", ", "),
        f"{steps[best] * 1e3:.0f}",
        f"{chosen / steps[best] - 1:+.1%}",
        f"{max(steps.values()) * 1e3:.0f}",
        f"{found['took_s'] * 1e3:.0f} ms",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=Path, required=True, help="file to which the results are appended")
    args = parser.parse_args()
    if why := missing():
        parser.error(why)
    with args.keep.open("a") as file:
        for found in measured():
            print(row(found), flush=True)
            file.write(json.dumps(found) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
