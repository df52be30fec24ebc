"""Saves and loads of FSDP2 jobs: unickpt and ``torch.distributed.checkpoint`` (DCP), on CPU.

    python -m benchmarks.torch_save_load [--millions 50] [--rounds 5] [--ranks 1 2 4] [--out FILE] [--json FILE]

Every round saves and loads the same model and optimizer (fp32, AdamW, ``fully_shard``), one after the other: a raw write and
fsync of as many bytes; DCP; DCP with ``UNICKPT=1``, which writes unickpt checkpoints; and ``unickpt.save_training``. The three
take turns to be first. Asynchronous saves of DCP run in a thread and in a process. A save includes the write and its fsync; an
asynchronous one has two times: the duration of the call, and the time until it is durable. Loads are from the page cache, into
the same layout and, for two ranks and four, into plain tensors of each rank (as under DDP). ``weights save`` is of the weights
alone, which DCP consolidates to Hugging Face files (``enable_consolidation``), without their fsync. Times are seconds of the
slowest rank: medians with their spread, and ratios within a round.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.deepspeed_save_load import Raw
from benchmarks.measure import Peak, latest, machine, most, publish, settle, slowest, table, warm
from unickpt.testing.launch import torchrun

KINDS = ("DCP", "unickpt in DCP", "unickpt")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=int, default=50, help="parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--no-process", action="store_true", help="without DCP's process, which holds a second copy of the state"
    )
    parser.add_argument("--no-async", action="store_true", help="without asynchronous saves, each of which holds a copy")
    parser.add_argument("--sharded-only", action="store_true", help="without the load into plain tensors, whole on each rank")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path, help="file for the seconds of every round")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


class Job:
    """A model of linear layers with its optimizer, after one step."""

    def __init__(self, millions: int, *, sharded: bool) -> None:
        import torch
        from torch.distributed.fsdp import fully_shard

        width = max(64, int((millions * 1e6 / 48) ** 0.5))
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(48)))
        if sharded:
            for layer in self.model:
                fully_shard(layer)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.model(torch.ones(1, width)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """Return the state dict that training programs pass to DCP."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def save(job: Job, kind: str, where: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    import unickpt

    if kind == "unickpt":
        unickpt.save_training(job.model, job.optimizer, where, step=1)
        return
    os.environ["UNICKPT"] = "1" if kind == "unickpt in DCP" else "off"
    dcp_save(job.state(), checkpoint_id=where)


def save_behind(job: Job, kind: str, where: Path, process: bool) -> Callable[[], Any]:
    """Begin an asynchronous save, and return what waits for it."""
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

    import unickpt

    if kind == "unickpt":
        options = unickpt.SaveOptions(asynchronous=True)
        pending: Any = unickpt.save_training(job.model, job.optimizer, where, step=1, options=options)
        return pending.wait  # type: ignore[no-any-return]
    os.environ["UNICKPT"] = "1" if kind == "unickpt in DCP" else "off"
    how = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
    future: Any = async_save(job.state(), checkpoint_id=where, async_checkpointer_type=how)
    return future.result  # type: ignore[no-any-return]


