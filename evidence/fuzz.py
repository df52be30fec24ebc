"""Random hostile input: files of unickpt, and with ``--pickles`` files of other frameworks.

    python -m evidence.fuzz --count 600000 --out docs/evidence/fuzz.md
    python -m evidence.fuzz --pickles --count 200000 --out docs/evidence/fuzz.md

Inputs are made from a sound checkpoint by the generators in ``tests/hostile/mutation.py``, or by the grammar in
``tests/hostile/pickle_grammar.py``, and used as loading or converting does. Allowed is success or an ``UnickptError``, within a
fixed amount of memory (``RLIMIT_AS``) and a second of processor time; of pickles nothing outside their folder may be opened (an
audit hook watches). Exit status 1 otherwise; what broke it can be made again with ``--again TARGET:SEED``.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from evidence.document import put, section
from tests.hostile.mutation import ALLOWANCE_BYTES, Attacker, Target, kind_of, limited_memory
from tests.hostile.pickle_grammar import PickleAttacker, Watch
from tests.support import handmade
from unickpt.base.errors import UnickptError

LIMIT_S = 1.0  # of processor time for one input
SHARES = {"a checkpoint's directory": 0.01, "pickle, by grammar": 0.6}  # of all inputs. The rest is shared by the others
PICKLES_BYTES = 1 << 30  # of resident memory, with what torch and its libraries take

PICKLES_NOTE = """
The inputs come from the grammar in `tests/hostile/pickle_grammar.py`: streams with permitted and other names, states and
calls on every kind of value, tricks with the memo, shared and nested containers, persistent ids. Others are valid files of
DeepSpeed, Megatron and DCP with changed bytes. Each input goes through every step that a conversion makes before it writes.
The process stays below 1 GiB. An audit hook watches what is opened or executed: anything outside of the source folder counts
as broken.
"""


@dataclass
class Found:
    """What came of one target's inputs."""

    count: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    total_s: float = 0.0
    broken: list[str] = field(default_factory=list)


def too_long(*_: object) -> None:
    raise TimeoutError(f"more than {10 * LIMIT_S:.0f} s of processor time")


def throw(name: str, target: Target, count: int, seed: int, watched: Callable[[], AbstractContextManager[None]]) -> Found:
    """So many inputs at one target, input n from the seed ``<seed>/n``; ``watched`` is entered around the use of each."""
    found = Found()
    signal.signal(signal.SIGVTALRM, too_long)
    for number in range(count):
        made = target.make(random.Random(f"{seed}/{number}"))
        begin = time.process_time()
        signal.setitimer(signal.ITIMER_VIRTUAL, 10 * LIMIT_S)
        try:
            with watched():
                target.use(made)
            outcome = "accepted"
        except UnickptError as err:
            outcome = type(err).__name__
            found.kinds[kind_of(err)] += 1
        except BaseException as err:
            outcome = f"BROKEN: {type(err).__name__}"
            trace = "".join(traceback.format_exception(err)[-3:])
            if isinstance(err, KeyboardInterrupt):
                raise
            found.broken.append(f"--again '{name}:{seed}/{number}'\n{trace[-1500:]}")
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        spent = time.process_time() - begin
        if spent > LIMIT_S:
            found.broken.append(f"--again '{name}:{seed}/{number}': {spent:.1f} s")
        found.count += 1
        found.outcomes[outcome] += 1
        found.slowest_s = max(found.slowest_s, spent)
        found.total_s += spent
    return found


def table(results: dict[str, Found], peak_bytes: int, allowance_bytes: int) -> str:
    rows = [
        "| target | inputs | outcome | distinct errors | slowest | broken |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        outcomes = ", ".join(f"{count:,} {kind}" for kind, count in found.outcomes.most_common())
        slowest = f"{1000 * found.slowest_s:.0f} ms"
        kinds = len(found.kinds)
        rows.append(f"| {name} | {found.count:,} | {outcomes} | {kinds} | {slowest} | {len(found.broken)} |")
    total = sum(found.count for found in results.values())
    rows += [
        "",
        f"{total:,} inputs. The address space was limited to {allowance_bytes >> 20} MiB more than at the start of the "
        f"process. The largest resident size was {peak_bytes >> 20} MiB, most of it torch and its libraries.",
        "",
    ]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=600_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pickles", action="store_true", help="files of other frameworks instead of checkpoints of unickpt")
    parser.add_argument("--only", help="one target")
    parser.add_argument("--again", metavar="TARGET:SEED", help="one input, with its traceback")
    parser.add_argument("--out", type=Path, help="the document whose table is replaced")
    parser.add_argument("--kinds", action="store_true", help="print every kind of refusal that was met")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="unickpt-fuzz-") as folder:
        work = Path(folder) / "work"
        watched: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        if options.pickles:
            targets = PickleAttacker(work).targets
            watch = Watch()
            watched = lambda: watch.below(work)  # noqa: E731
        else:
            targets = Attacker(handmade.save_ranks(Path(folder) / "sound", world=2), work).targets
        if options.again:
            name, _, seed = options.again.partition(":")
            targets[name].use(targets[name].make(random.Random(seed)))
            return 0
        for target in targets.values():  # what is imported and allocated once does not count
            with contextlib.suppress(UnickptError):
                target.use(target.make(random.Random(0)))
        results: dict[str, Found] = {}
        names = [options.only] if options.only else list(targets)
        left = 1 - sum(SHARES.get(name, 0) for name in names)
        allowance = ALLOWANCE_BYTES
        if options.pickles:  # all of the process's resident memory stays below the limit
            allowance = PICKLES_BYTES - (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
        with limited_memory(allowance):
            for name in names:
                share = SHARES.get(name, left / max(sum(n not in SHARES for n in names), 1)) if len(names) > 1 else 1.0
                begin = time.monotonic()
                results[name] = throw(name, targets[name], round(options.count * share), options.seed, watched)
                found = results[name]
                rate = found.count / (time.monotonic() - begin)
                print(f"{name}: {found.count:,} inputs, {rate:,.0f} a second, {dict(found.outcomes)}", flush=True)
                for line in found.broken[:5]:
                    print(line, flush=True)
                if options.kinds:
                    print("\n".join(f"    {count} {kind}" for kind, count in found.kinds.most_common()), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    body = table(results, peak, allowance) + (PICKLES_NOTE if options.pickles else "")
    print(body)
    if options.out is not None:
        kind, flag = ("fuzz-pickles", "--pickles ") if options.pickles else ("fuzz", "")
        command = f"python -m evidence.fuzz {flag}--count {options.count} --seed {options.seed} --out {options.out}"
        put(options.out, kind, section(kind, command, body))
    return int(any(found.broken for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
