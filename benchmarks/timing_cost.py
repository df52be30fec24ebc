"""Cost of recording every collective: microseconds per call, and the change of a training step.

    python -m benchmarks.timing_cost [--rounds 7] [--out docs/evidence/timing-cost.md]

The same run measures DeepSpeed's comms_logger and torch's flight recorder. Calls are all_reduces of 8 floats in a gloo group
of one rank, without waiting for other ranks. Results are the time until they return, and the processor time of the calling
thread, which does not depend on gloo's threads. Steps are those of the demonstration model under ZeRO-2 on 2 ranks. In every
round each recorder is on for a while and off for a while (for one step), and the cost is the difference.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import agent_cost
from benchmarks.measure import machine
from unickpt.testing.launch import command, environment, leave

REPO = Path(__file__).resolve().parent.parent

CALLS, TURNS, STEPS = 3000, 30, 12
EMPTY_CALLS = 20_000
CALLS_OF_A_STEP = "recorded calls of a step"
FLIGHTS = {"TORCH_FR_BUFFER_SIZE": "2000"}  # enables the flight recorder; 2,000 is its default with NCCL


def recorder(folder: Path) -> Any:
    """Return a recorder that writes into a ring, as in a job."""
    import torch.distributed as dist

    from unickpt.diagnosis.recording.recorder import CallRecorder
    from unickpt.diagnosis.recording.ring import Identity, RingWriter

    who = Identity.here(dist.get_rank(), dist.get_world_size(), "cost")
    ring = RingWriter(folder / f"{who.rank:05d}.ring", who, capacity=65_536)
    return CallRecorder(
        ring, lambda group: {"ranks": dist.get_process_group_ranks(group), "label": "", "backend": group.name()}
    )


def switches(folder: Path) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """A recorder that can be enabled and disabled in a running process."""
    import deepspeed.comm as comm
    from deepspeed.utils.comms_logging import CommsLogger

    from unickpt.diagnosis.recording.process_group_hooks import ProcessGroupHooks

    found = recorder(folder)
    comm.comm.comms_logger = CommsLogger()

    def logger(on: bool) -> None:
        comm.comm.comms_logger.enabled = comm.comm.comms_logger.prof_all = on
        comm.comm.comms_logger.comms_dict.clear()

    installed: list[ProcessGroupHooks] = []

    def install() -> None:
        installed.append(ProcessGroupHooks(found))
        installed[-1].install()

    return {
        "unickpt": (install, lambda: installed.pop().uninstall()),
        "comms_logger": (lambda: logger(True), lambda: logger(False)),
    }


def calls(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the microseconds per call in every round."""
    import deepspeed
    import deepspeed.comm as comm
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    data = torch.zeros(8)
    actions = {
        "all_reduce": lambda: dist.all_reduce(data),
        "all_reduce, async": lambda: dist.all_reduce(data, async_op=True).wait(),
        "deepspeed.comm": lambda: comm.all_reduce(data),
    }
    found: dict[str, list[float]] = {}
    on = switches(folder)
    for number in range(rounds + 1):
        for name, action in actions.items():
            times: dict[str, list[float]] = {}
            for _ in range(TURNS):  # short intervals: the waiting time for gloo's thread drifts
                for what in ("off", *on):
                    if what == "comms_logger" and name != "deepspeed.comm":
                        continue
                    if what != "off":
                        on[what][0]()
                    passed, busy = timed(action)
                    times.setdefault(what, []).append(passed)
                    times.setdefault(f"{what}, processor", []).append(busy)
                    if what != "off":
                        on[what][1]()
            if number:  # the first round is a warm-up
                for what, values in times.items():
                    found.setdefault(f"{name}: {what}", []).append(statistics.median(values) / 1e3)
    return found


