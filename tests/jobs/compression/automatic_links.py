"""A job that chooses its own compression, on links of several speeds. Needs root (network namespaces) and ``tc``.

python -m tests.jobs.compression.automatic_links --keep FILE
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from evidence.compression.shaped_links import MEGABITS, shape
from tests.jobs.steering.namespaces import LINK, Network, missing
from tests.support.repository import REPO

WIDTH, LIMIT_S, PORT, WORLD = 1024, 300.0, 29_512, 2


def run(folder: Path, task: dict[str, Any], commands: list[list[str]], environment: dict[str, str]) -> list[dict[str, Any]]:
    """Run the job and return what each rank saw. ``commands``: what comes before the command of each rank."""
    given = folder / "task.json"
    given.write_text(json.dumps({**task, "folder": str(folder)}))
    started = []
    for rank, before in enumerate(commands):
        env = {
            **os.environ, **environment, "RANK": str(rank), "WORLD_SIZE": str(len(commands)), "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        command = [*before, sys.executable, "-m", "tests.jobs.compression.automatic_job", str(given)]
        started.append(subprocess.Popen(command, cwd=REPO, env=env))
    try:
        codes = [process.wait(LIMIT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(codes), codes
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(len(commands))]


def row(found: dict[str, Any]) -> str:
    """Return the row of a speed."""
    resumed = "the same choice, losses equal" if found["resumed"] and found["equal"] else "NOT equal"
    times = f"{found['before_s'] * 1e3:.0f} | {found['after_s'] * 1e3:.0f}"
    return f"| {found['megabits']:.0f} | {found['choice'].removeprefix('compression: ')} | {times} | {resumed} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=Path, required=True, help="file to which the results are appended")
    args = parser.parse_args()
    if why := missing():
        parser.error(why)
    hosts = ("a", "b")
    network = Network(hosts)
    try:
        for megabits in MEGABITS:
            for host in hosts:
                shape(network.namespace(host), megabits)
            address = {"MASTER_ADDR": network.address("a"), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": LINK}
            with tempfile.TemporaryDirectory() as folder:
                ranks = run(Path(folder), {"width": WIDTH}, [network.command(host) for host in hosts], address)
            assert len({each["scheme"] for each in ranks}) == 1, ranks
            found = {**ranks[0], "megabits": megabits}
            print(row(found), flush=True)
            with args.keep.open("a") as file:
                file.write(json.dumps(found) + "\n")
    finally:
        network.close()


if __name__ == "__main__":
    main()
