"""Under torchrun: train a small model, and save it with ``torch.distributed.checkpoint``, with its tensors for comparison.

dcp_worker DIR          DIR/<kind>/ (.metadata, *.distcp) for every kind, and DIR/truth.pt
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from unickpt.testing.launch import leave


class Model(nn.Module):
    """Matrices, vectors, a 0-d parameter, and buffers, one of them a 0-d integer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(self.embed(tokens)) * self.scale
        return found


def trained() -> tuple[Model, torch.optim.Optimizer]:
    """The same on every rank."""
    torch.manual_seed(5)
    model = Model()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(0, 10, (8,))).square().sum().backward()
        optimizer.step()
    return model, optimizer


def sharded(tree: Any, axis: int) -> Any:
    """Shard every tensor with this dimension along it, unevenly if necessary. The others are whole on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def cut(tensor: torch.Tensor) -> DTensor:
        return distribute_tensor(tensor.detach(), mesh, [Shard(axis) if tensor.dim() > axis else Replicate()])

    if isinstance(tree, torch.Tensor):
        return cut(tree) if tree.dim() else tree
    return {key: sharded(value, axis) for key, value in tree.items()} if isinstance(tree, dict) else tree


def truth_of(model: Model, optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], torch.Tensor]:
    """(name, state) -> tensor."""
    found = {(name, "weight"): tensor.detach().clone() for name, tensor in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        found |= {(names[id(parameter)], key): state[key].clone() for key in ("exp_avg", "exp_avg_sq")}
    return found


def main() -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    model, optimizer = trained()
    rest = {"train_state": {"step": 30, "loss": [1.0, 2.5]}, "seen": torch.arange(3)}
    for flat in (True, False):
        weights, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
        name = "flat" if flat else "nested"
        for axis in (0, 1):
            tree = {"model": sharded(weights, axis), "optim": sharded(states, axis), **rest}
            torch_dcp.save(tree, checkpoint_id=folder / f"{name}{axis}")
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    # as in torchtitan: the model's names next to the other keys
    torch_dcp.save({**sharded(weights, 0), "optimizer": sharded(states, 0), "train_state": rest["train_state"]},
                   checkpoint_id=folder / "titan")  # fmt: skip
    torch_dcp.save({"app": {"model": weights}, **rest}, checkpoint_id=folder / "weights")
    if dist.get_rank() == 0:
        torch.save(truth_of(model, optimizer), folder / "truth.pt")
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
