"""A job that chooses its own compression, on links of several speeds. Needs root (network namespaces) and ``tc``.

python -m evidence.compression.automatic_links --keep FILE
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from evidence.compression.shaped_links import MEGABITS, shape
from tests.jobs.compression.automatic import run
from tests.jobs.steering.namespaces import LINK, Network, missing

WIDTH, PORT = 1024, 29_512


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
