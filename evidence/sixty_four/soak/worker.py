"""Under torchrun: a rank of the job of the soak, and the faults that it makes. Arguments: folder, checkpoints, steps, seconds.

``FOLDER/events.jsonl`` gets a line when a rank has started, has resumed, has compared its state with the uninterrupted run,
makes a fault or has ended. Rank 0 writes each step into ``FOLDER/steps/ROUND.jsonl``: step, loss, words, state, time.
``FOLDER/fault`` is as in ``evidence.steering.observed``, ``FOLDER/stop`` ends the job.
"""

import os
import time


def now_s() -> float:
    """Return the time of the harness in seconds since 1970, whatever the clock of this host says."""
    return time.monotonic() + float(os.environ["UNICKPT_SOAK_TIME"])


STARTED_S = now_s()

import json  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import torch_unickpt  # noqa: E402
import unickpt  # noqa: E402
from evidence.steering.observed import Observed  # noqa: E402
from tests.jobs.steering import soak_arithmetic as exact  # noqa: E402
from unickpt.checkpoint.save.retention import Retention  # noqa: E402
from unickpt.testing.launch import leave  # noqa: E402

SAVE_STEPS, TO_DISK_EVERY = 10, 4
ERA = "UNICKPT_SOAK_ERA"  # in the environment: how many times all hosts have lost their power, after which rounds begin anew


class Rank(Observed):
    """One worker, whose round has the number of its era."""

    @property
    def named(self) -> str:
        """The name of the round, of which no other one of this job has the same."""
        term, _, number = self.round.partition(".")
        return f"{int(term) + 1000 * int(os.environ.get(ERA, '0'))}.{number}"

    def say(self, what: str, **more: Any) -> None:
        """See base class."""
        super().say(what, **{"at": now_s(), "round": self.named, **more})


def main() -> None:
    folder, checkpoints, steps, pause_s = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    job = Rank(folder, STARTED_S)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = exact.Model()
    fully_shard(model, reshard_after_forward=False)
    model.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    optimizer = exact.optimizer_of(model)
    schedule = exact.schedule_of(optimizer)
    memory = torch_unickpt.MemoryOptions(to_disk_every=TO_DISK_EVERY)
    options = unickpt.SaveOptions(retention=Retention(keep_last=3))
    job.die_soon(0, "kill in load")
    start = torch_unickpt.resume_or_start(model, optimizer, checkpoints, scheduler=schedule, memory=memory)
    state = exact.state_digest(model, optimizer) if start.resumed else ""
    job.say("resumed", step=start.step, samples=start.samples, path=start.path, state=state)
    source = exact.samples(job.rank, job.world, start.samples)
    written = (folder / "steps" / f"{job.named}.jsonl").open("a") if job.rank == 0 else None
    step, stopping = start.step, False
    while step < steps and not stopping:
        job.at_step(step)
        _child(job, step)
        begin = time.monotonic()
        seen = _trained(job, model, source, step)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step, stopping = step + 1, bool(seen[2])
        checked = exact.state_digest(model, optimizer) if step % exact.CHECK == 0 or stopping or step == steps else ""
        if written is not None:
            written.write(json.dumps([step, int(seen[0]), int(seen[1]), checked, now_s()]) + "\n")
            written.flush()
            (folder / "saved.part").write_text(str(step))
            (folder / "saved.part").rename(folder / "saved")
        if step % SAVE_STEPS == 0:
            job.die_soon(step, "kill in save")
            _saved(job, model, optimizer, checkpoints, step, scheduler=schedule, options=options, memory=memory)
        time.sleep(max(0.0, pause_s - (time.monotonic() - begin)))
    job.say("ended", step=step)
    dist.barrier()
    leave()


def _trained(job: Observed, model: Any, source: Any, step: int) -> torch.Tensor:
    """Do forward and backward passes. Return sum of losses, sum of words, and whether to stop, over all ranks."""
    losses = words = 0
    count = exact.BATCH // job.world
    for number in range(count):
        index, values = next(source)
        model.set_requires_gradient_sync(number == count - 1)
        model.set_reshard_after_backward(number == count - 1)
        loss = model(values)
        loss.backward()
        losses, words = losses + exact.on_grid(float(loss.detach())), words + exact.word(index)
    seen = torch.tensor([losses, words, int(job.stopping)])
    if job.wanted(step, "skip") is None:  # a collective that one rank leaves out
        dist.all_reduce(seen)
    return seen


def _saved(job: Observed, model: Any, optimizer: Any, checkpoints: Path, step: int, **more: Any) -> None:
    try:
        unickpt.save_training(model, optimizer, checkpoints / f"step{step}", step=step, samples=step * exact.BATCH, **more)
    except unickpt.SaveFailedError as err:  # training goes on
        job.say("not saved", step=step, why=str(err)[:1000])


def _child(job: Observed, step: int) -> None:
    """Start a process that lives on if this one is killed, as a loader or an upload does."""
    if job.wanted(step, "child") is not None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100000)"])  # same process group
        job.say("child", pid=child.pid)


if __name__ == "__main__":
    main()
