"""A job of a library on FSDP2: trains a small Llama, and saves or loads it by the library's own calls.

With ``UNICKPT_AUTOLOAD=0`` no hook of unickpt is installed, as if it were not there.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from evidence.libraries.trials import Result, Task, noted
from unickpt.testing.launch import leave

STEPS = (3, 2)  # before the save, and after the save or the load
BATCH, WORDS, VOCABULARY = 8, 12, 30  # rows of the vocabulary cannot be divided among 4 ranks
_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")


@dataclass(frozen=True, slots=True)
class Trained:
    """What a job trains.

    Attributes:
        model: the model, sharded.
        optimizers: its optimizers.
        step: makes the optimizer step of a number, and returns the loss of this rank.
        more: objects of the library, for ``save`` and ``load``.
        values: returns what else must be equal after the load, such as the state of the schedule.
    """

    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    step: Callable[[int], float]
    more: Mapping[str, Any] = field(default_factory=dict)
    values: Callable[[], Any] = dict


Make = Callable[[Task, int], Trained]
Call = Callable[[Trained, Task], Mapping[str, Any] | None]
State = dict[str, Any]


def run(tasks: Sequence[Task], make: Make, save: Call, load: Call) -> None:
    """Do tasks in this rank of a job of torchrun, one after the other, and end the process.

    Args:
        tasks: what to do. Their layouts are in the words of ``sizes``.
        make: makes what a task trains, from the task and a seed.
        save: saves it in ``task.folder`` by the library. What it returns is noted in the result.
        load: the same for a load.
    """
    run_all(tasks, lambda task: result_of(task, make, save, load))


def result_of(task: Task, make: Make, save: Call, load: Call) -> Result:
    """Do one task of ``run``."""
    trained = make(task, seed_of(task))
    return (_loaded if task.loads else _saved)(trained, task, load if task.loads else save)


def seed_of(task: Task) -> int:
    """Return the seed of a job: another one where it loads."""
    return 7 if task.loads else 1


def run_all(tasks: Sequence[Task], work: Callable[[Task], Result]) -> None:
    """Do tasks in this rank, up to one that fails, write their results, and end the process."""
    for task in tasks:
        random.seed(seed_of(task))
        numpy.random.seed(seed_of(task))
        noted(task, partial(work, task))
        dist.barrier()
    leave()


def _saved(trained: Trained, task: Task, save: Call) -> Result:
    _train(trained, range(STEPS[0]))
    seen = save(trained, task)
    note(trained, task)
    return Result(losses=_train(trained, _after()), seen=seen or {})


def _loaded(trained: Trained, task: Task, load: Call) -> Result:
    seen = load(trained, task)
    problems = compared(trained, task)
    return Result(losses=_train(trained, _after()), problems=problems, seen=seen or {})


def note(trained: Trained, task: Task) -> None:
    """Write the state for the job that loads it. Collective."""
    state = gathered(trained)
    if dist.get_rank() == 0:
        torch.save(state, Path(task.notes) / "state.pt")


def compared(trained: Trained, task: Task) -> list[str]:
    """Return what differs from the noted state. Collective."""
    return differences(torch.load(Path(task.notes) / "state.pt", weights_only=False), gathered(trained))


def _after() -> range:
    return range(STEPS[0], sum(STEPS))


def _train(trained: Trained, steps: range) -> list[float]:
    """Train, and return the losses over all ranks."""
    return [_mean(trained.step(step)) for step in steps]


def _mean(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def gathered(trained: Trained) -> State:
    """Return all weights, buffers and optimizer states, whole, by plain names, with the settings of the groups. Collective."""
    parameters = {_plain(name): each for name, each in trained.model.named_parameters()}
    plain = [name for name, each in parameters.items() if not isinstance(each, DTensor)]
    assert not plain, f"not sharded: {plain[:4]}"
    state: State = {f"weight/{name}": _full(each) for name, each in parameters.items()}
    kept = {_plain(name) for name in trained.model.state_dict()}
    state |= {f"buffer/{n}": _full(b) for n, b in trained.model.named_buffers() if _plain(n) in kept}
    for optimizer in trained.optimizers:
        of = {id(parameter): name for name, parameter in parameters.items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = of[id(parameter)]
                held = optimizer.state.get(parameter, {})
                state |= {f"{key}/{name}": _full(value) for key, value in held.items()}
                settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                state[f"settings/{name}"] = {key: float(v) if torch.is_tensor(v) else v for key, v in settings.items()}
    return state | {"values": trained.values()}


def _plain(name: str) -> str:
    return _WRAPPERS.sub("", name)


def _full(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu().clone() if torch.is_tensor(value) else value


def differences(expected: State, found: State) -> list[str]:
    """Return what differs between two states, one sentence each."""
    keys = expected.keys() ^ found.keys()
    if keys:
        return [f"only on one side: {', '.join(sorted(keys)[:4])}"]
    return [f"{key} differs" for key, value in expected.items() if not _equal(value, found[key])]


def _equal(a: Any, b: Any) -> bool:
    if torch.is_tensor(a) or torch.is_tensor(b):
        return torch.is_tensor(a) and torch.is_tensor(b) and a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


def sizes(layout: str) -> dict[str, int]:
    """Return the dimensions of the mesh of a layout: ``FSDP2 on 2``, ``HSDP 2x2`` (replicas, then shards)."""
    kind, _, rest = layout.partition(" ")
    if kind == "HSDP":
        replicas, shards = rest.split("x")
        return {"replicas": int(replicas), "shards": int(shards)}
    return {"shards": int(rest.removeprefix("on "))}


def mesh_of(layout: str) -> Any:
    """Return the mesh of a layout, on the CPU. Starts the processes' group if there is none."""
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    found = sizes(layout)
    return init_device_mesh("cpu", tuple(found.values()), mesh_dim_names=tuple(found))


def configuration() -> Any:
    """Return the configuration of the model."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=52, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def llama(seed: int) -> Any:
    """Return a small model of transformers."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(configuration())


def shard(model: Any, layout: str) -> Any:
    """Shard a model, layer by layer, over the mesh of a layout."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(layout)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def rows(step: int) -> torch.Tensor:
    """Return this rank's rows of the global batch of a step."""
    return rows_of(step).chunk(dist.get_world_size())[dist.get_rank()]


def rows_of(step: int) -> torch.Tensor:
    """Return the global batch of a step, which depends on nothing else."""
    return torch.randint(VOCABULARY, (BATCH, WORDS), generator=torch.Generator().manual_seed(1000 + step))


def step_of(model: Any, optimizer: Any, schedule: Any = None, backward: Callable[[Any], None] | None = None) -> Any:
    """Return a ``Trained.step`` of a plain loop."""

    def step(number: int) -> float:
        words = rows(number)
        loss = model(input_ids=words, labels=words).loss
        (backward or torch.Tensor.backward)(loss)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        return float(loss.detach())

    return step
