"""Under torchrun: a job that trains without end, and applies the faults that a file specifies.

faulty_job deepspeed|megatron LAYOUT RINGS CONTROL

``CONTROL/now`` is JSON: ``{"id", "fault", "rank", "amount", "step"}``; it is looked at before every step. The rank that has a
fault writes ``CONTROL/begun-<id>`` (wall clock in ns, step) when it begins. ``{"fault": "end"}`` ends the job in order.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEVICE_S = 0.15  # of every step, as if a device computed: ranks that share cores differ by chance in all else
SOUND: dict[str, Any] = {"id": 0, "fault": "none", "rank": -1, "amount": 0.0}


class Control:
    """The faults in the file, read again after a change. ``last`` is the latest value."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._seen, self.last = folder, 0, SOUND

    def now(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            changed = (self.folder / "now").stat().st_mtime_ns
            if changed != self._seen:
                self.last = json.loads((self.folder / "now").read_text())
                self._seen = changed
        return self.last

    def begun(self, number: int, step: int) -> None:
        path = self.folder / f"begun-{number}"
        if not path.exists():
            path.with_suffix(".new").write_text(f"{time.time_ns()} {step}")
            path.with_suffix(".new").replace(path)


class SampleRows:
    """Samples that may be delayed."""

    def __init__(self, width: int) -> None:
        import torch

        self.delay, self._row = 0.0, torch.ones(width)

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, _at: int) -> Any:
        if self.delay:
            time.sleep(self.delay)
        return self._row


class Late:
    """Delays this rank before calls of process groups, outside of the timed part."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.by_s = 0.0
        for name in ("allreduce", "_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single",
                     "allgather", "reduce_scatter", "broadcast", "send", "recv"):  # fmt: skip
            if hasattr(dist.ProcessGroup, name):
                setattr(dist.ProcessGroup, name, self._delayed(getattr(dist.ProcessGroup, name)))

    def _delayed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(group: Any, *args: Any, **named: Any) -> Any:
            if self.by_s:
                time.sleep(self.by_s)
            return original(group, *args, **named)

        return method


def deepspeed_step(layout: str, rings: str) -> Callable[[Any], None]:
    """Return a step of a ZeRO job on given samples."""
    import deepspeed
    import torch

    torch.manual_seed(1)
    width = 256
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(6)))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 64,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": int(layout.removeprefix("zero")), "stage3_param_persistence_threshold": 0},
        "unickpt": {"timing": {"enabled": True, "folder": rings}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(samples: Any) -> None:
        for _ in range(4):  # of forward computation that needs no other rank
            with torch.no_grad():
                samples = samples @ torch.eye(width)
        engine.backward(engine(samples).mean())
        engine.step()

    return step


def megatron_step(layout: str, rings: str) -> Callable[[Any], None]:
    """Return a step of a GPT job, which generates its own tokens."""
    import megatron_unickpt
    from megatron_unickpt.testing.jobs import Job
    from megatron_unickpt.testing.layouts import Layout
    from unickpt.base.options.job import TimingOptions

    job = Job(Layout.parse(layout))
    megatron_unickpt.time_collectives(TimingOptions(enabled=True, folder=rings))
    return lambda _samples: job.train(1) and None


def main() -> None:
    warnings.filterwarnings("ignore")
    kind, layout, rings, control = sys.argv[1], sys.argv[2], sys.argv[3], Control(Path(sys.argv[4]))
    if kind == "megatron":
        import megatron_unickpt.testing.jobs  # noqa: F401 - before anything of megatron, and of torch.distributed
    import torch
    import torch.distributed as dist

    from unickpt.diagnosis import session
    from unickpt.testing.launch import leave

    if kind == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
        train = deepspeed_step(layout, rings)
    else:
        dist.init_process_group("gloo")
        train = megatron_step(layout, rings)
    rank = dist.get_rank()
    pairs = [dist.new_group(), dist.new_group()]  # for a deadlock
    rows, late = SampleRows(256), Late()
    loader = iter(torch.utils.data.DataLoader(rows, batch_size=8))  # type: ignore[arg-type]
    torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: stuck(control, rank))
    heap = [[[] for _ in range(50)] for _ in range(4000)]
    step = 0
    while True:
        now = control.now()
        fault, amount = now["fault"], float(now["amount"])
        mine = now["rank"] == rank and fault != "none"
        if fault == "end" and now["step"] <= step:
            break
        if mine:
            control.begun(now["id"], step)
        rows.delay = amount / 8 if mine and fault == "data" else 0.0
        samples = next(loader).repeat(8, 1)
        late.by_s = amount if mine and fault == "sleep" else 0.0
        if mine and fault == "garbage":
            for _ in range(int(amount)):
                gc.collect()
        elif mine and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(DEVICE_S)
        if fault in ("skip", "reshape", "deadlock") and now["step"] == step:
            out_of_order(fault, mine, pairs)
        train(samples)
        step += 1
    del heap
    dist.barrier()
    session.stop()
    leave()


def stuck(control: Control, rank: int) -> None:
    """Hang in a forward pass while the file specifies it."""
    while control.last["fault"] == "loop" and control.last["rank"] == rank:
        control.now()


def out_of_order(fault: str, mine: bool, pairs: list[Any]) -> None:
    """One rank makes another call than the others."""
    import torch
    import torch.distributed as dist

    if fault == "deadlock":
        for group in reversed(pairs) if mine else pairs:
            dist.all_reduce(torch.ones(3), group=group)
    elif not mine or fault == "reshape":
        dist.all_reduce(torch.ones(5 if mine else 7))


if __name__ == "__main__":
    main()
