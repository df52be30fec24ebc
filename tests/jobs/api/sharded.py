"""Ranks that save and load DTensors and shards with copies through the public API.

sharded save DIR       4 ranks: DIR/step1, with everything that a mesh of 2 x 2 ranks can divide
sharded load DIR       any ranks: into other divisions, compared bit for bit
sharded uneven DIR     6 ranks: FSDP2 over tensor parallelism with rows that do not divide, into DIR/step1
sharded refuse DIR     2 ranks: what cannot be described is refused, by name
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import unickpt
from unickpt.testing.launch import leave

SHAPES = {
    "rows": (7, 3), "columns": (4, 5), "both": (6, 9), "twice": (11, 2), "few": (1, 3), "everywhere": (3, 3), "number": (),
    "half": (5, 4), "by_hand": (8, 4), "strided": (7, 3),
}  # fmt: skip
PLACEMENTS: dict[str, tuple[Any, Any]] = {
    "rows": (Replicate(), Shard(0)),  # HSDP
    "columns": (Shard(1), Replicate()),
    "both": (Shard(1), Shard(0)),
    "twice": (Shard(0), Shard(0)),
    "few": (Shard(0), Shard(0)),
    "everywhere": (Replicate(), Replicate()),
    "number": (Replicate(), Replicate()),
}


def truth() -> dict[Any, torch.Tensor]:
    """The whole tensors, the same on every rank."""
    found: dict[Any, torch.Tensor] = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        generator = torch.Generator().manual_seed(number)
        found[name] = torch.randn(shape, generator=generator, dtype=torch.bfloat16 if name == "both" else torch.float32)
    found["rows", "exp_avg"] = -found["rows"]
    return {**found, **{f"model.{name}": value.detach() for name, value in model().state_dict().items()}}


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3))


def rows_that_do_not_divide() -> nn.Linear:
    """Tensor parallelism leaves 4 and 3 rows, of which the last of 3 ranks of FSDP gets none and one."""
    torch.manual_seed(4)
    return nn.Linear(2, 7)


def over_tensor_parallel(mesh: DeviceMesh) -> dict[Any, Any]:
    """Parameters of FSDP2 over tensor parallelism: rows that both divide have a ``_StridedShard``."""
    sharded = parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel()})
    fully_shard(sharded, mesh=mesh["dp"])  # 3 rows of the last one for 4 ranks
    assert "Strided" in str(sharded.get_parameter("0.weight").placements)  # type: ignore[attr-defined]
    return {f"model.{name}": value for name, value in sharded.state_dict().items()}


def divided(mesh: DeviceMesh, whole: dict[Any, torch.Tensor]) -> dict[Any, Any]:
    """Every tensor in the way of its name."""
    found: dict[Any, Any] = {name: distribute_tensor(whole[name], mesh, each) for name, each in PLACEMENTS.items()}
    found["rows", "exp_avg"] = distribute_tensor(whole["rows", "exp_avg"], mesh, PLACEMENTS["rows"])
    found["half"] = distribute_tensor(whole["half"], DeviceMesh("cpu", [0, 1]), [Shard(0)])  # ranks 2 and 3 have nothing
    half = dist.get_rank() % 2
    found["by_hand"] = unickpt.LocalShard(
        whole["by_hand"][4 * half : 4 * half + 4].clone(), (4 * half, 0), (8, 4), copies=(half, half + 2)
    )
    return {**found, "strided": strided(mesh, whole["strided"]), **over_tensor_parallel(mesh)}


def strided(mesh: DeviceMesh, whole: torch.Tensor) -> DTensor:
    """Rows 0, 1, 4, 5 on two ranks, and 2, 3, 6 on the others."""
    placement = _StridedShard(0, split_factor=2)
    rows = [[0, 1, 4, 5], [2, 3, 6]][mesh.get_local_rank("dp")]
    return DTensor.from_local(
        whole[rows], mesh, [placement, Replicate()], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def zeroed(state: dict[Any, Any]) -> dict[Any, Any]:
    for value in state.values():
        (value.data if isinstance(value, unickpt.LocalShard) else value.detach()).zero_()
    return state


def compare(state: dict[Any, Any], whole: dict[Any, torch.Tensor]) -> None:
    """All ranks call it."""
    for key, value in state.items():
        if isinstance(value, unickpt.LocalShard):
            assert torch.equal(value.data, whole[key][value.box.slices()]), key
        elif value.device_mesh.get_coordinate() is not None:
            assert torch.equal(value.detach().full_tensor(), whole[key]), key


def save(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = truth()
    unickpt.save_checkpoint(divided(mesh, whole), f"{folder}/step1", step=1)
    state = zeroed(divided(mesh, whole))
    loaded = unickpt.load_checkpoint(folder, state, strict=True)
    compare(state, whole)
    assert not loaded.report.count()["left out"]


def load(folder: str) -> None:
    world = dist.get_world_size()
    mesh, whole = init_device_mesh("cpu", (world,)), truth()
    for placement in (Shard(0), Replicate()):
        state = {
            key: distribute_tensor(torch.zeros_like(value), mesh, [placement if value.dim() else Replicate()])
            for key, value in whole.items()
        }
        unickpt.load_checkpoint(folder, state, strict=True)
        compare(state, whole)


def uneven(folder: str) -> None:
    """Six ranks. The placements of torch say another region than FSDP has on the last two, so torch cannot gather it."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))

    def sharded() -> nn.Module:
        found = parallelize_module(rows_that_do_not_divide(), mesh["tp"], ColwiseParallel())
        return fully_shard(found, mesh=mesh["dp"])

    layer = sharded()
    local = [each.detach().to_local().clone() for each in layer.parameters()]  # type: ignore[attr-defined]
    unickpt.save_checkpoint(dict(layer.named_parameters()), f"{folder}/step1", step=1)
    zeroed(dict(layer.named_parameters()))
    unickpt.load_checkpoint(folder, dict(layer.named_parameters()), strict=True)
    for before, after in zip(local, layer.parameters(), strict=True):
        assert torch.equal(before, after.detach().to_local())  # type: ignore[attr-defined]


def refuse(folder: str) -> None:
    mesh, data = init_device_mesh("cpu", (2,)), torch.ones(4, 4)
    total = DTensor.from_local(data, mesh, [Partial()])
    other = DTensor.from_local(data, mesh, [Shard(0)], run_check=False, shape=torch.Size((6, 4)), stride=(4, 1))
    for value, words in (
        (total, "a sum that is not reduced"),
        (other, r"placements .*Shard\(dim=0\).* rank has a tensor of shape \(4, 4\) of it, which does not fit"),
        (unickpt.LocalShard(data, (0, 0), (4, 4), copies=(0, 2)), "expected ranks of the group"),
        (unickpt.LocalShard(data, (0, 0), (4, 4), copies=(1 - dist.get_rank(),)), "this one among them"),
        (unickpt.LocalShard(data, (0, 0), (4, 4)), "overlap"),
    ):
        with pytest.raises(unickpt.SaveFailedError, match=words):
            unickpt.save_checkpoint({"w": value}, f"{folder}/refused")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"save": save, "load": load, "uneven": uneven, "refuse": refuse}[sys.argv[1]](sys.argv[2])
    leave()