def empty_calls(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of processor time of a call that does nothing, in every round."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from unickpt.diagnosis.recording.process_group_hooks import ProcessGroupHooks

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    found = recorder(folder)
    data = torch.zeros(8)
    times: dict[str, list[float]] = {"off": [], "unickpt": []}
    for number in range(rounds + 1):
        for what, values in times.items():
            hooks = ProcessGroupHooks(found)
            if what != "off":
                hooks.install()
            begin = time.thread_time_ns()
            for _ in range(EMPTY_CALLS):
                dist.all_reduce(data)
            if number:
                values.append((time.thread_time_ns() - begin) / EMPTY_CALLS / 1e3)
            if what != "off":
                hooks.uninstall()
    return times


def clock_ns() -> float:
    """Return the nanoseconds that Python takes to read the clock, without those of a loop."""
    numbers = range(200_000)
    begin = time.perf_counter_ns()
    for _ in numbers:
        pass
    loop = time.perf_counter_ns() - begin
    begin = time.perf_counter_ns()
    for _ in numbers:
        time.perf_counter_ns()
    return (time.perf_counter_ns() - begin - loop) / len(numbers)


def timed(action: Callable[[], Any]) -> tuple[float, float]:
    """Return the median nanoseconds of a call, and the mean processor time of this thread per call."""
    found = []
    for _ in range(5):
        action()
    busy = time.thread_time_ns()
    for _ in range(CALLS // TURNS):
        begin = time.perf_counter_ns()
        action()
        found.append(time.perf_counter_ns() - begin)
    return statistics.median(found), (time.thread_time_ns() - busy) / (CALLS // TURNS)


def steps(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of a step in every round, on this rank."""
    import deepspeed
    import torch
    import torch.distributed as dist

    from examples.demo.data import batch, corpus
    from examples.demo.model import CONTEXT, ByteTransformer
    from unickpt.diagnosis.agent import launch
    from unickpt.diagnosis.recording.ring import RingReader

    torch.manual_seed(1)
    model = ByteTransformer()
    config = json.loads((REPO / "examples" / "demo" / "ds_config.json").read_text()) | {"unickpt": {"enabled": False}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    text = corpus()
    on = switches(folder)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    agent = launch.start(folder, 0, store) if rank == 0 else None

    def watch(active: bool) -> None:
        if agent is not None:
            agent.send_signal(signal.SIGCONT if active else signal.SIGSTOP)

    hooks_on, hooks_off = on["unickpt"]

    def begin_both() -> None:
        hooks_on()
        watch(True)

    def end_both() -> None:
        watch(False)
        hooks_off()

    on["unickpt with its agent"] = begin_both, end_both
    watch(False)
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        times: dict[str, list[float]] = {}
        for at in range(STEPS):
            for what in ("off", *on):  # one step each: the machine's speed drifts within seconds
                dist.barrier()
                if what != "off":
                    on[what][0]()
                begin = time.perf_counter_ns()
                inputs, targets = batch(text, at, engine.train_batch_size(), CONTEXT, rank=rank, ranks=ranks)
                engine.backward(engine(inputs, targets))
                engine.step()
                times.setdefault(what, []).append((time.perf_counter_ns() - begin) / 1e6)
                if what != "off":
                    on[what][1]()
        if number:
            for what, values in times.items():
                found.setdefault(what, []).append(statistics.median(values))
    recorded = int(RingReader(folder / f"{rank:05d}.ring").read(last=1).records["begun"].max())
    found[CALLS_OF_A_STEP] = [recorded / ((rounds + 1) * STEPS * 2)]  # of the two recordings: with and without an agent
    if agent is not None:
        agent.kill()
    return found


def worker(what: str, rounds: int, out: Path) -> None:
    import torch.distributed as dist

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        shared = Path(os.environ["COST_FOLDER"]) if what == "steps" else Path(folder)
        found = {"steps": steps, "calls": calls, "empty": empty_calls}[what](shared, rounds)
        if dist.get_rank() == 0:
            out.write_text(json.dumps(found))
        dist.barrier()
    leave()


def run(what: str, ranks: int, rounds: int, **variables: str) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        out = Path(folder) / "found.json"
        program = ["-m", "benchmarks.timing_cost", "--worker", what, "--rounds", str(rounds), "--out", str(out)]
        env = environment(REPO, GLOO_SOCKET_IFNAME="lo", COST_FOLDER=folder, **variables)
        subprocess.run(command(ranks, *program), check=True, cwd=REPO, env=env, stdout=subprocess.DEVNULL)
        found: dict[str, list[float]] = json.loads(out.read_text())
        return found


def spread(values: list[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def page(
    plain: dict[str, list[float]], flights: dict[str, list[float]], made: dict[str, list[float]], empty: dict[str, list[float]]
) -> str:
    """The tables."""
    own = [a - b for a, b in zip(empty["unickpt"], empty["off"], strict=True)]
    lines = [
        f"Of a call that does nothing (torch's backend `fake`: {spread(empty['off'])} µs), unickpt adds {spread(own, 2)} µs of "
        f"processor time. Python reads the clock of this machine in {clock_ns():.0f} ns.",
        "",
        "| call of 8 floats, µs | without recorder | unickpt adds | comms_logger adds | flight recorder adds |",
        "|---|---|---|---|---|",
    ]
    for name in ("all_reduce", "all_reduce, async", "deepspeed.comm"):
        for suffix, label in (("", ""), (", processor", ": processor time")):
            off = plain[f"{name}: off{suffix}"]
            cells = [spread(off)]
            for other in ("unickpt", "comms_logger"):
                values = plain.get(f"{name}: {other}{suffix}")
                cells.append(spread([a - b for a, b in zip(values, off, strict=True)]) if values else "")
            cells.append(f"{statistics.median(flights[f'{name}: off{suffix}']) - statistics.median(off):.1f}")
            lines.append(f"| {name}{label} | {' | '.join(cells)} |")
    lines += ["", "| step of the demonstration, 2 ranks | ms | relative to a step without |", "|---|---|---|"]
    [recorded] = made.pop(CALLS_OF_A_STEP)
    for name, values in made.items():
        ratios = [a / b for a, b in zip(values, made["off"], strict=True)]
        lines.append(f"| {name} | {spread(values)} | {spread(ratios, 3)} |")
    names = ("all_reduce", "all_reduce, async", "deepspeed.comm")
    busy = [
        [a - b for a, b in zip(plain[f"{n}: unickpt, processor"], plain[f"{n}: off, processor"], strict=True)] for n in names
    ]
    most = max(statistics.median(values) for values in busy)
    share = recorded * most / 1e3 / statistics.median(made["off"])
    lines += [
        "",
        f"A step has {recorded:.0f} recorded calls. At {most:.1f} µs of processor time each, the most of these rows, "
        f"they are {share:.4%} of a step.",
    ]
    return "\n".join(lines)


HEAD = """# Cost of recording every collective

What does the record of every collective cost?

1 to 3 µs of processor time for a call, below 1 µs of which are the recorder's own work. A step is not slower by more than the
spread.

The rest is time to get at code and memory again after gloo's threads have run. Calls that do nothing, one after the other, do
not have it.

Each cell has median and range over rounds in which each recorder is switched on and off. torch's flight recorder cannot be
switched off and is measured in a separate run. Processor time is that of the calling thread; the rest of a call waits for
gloo's threads. The rows of `deepspeed.comm` use DeepSpeed's own functions.
"""


AGENT = """## The agent of a host

One agent watches all ranks of a host. Here each rank is a process that records 60 calls in steps of 0.5 s
(`python -m benchmarks.agent_cost`).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", choices=("calls", "steps", "empty"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.rounds, args.out)
        return
    agent = agent_cost.table(agent_cost.RANKS, agent_cost.SECONDS, 3)
    plain, flights = (run("calls", 1, args.rounds, **variables) for variables in ({}, FLIGHTS))
    text = page(plain, flights, run("steps", 2, args.rounds), run("empty", 1, args.rounds))
    text = f"{HEAD}\n`python -m benchmarks.timing_cost --rounds {args.rounds}`: {machine()}\n\n{text}\n\n{AGENT}\n{agent}\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
