"""A host that computes or holds wrong numbers is taken out, and the job goes on from a state before its first wrong step.

    python -m evidence.steering.sick_hosts --keep FILE [--framework torch,deepspeed,megatron] [--count 2] [--seed 1]
        [--minutes 60] [--page FILE]

Three hosts and a spare on this machine train a tiny model under the witness. A random host is sick from a random step on
(persistent), or in one step (transient): its forward passes flip a bit, which ``buddy`` sees, or a bit of a weight flips after
the step, which ``buddy`` may see before copies are compared. Each run is compared with a sound job that starts again after the
same step, bit for bit.
``--count``: wanted runs of each framework, kind and duration in FILE. ``--page`` writes the table of all runs of the file into
the page.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evidence.document import put, section
from tests.jobs.steering.sick_hosts import HOSTS, Outcome, Sickness, Weights, equal, sound, with_sick_host
from tests.jobs.steering.witness_worker import EVERY, STEPS

KINDS = {"torch": ("activation", "weight"), "deepspeed": ("activation", "weight"), "megatron": ("activation", "weight")}
TITLES = {"torch": "DDP", "deepspeed": "DeepSpeed, ZeRO-1", "megatron": "megatron-core, data parallelism"}
VERDICTS = {"activation": ("SDC_COMPUTE",), "weight": ("SDC_REPLICA", "SDC_AT_REST", "SDC_COMPUTE")}
FIRST, LAST = 4, 9  # in which a host becomes sick
COMMAND = "python -m evidence.steering.sick_hosts --keep results/witness-sick-hosts.jsonl --page docs/evidence/witness.md"


def drawn(framework: str, kind: str, transient: bool, seed: int) -> Sickness:
    """Return how a host is sick. A transient wrong activation is one of a checked step: others are not seen."""
    generator = random.Random(f"{framework} {kind} {transient} {seed}")
    first = generator.randint(FIRST, LAST)
    if transient and kind == "activation":
        first += first % EVERY
    return Sickness(generator.choice(HOSTS), first, first if transient else STEPS, kind)


def wrong_with(sick: Sickness, found: Outcome, expected: Weights) -> list[str]:
    """Return what is not as it should be."""
    problems = []
    if [host for host, _ in found.parked] != [sick.host] or found.parked[0][1] not in VERDICTS[sick.kind]:
        problems.append(f"taken out: {found.parked}")
    if found.starts != (0, sick.resumes_at):
        problems.append(f"went on from {found.starts}, and not from {sick.resumes_at}")
    if [fault.after for fault in found.faults] != [sick.resumes_at]:
        problems.append(f"faults {found.faults}")
    if not equal(found.final, expected):
        problems.append("other weights in the end")
    return problems


def run(framework: str, sick: Sickness, reference: dict[tuple[str, int], Weights]) -> dict[str, Any]:
    """Make one run. ``reference``: weights of sound jobs."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="unickpt-sick-") as name:
        folder = Path(name)
        if (framework, sick.resumes_at) not in reference:
            (folder / "sound").mkdir()
            reference[framework, sick.resumes_at] = sound(folder / "sound", framework, sick.resumes_at)
        (folder / "sick-job").mkdir()
        try:
            found = with_sick_host(folder / "sick-job", framework, sick)
            problems = wrong_with(sick, found, reference[framework, sick.resumes_at])
            text = found.text if problems else ""
        except AssertionError as err:
            problems, text = ["the job did not end as it should"], str(err)
    return {
        "framework": framework, **asdict(sick), "transient": sick.first == sick.last, "resumed": sick.resumes_at,
        "problems": problems, "log": text[-8000:], "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip


def wanted(frameworks: Sequence[str], count: int, done: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, bool, int]]:
    """Yield framework, kind, whether it is transient, and number of the runs that are not done, those of all kinds in turn."""
    cases = [
        (name, kind, transient)
        for transient in (False, True)
        for kind in VERDICTS
        for name in frameworks
        if kind in KINDS[name]
    ]
    made = {case: sum((each["framework"], each["kind"], each["transient"]) == case for each in done) for case in cases}
    for number in range(count):
        for case in cases:
            if number >= made[case]:
                yield (*case, number)


def table(done: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table of all runs."""
    lines = [
        "| job | fault | runs | right | otherwise |",
        "|---|---|---|---|---|",
    ]
    for framework, title in TITLES.items():
        for kind in KINDS[framework]:
            for transient in (False, True):
                own = [e for e in done if (e["framework"], e["kind"], e["transient"]) == (framework, kind, transient)]
                how = {"activation": "activations", "weight": "a weight"}[kind] + (
                    ", in one step" if transient else ", in each step"
                )
                right = sum(not each["problems"] for each in own)
                lines += [f"| {title} | {how} | {len(own)} | {right} | {len(own) - right} |"] if own else []
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--framework", default="torch,deepspeed,megatron")
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    done = [json.loads(line) for line in args.keep.read_text().splitlines()] if args.keep.exists() else []
    reference: dict[tuple[str, int], Weights] = {}
    for framework, kind, transient, number in wanted(args.framework.split(","), args.count, done):
        if time.monotonic() > deadline:
            break
        sick = drawn(framework, kind, transient, 1000 * args.seed + number)
        result = run(framework, sick, reference)
        print(framework, sick, result["problems"] or "as it should be", f"{result['seconds']} s", flush=True)
        done.append(result)
        args.keep.parent.mkdir(parents=True, exist_ok=True)
        with args.keep.open("a") as file:
            file.write(json.dumps(result) + "\n")
    lines = table(done)
    print("\n".join(lines))
    if args.page:
        put(args.page, "sick hosts", section("sick hosts", COMMAND, "\n".join(lines) + "\n"))


if __name__ == "__main__":
    main()
