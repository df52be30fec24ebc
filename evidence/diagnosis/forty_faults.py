"""Forty faults in running jobs: what is said of each, and whether it is right. ``docs/evidence/forty-faults.md``.

    python -m evidence.diagnosis.forty_faults --keep results/forty-faults.jsonl [--only NAME ...]
        [--page docs/evidence/forty-faults.md] [--logs FOLDER]

Thirty faults of public reports (``reported_faults.py``, ``launch_faults.py``, and a slow link), and ten of hardware by
recordings (``hardware_faults.py``). Needs root for the slow link.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from evidence.diagnosis import hardware_faults, reported_faults, timing_links
from evidence.diagnosis.fault_rows import Row, table
from evidence.diagnosis.launch_faults import LAUNCHES
from evidence.document import put, section
from unickpt.diagnosis.reports.verdict_line import parse_line

HARDWARE = (
    "Xid 79: GPU off the bus", "Xid 48: double-bit error", "NVML: uncorrectable errors", "NVML: a GPU less",
    "machine check, uncorrected", "OOM killer, memory of the host", "hot GPU", "a disk fails", "a file server is silent",
    "the processor limit of the container",
)  # fmt: skip
LINK = "slow link"
LINK_LIMIT_S = 90.0


def slow_link() -> Row:
    """The network card of one host sends 20 Mbit/s."""
    fault = timing_links.FAULTS["a to b, 20 Mbit/s"]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place, timing_links.network():
        timing_links.TwoHosts.relay = None
        job = timing_links.TwoHosts("deepspeed", "zero1", 4, Path(place))
        try:
            job.until_step(60)
            before, begin = len(job.said()), time.monotonic()
            with timing_links.doing(fault, None):
                while time.monotonic() - begin < LINK_LIMIT_S and len(job.said()) == before:
                    time.sleep(0.2)
                seconds, said = time.monotonic() - begin, job.said()[before:]
        finally:
            job.close()
    if not said:
        return Row(LINK, False, False, False, None, False, "", "", "", 0.0)
    one, line = said[0], parse_line(said[0]["line"])
    return Row(
        LINK, all(timing_links.crosses(each, fault) for each in said), one["syndrome"] == fault.syndrome,
        line.host == "host-a,host-b", None,
        "look at the links between host-a and host-b" in one["next_text"] and "unickpt whatif" in one["next_text"],
        f"{one['line']} | {one['sentence']}", one["next_text"], "", seconds,
    )  # fmt: skip


def jobs(logs: Path | None) -> dict[str, Callable[[], Row]]:
    """Return the forty jobs. The folder gets the logs of some."""

    def reported(fault: reported_faults.Reported) -> Callable[[], Row]:
        def run() -> Row:
            return reported_faults.ran(
                fault, (lambda text: (logs / f"{fault.program}.log").write_text(text) and None) if logs else lambda _: None
            )

        return run

    found: dict[str, Callable[[], Row]] = {fault.name: reported(fault) for fault in reported_faults.REPORTED}
    found |= {LINK: slow_link, **LAUNCHES}
    cases = {case.name: case for case in hardware_faults.FAULTS}
    return found | {name: lambda name=name: hardware_faults.ran(cases[name]) for name in HARDWARE}  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="file of results; faults that are in it are not repeated")
    parser.add_argument("--only", nargs="*", help="parts of names of faults")
    parser.add_argument("--page", type=Path, help="write the table into this page")
    parser.add_argument("--logs", type=Path, help="folder for logs of jobs")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.keep.read_text().splitlines()] if args.keep.exists() else []
    done = {row["case"] for row in rows}
    forty = jobs(args.logs)
    for name, run in forty.items():
        if name in done or (args.only and not any(part in name for part in args.only)):
            continue
        begin = time.monotonic()
        row = asdict(replace(run(), case=name))
        print(json.dumps(row, indent=1), f"job: {time.monotonic() - begin:.0f} s", flush=True)
        rows.append(row)
        with args.keep.open("a") as file:
            file.write(json.dumps(row) + "\n")
    rows.sort(key=lambda row: list(forty).index(row["case"]))
    if args.page:
        command = f"python -m evidence.diagnosis.forty_faults --keep {args.keep}"
        put(args.page, "forty faults", section("forty faults", command, table(rows)))
    print(table(rows))


if __name__ == "__main__":
    main()