def save_weights(job: Job, kind: str, where: Path) -> None:
    """Save the weights alone: DCP as whole Hugging Face files, unickpt as a checkpoint, for ``unickpt export``."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    import unickpt

    if kind == "unickpt":
        unickpt.save_training(job.model, None, where, step=1)
        return
    os.environ["UNICKPT"] = "off"
    dcp_save(
        job.model.state_dict(),
        storage_writer=HuggingFaceStorageWriter(str(where), save_distributed=True, enable_consolidation=True),
    )


def load(job: Job, kind: str, where: Path) -> None:
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    import unickpt

    if kind == "unickpt":
        unickpt.load_training(job.model, job.optimizer, where)
        return
    state = job.state()
    dcp_load(state, checkpoint_id=where)
    set_state_dict(job.model, job.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def worker(args: argparse.Namespace) -> None:
    """Measure on one rank. Rank 0 writes the result as JSON."""
    import logging
    import warnings

    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    logging.getLogger("unickpt").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    folder, world = Path(args.worker), dist.get_world_size()
    job = Job(args.millions, sharded=True)
    parameters: Any = list(job.model.parameters())
    mine = 12 * sum(each.to_local().numel() for each in parameters)
    del parameters
    raw = Raw(folder / f"raw{dist.get_rank()}", mine)

    def fresh(where: Path) -> Path:
        if dist.get_rank() == 0:
            shutil.rmtree(where, ignore_errors=True)
        dist.barrier()
        return where

    def behind(job: Job, kind: str, process: bool) -> tuple[float, float]:
        where = fresh(folder / "behind")
        settle()
        began = time.perf_counter()
        wait = save_behind(job, kind, where, process)
        stall = time.perf_counter() - began
        wait()  # before any collective of this thread: DCP's has its own in the same process group
        dist.barrier()
        durable = time.perf_counter() - began
        return latest(stall), durable

    seconds: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    peaks: dict[str, int] = {}
    for number in range(args.rounds + 1):
        raw.remove()
        found = {"memory copy": slowest(raw.copy), "raw write": slowest(raw.write)}
        turn = KINDS[number % len(KINDS) :] + KINDS[: number % len(KINDS)]
        for kind in turn:
            where = fresh(folder / kind.replace(" ", "-"))
            with Peak() as peak:
                found[f"{kind} save"] = slowest(partial(save, job, kind, where))
            peaks[f"{kind} save"] = most(peak.bytes)
            sizes[kind] = sum(f.stat().st_size for f in where.rglob("*") if f.is_file())
            for process in () if args.no_async else (False, True) if kind == "DCP" and not args.no_process else (False,):
                how = f"{kind} async{', process' if process else ''}"
                with Peak() as peak:
                    found[f"{how}, stall"], found[f"{how}, durable"] = behind(job, kind, process)
                peaks[how] = most(peak.bytes)
        for kind in ("DCP", "unickpt"):
            found[f"{kind} weights save"] = slowest(partial(save_weights, job, kind, fresh(folder / "weights")))
        warm(raw.path, instead_of=folder)
        raw.read()
        found["raw read"] = slowest(raw.read)
        for kind in turn:
            warm(folder / kind.replace(" ", "-"), instead_of=folder)
            with Peak() as peak:
                found[f"{kind} load"] = slowest(partial(load, job, kind, folder / kind.replace(" ", "-")))
            peaks[f"{kind} load"] = most(peak.bytes)
        if number:
            for key, value in found.items():
                seconds.setdefault(key, []).append(value)
    del job
    gc.collect()  # of a module and its hooks
    if world > 1 and not args.sharded_only:
        other = Job(args.millions, sharded=False)
        for number in range(args.rounds + 1):
            for kind in KINDS:
                warm(folder / kind.replace(" ", "-"), instead_of=folder)
                value = slowest(partial(load, other, kind, folder / kind.replace(" ", "-")))
                if number:
                    seconds.setdefault(f"{kind} load as DDP", []).append(value)
    if dist.get_rank() == 0:
        result = {"seconds": seconds, "sizes": sizes, "peaks": peaks, "mine": mine}
        (folder / f"result-w{world}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def compared(seconds: dict[str, list[float]]) -> dict[str, list[str]]:
    """Return with what each measurement is compared: DCP, and the physical limit."""
    found: dict[str, list[str]] = {}
    for name in seconds:
        kind = next((each for each in sorted(KINDS, key=len, reverse=True) if name.startswith(f"{each} ")), "")
        rest = name[len(kind) + 1 :] if kind else ""
        limit = "memory copy" if "stall" in rest else "raw read" if "load" in rest else "raw write"
        limit = "" if "DDP" in rest or "weights" in rest else limit
        found[name] = [f"DCP {rest.replace(', process', '')}", limit] if kind else []
    return found


def main() -> None:
    args = parse()
    if args.worker:
        worker(args)
        return
    options = [f"--millions={args.millions}", f"--rounds={args.rounds}"]
    options += [f"--{name.replace('_', '-')}" for name in ("no_process", "no_async", "sharded_only") if getattr(args, name)]
    ranks = " ".join(map(str, args.ranks))
    lines = [f"`python -m benchmarks.torch_save_load {' '.join(options)} --ranks {ranks}`", ""]
    lines.append(f"{args.millions}M parameters, fp32, AdamW, FSDP2; {machine()}.")
    every = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in args.ranks:
            torchrun(world, "benchmarks.torch_save_load", *options, "--worker", folder, timeout_s=1500)
            result = json.loads((Path(folder) / f"result-w{world}.json").read_text())
            every[world] = result
            shown = table(result["seconds"], compared(result["seconds"]), ["relative to DCP", "relative to the limit"])
            sizes = ", ".join(f"{kind} {size:,}" for kind, size in result["sizes"].items())
            peaks = ", ".join(f"{kind} {size / result['mine']:.2f}" for kind, size in result["peaks"].items())
            lines += ["", f"### {world} {'rank' if world == 1 else 'ranks'}", "", shown, "", f"Bytes on disk: {sizes}."]
            lines += ["", f"Peak memory of a rank, in its share of the state ({result['mine']:,} bytes): {peaks}."]
            for path in Path(folder).iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    publish("\n".join(lines) + "\n", args.out)
    if args.json:
        args.json.write_text(json.dumps(every))


if __name__ == "__main__":
    main()
