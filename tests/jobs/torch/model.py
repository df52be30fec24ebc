"""A small model in plain torch under a layout: uneven rows, a tied, a frozen and a never used parameter, a buffer."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo.compiled_autograd  # the first step of FSDP imports it: once here, before ranks fork
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.jobs.sizes import size_of
from tests.jobs.torch.layouts import Layout

WIDTH, ROWS, WORDS, BATCH = 12, 24, 13, size_of("BATCH", 12)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, ROWS)
        self.down = torch.nn.Linear(ROWS, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.frozen = torch.nn.Linear(WIDTH, 5).requires_grad_(False)
        self.unused = torch.nn.Linear(WIDTH, 7)
        self.wide = torch.nn.Linear(WIDTH, 11)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * self.scale.mean()
        for block in self.blocks:
            x = block(x)
        return self.head(x) + 0.1 * self.wide(x).mean() + 0.1 * self.frozen(x).mean()


class Job:
    """A training under a layout.

    Attributes:
        model, optimizer, scheduler: what a checkpoint has. ``optimizer`` may be a list.
        step: steps done.
    """

    def __init__(self, layout: Layout, seed: int) -> None:
        torch.manual_seed(seed)
        self.layout, self.step = layout, 0
        module = Model()
        with torch.no_grad():
            module.scale.mul_(1 + seed / 100)
        if layout.precision == "bf16":
            module = module.to(torch.bfloat16)
        self.module = module
        self.model = self._wrapped(module)
        self.optimizer: Any = self._optimizer(module)
        of = self.optimizers[-1]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(of, lambda step: 1 / (1 + step))

    @property
    def optimizers(self) -> list[Any]:
        return self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]

    def _wrapped(self, module: Model) -> torch.nn.Module:
        kind, sizes = self.layout.kind, self.layout.sizes
        if kind == "one":
            return module
        if kind == "ddp":
            return DistributedDataParallel(module, find_unused_parameters=True)
        names = {"fsdp": ("fsdp",), "hsdp": ("replica", "fsdp"), "tp": ("tp",), "fsdpxtp": ("fsdp", "tp")}[kind]
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        if "tp" in names:
            for block in module.blocks:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if kind == "tp":
            return module
        over = mesh if kind == "hsdp" else mesh["fsdp"]
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16) if self.layout.precision == "mixed" else MixedPrecisionPolicy()
        )
        for block in module.blocks:
            fully_shard(block, mesh=over, mp_policy=policy)
        return fully_shard(module, mesh=over, mp_policy=policy)

    def _optimizer(self, module: Model) -> Any:
        trained = [p for p in module.parameters() if p.requires_grad]
        if self.layout.optimizer == "sgd":
            return torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        if self.layout.optimizer == "muon":
            matrices = [p for block in module.blocks for p in (block.up.weight, block.down.weight)]
            known = set(map(id, matrices))
            rest = [p for p in trained if id(p) not in known]
            return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]
        decayed = [p for p in trained if p.ndim > 1]
        flat = [p for p in trained if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01, fused=self.layout.optimizer == "fused" or None)

    def train(self, steps: int) -> list[float]:
        """Train on batches that depend on the step alone, and return the mean losses."""
        losses = []
        data = self._data_ranks()
        for _ in range(steps):
            words = torch.randint(0, WORDS, (BATCH, 6), generator=torch.Generator().manual_seed(self.step))
            own = words.chunk(data[1])[data[0]]
            logits = self.model(own[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.float().reshape(-1, WORDS), own[:, 1:].reshape(-1))
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.scheduler.step()
            mean = loss.detach().clone()
            if dist.get_world_size() > 1:
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            losses.append(mean.item())
            self.step += 1
        return losses

    def _data_ranks(self) -> tuple[int, int]:
        """Return the position among the data parallel ranks, and their number."""
        rank, world = dist.get_rank(), dist.get_world_size()
        if self.layout.kind == "tp":
            return 0, 1
        tensor = self.layout.sizes[1] if self.layout.kind == "fsdpxtp" else 1
        return rank // tensor, world // tensor

    def truth(self) -> dict[str, Any]:
        """Return the whole state, gathered by torch. Every rank calls it."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        found: dict[str, Any] = {f"{name}": _whole(value) for name, value in self.module.state_dict().items()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = names[id(parameter)]
                    settings = ("lr", "weight_decay", "momentum", "betas")
                    found[f"{name}|settings"] = [
                        float(group[k]) if k != "betas" else list(group[k]) for k in settings if k in group
                    ]
                    for key, value in optimizer.state.get(parameter, {}).items():
                        found[f"{name}|{key}"] = _whole(value)
        found["scheduler"] = self.scheduler.state_dict()["last_epoch"]
        return found


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
