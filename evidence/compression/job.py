"""A rank of a job whose gradients are compressed: a small network that learns the outputs of a fixed one.

``steps`` trains with plain PyTorch, ``DistributedDataParallel`` and its communication hook. ``deepspeed_steps`` trains with
DeepSpeed. The global batch of a step does not depend on the number of ranks.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unickpt
from unickpt.training.compression.ddp import CompressedGradients, compressed_gradients
from unickpt.training.compression.settings import NONE, Compression
from unickpt.training.compression.wire import GroupWire

BATCH, INPUTS, WIDTH, OUTPUTS = 48, 32, 64, 8
RATE, MOMENTUM = 0.01, 0.9
PARTS = 4  # parts of a batch with inputs of their own, one for each of four ranks


@dataclass(frozen=True)
class Task:
    """What a job does.

    Attributes:
        name: key of the result.
        compression: settings.
        steps: number of the last step.
        seed: seed of the weights and of the data.
        stage: ZeRO stage of DeepSpeed; -1 for ``DistributedDataParallel``.
        save_at: step after which a checkpoint is saved into ``folder``; 0 for none.
        load: load the checkpoint in ``folder`` first.
        drop: drop the residuals of that checkpoint.
        dtype: of the weights under DeepSpeed, ``fp32`` or ``fp16``.
    """

    name: str
    compression: Compression
    steps: int
    seed: int = 0
    stage: int = -1
    save_at: int = 0
    load: bool = False
    drop: bool = False
    dtype: str = "fp32"
    folder: str = ""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Task:
        return cls(**{**value, "compression": Compression(**value["compression"])})


class CountingWire(GroupWire):
    """Counts the bytes that are passed to the process group for other ranks."""

    sent_bytes = 0

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        self.sent_bytes += rows.nbytes // self.world * (self.world - 1)
        return super().all_to_all(rows)

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        self.sent_bytes += row.nbytes * (self.world - 1)
        return super().all_gather(row)


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(INPUTS, WIDTH),
        torch.nn.Tanh(),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.Tanh(),
        torch.nn.Linear(WIDTH, OUTPUTS),
    )


class Data:
    """Inputs, and the outputs of a network with larger weights.

    The inputs of the parts of a batch differ, so the gradients of the ranks do: they cancel each other where the loss is least.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._teacher = seed, network(1000)
        self._shifts = torch.randn(PARTS, INPUTS, generator=torch.Generator().manual_seed(1001))
        with torch.no_grad():
            for parameter in self._teacher.parameters():
                parameter.mul_(3)

    def batch(self, step: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(size, INPUTS, generator=torch.Generator().manual_seed(100_000 * self._seed + step))
        inputs = inputs + self._shifts.repeat_interleave(size // PARTS, dim=0)
        with torch.no_grad():
            return inputs, self._teacher(inputs)

    def part(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's rows of the batch of a step."""
        rows, rank = BATCH // dist.get_world_size(), dist.get_rank()
        inputs, outputs = self.batch(step)
        return inputs[rank * rows : (rank + 1) * rows], outputs[rank * rows : (rank + 1) * rows]


def loss_of(model: Any, inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = (model(inputs).float() - outputs).square().mean()
    return found


def run(task: Task) -> dict[str, Any]:
    """Train, and return the losses on fixed inputs, a digest of the weights and the bytes of a step."""
    data = Data(task.seed)
    fixed = data.batch(99_999, 512)
    trained = steps if task.stage < 0 else deepspeed_steps
    losses, module, wire, own = trained(task, data, fixed)
    debt = {name: float(tensor.double().sum()) for name, tensor in own.items()}
    return {
        "name": task.name,
        "losses": losses,
        "weights": _digest(module),
        "debt": debt,
        "sent_bytes": None if wire is None else wire.sent_bytes / max(len(losses), 1),
        "shapes": [list(parameter.shape) for parameter in module.parameters()],
    }


def _digest(module: torch.nn.Module) -> list[int]:
    return [int(p.detach().contiguous().view(-1).view(torch.int32).long().sum()) for p in module.float().parameters()]


def _debt(exchange: Any) -> dict[str, torch.Tensor]:
    """Return per parameter what the job owes, summed over all ranks: float64 ``[1]``."""
    found = {}
    for name in sorted({*exchange.residuals.sent, *exchange.residuals.returned}):
        owed = exchange.residuals.sent.get(name, torch.zeros(1)).double().sum() / exchange.world
        owed = (owed + exchange.residuals.returned.get(name, torch.zeros(1)).double().sum()).reshape(1)
        dist.all_reduce(owed)
        found[name] = owed
    return found


def steps(task: Task, data: Data, fixed: Any) -> Any:
    """Train with ``DistributedDataParallel``."""
    module = network(task.seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)
    compressed = CompressedGradients(module, task.compression)
    wire = compressed.wire = CountingWire()
    begin = 0
    if task.load:
        begin = _load(task, module, optimizer, compressed)
    model = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.01)
    model.register_comm_hook(compressed, compressed_gradients)
    owed = _debt(compressed)
    losses = []
    for step in range(begin, task.steps):
        loss_of(model, *data.part(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(float(loss_of(module, *fixed)))
        if step + 1 == task.save_at:
            _save(task, step + 1, module, optimizer, compressed)
            owed = _debt(compressed)
    return losses, module, wire, owed


def _save(task: Task, step: int, module: Any, optimizer: Any, compressed: CompressedGradients) -> None:
    state: dict[Any, torch.Tensor] = {name: p.detach() for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        state[name, "momentum_buffer"] = optimizer.state[parameter]["momentum_buffer"]
    unickpt.save_checkpoint(
        state,
        f"{task.folder}/step{step}",
        step=step,
        objects={"compression": compressed.common.to_object()},
        rank_objects={"compression": compressed.residuals.to_object()},
    )


def _load(task: Task, module: Any, optimizer: Any, compressed: CompressedGradients) -> int:
    state: dict[Any, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        state[name], state[name, "momentum_buffer"] = parameter.detach(), optimizer.state[parameter]["momentum_buffer"]
    loaded = unickpt.load_checkpoint(task.folder, state)
    if not task.drop:
        compressed.restore(
            lambda rank: loaded.checkpoint.rank_objects(rank).value["compression"], loaded.objects["compression"]
        )
    return loaded.step


def deepspeed_steps(task: Task, data: Data, fixed: Any) -> Any:
    """Train with DeepSpeed."""
    import deepspeed

    options = {"enabled": True, "async_save": False, "compression": asdict(task.compression)}
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "zero_optimization": {"stage": task.stage},
        "steps_per_print": 10**9,
        "unickpt": options,
        "optimizer": {"type": "SGD", "params": {"lr": RATE, "momentum": MOMENTUM}},
        "zero_allow_untested_optimizer": True,
    }
    if task.dtype == "fp16":
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # torch computes it on a CPU
        config["fp16"] = {"enabled": True, "initial_scale_power": 20}
    module = network(task.seed)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    if task.load:
        engine.load_checkpoint(task.folder)
    compressed = engine.checkpoint_engine.compressed
    wire = None
    if compressed is not None:
        if task.drop:
            compressed.exchange.residuals.sent.clear()
            compressed.exchange.residuals.returned.clear()
        wire = compressed.exchange.wire = CountingWire()
    dtype = torch.float16 if task.dtype == "fp16" else torch.float32
    losses = []
    for step in range(int(engine.global_steps), task.steps):
        inputs, outputs = data.part(step)
        engine.backward(loss_of(engine, inputs.to(dtype), outputs))
        engine.step()
        with torch.no_grad():
            losses.append(float(loss_of(engine.module, fixed[0].to(dtype), fixed[1])))
        if step + 1 == task.save_at:
            engine.save_checkpoint(task.folder)
    owed = {} if compressed is None else _debt(compressed.exchange)
    return losses, engine.module, wire, owed


def main() -> None:
    """Run the tasks of a file, one after the other. Rank 0 appends each result to another file."""
    warnings.filterwarnings("ignore")
    tasks = [Task.from_json(each) for each in json.loads(Path(sys.argv[1]).read_text())]
    if any(task.stage >= 0 for task in tasks):
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
    else:
        dist.init_process_group("gloo")
    for task in tasks:
        begin = time.monotonic()
        found = run(task)
        if dist.get_rank() == 0:
            with Path(sys.argv[2]).open("a") as file:
                found |= {"world": dist.get_world_size(), "seconds": time.monotonic() - begin, "task": asdict(task)}
                file.write(json.dumps(found) + "\n")
        dist.barrier()


def plain(task: Task) -> Task:
    """Return the same task without compression."""
    return replace(task, compression=Compression(NONE))


if __name__ == "__main__":
    main()
