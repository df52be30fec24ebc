"""Planning of a save and a load of thousands of ranks: unickpt and ``torch.distributed.checkpoint`` (DCP).

    python -m benchmarks.torch_planning [--ranks 2816] [--layers 32] [--rounds 3]

One process plays a rank, and the coordinator. The model has the tensors of Llama 7B with two moments, each sharded by rows over
all ranks, as FSDP2 does. Measured, without messages between ranks and without data:

- of one rank: what it saves, from its state dict (DCP: the local plan), and what it loads into a job of half as many ranks
- of the coordinator of a save: from the plans or rows of all ranks to the metadata or the index
- of a rank that loads: from the metadata or the index to its reads

DCP's plans of all ranks are made as its planner makes them for each rank. In a job they travel to rank 0 as pickles.
"""

from __future__ import annotations

import argparse
import gc
import io
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measure import machine
from torch_unickpt.dcp.contents import Contents
from torch_unickpt.dcp.saving import parts_of
from torch_unickpt.held_state import describe
from unickpt.api.group import Group
from unickpt.api.holders import Holders, mesh_digests
from unickpt.checkpoint.format import index_codec
from unickpt.checkpoint.format import rank_rows as rows
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import TensorInfo, check_complete, check_coverage
from unickpt.checkpoint.format.layout import RankFiles
from unickpt.checkpoint.load.read_plan import Target, plan_reads

STATES = ("weight", "exp_avg", "exp_avg_sq")


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a Llama of 4,096 columns, by name."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32000, 4096), "lm_head.weight": (32000, 4096)}
    for at in range(layers):
        layer = f"model.layers.{at}."
        found |= {f"{layer}self_attn.{name}_proj.weight": (4096, 4096) for name in "qkvo"}
        found |= {f"{layer}mlp.{name}_proj.weight": (11008, 4096) for name in ("gate", "up")}
        found |= {f"{layer}mlp.down_proj.weight": (4096, 11008)}
        found |= {f"{layer}{name}_layernorm.weight": (4096,) for name in ("input", "post_attention")}
    return found | {"model.norm.weight": (4096,)}


def part(shape: tuple[int, ...], rank: int, world: int) -> tuple[int, int]:
    """Return first row and number of rows of a rank, as ``torch.chunk`` divides them."""
    size = -(-shape[0] // world)
    begin = min(rank * size, shape[0])
    return begin, min(size, shape[0] - begin)


def best(rounds: int, action: Callable[[], Any]) -> tuple[float, Any]:
    """Return the least seconds of some rounds, and the last result."""
    least, value = float("inf"), None
    for _ in range(rounds):
        value = None
        gc.collect()
        begin = time.perf_counter()
        value = action()
        least = min(least, time.perf_counter() - begin)
    return least, value


def state_dict(tensors: dict[str, tuple[int, ...]], world: int) -> dict[str, Any]:
    """Return the state dict of rank 0 of a job, without memory behind its tensors."""
    mesh = init_device_mesh("cpu", (world,))
    state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}, "param_groups": [{"lr": 1e-3, "params": list(tensors)}]}}
    for name, shape in tensors.items():
        local = torch.empty(1).expand(part(shape, 0, world)[1], *shape[1:])

        def made(local: torch.Tensor = local, shape: tuple[int, ...] = shape) -> DTensor:
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)

        state["model"][name] = made()
        state["optimizer"]["state"][name] = {key: made() for key in STATES[1:]} | {"step": torch.tensor(1.0)}
    return state


def of_dcp(tensors: dict[str, tuple[int, ...]], world: int, rounds: int) -> dict[str, float]:
    state = state_dict(tensors, world)

    def local() -> SavePlan:
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=True)
        return planner.create_local_plan()

    found = {}
    found["a rank describes"], own = best(rounds, local)
    buffer = io.BytesIO()
    pickle.dump(own, buffer)
    found["bytes of a rank's message"] = buffer.tell()

    def plan_of(rank: int) -> SavePlan:
        items = []
        for name, shape in tensors.items():
            begin, count = part(shape, rank, world)
            offsets, sizes = torch.Size((begin, *(0 for _ in shape[1:]))), torch.Size((count, *shape[1:]))
            for key in STATES:
                fqn = f"model.{name}" if key == "weight" else f"optimizer.state.{name}.{key}"
                data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(torch.float32), torch.Size(shape))
                items.append(WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items, planner_data=own.planner_data)

    plans = [plan_of(rank) for rank in range(world)]
    gc.collect()
    gc.freeze()
    found["coordinator of the save"], (_, metadata) = best(1, lambda: DefaultSavePlanner().create_global_plan(plans))
    data = pickle.dumps(metadata)
    found["bytes of the metadata"] = len(data)
    plans.clear()
    del metadata
    other = {f"model.{k}": v for k, v in state_dict(tensors, world // 2)["model"].items()}
    found["a rank reads the metadata"], metadata = best(rounds, lambda: pickle.loads(data))
    found["a rank plans its load"], _ = best(rounds, lambda: create_default_local_load_plan(other, metadata))
    return found


def of_unickpt(tensors: dict[str, tuple[int, ...]], world: int, rounds: int) -> dict[str, float]:
    state, group = state_dict(tensors, world), Group(0, tuple(range(world)))

    def described() -> list[Any]:
        parts = parts_of(state, DefaultSavePlanner())
        assert parts is not None
        contents = Contents.of(parts.tensors, parts.others, parts.paths)
        mesh_digests((item.key, item.value) for item in contents.items if not item.plain)
        return describe.description(contents.items, Holders(world), group).shards()

    found = {}
    found["a rank describes"], _ = best(rounds, described)
    infos = sorted(
        (TensorInfo(n, k, "F32", s, "parameter" if k == "weight" else "optimizer") for n, s in tensors.items() for k in STATES),
        key=lambda info: info.key,
    )
    table, random = rows.packed_table(tuple(infos)), np.random.default_rng(0)

    def rows_of(rank: int) -> bytes:
        held = [(at, info, *part(info.shape, rank, world)) for at, info in enumerate(infos)]
        held = [each for each in held if each[3]]
        numbers = np.zeros((len(held), 7), np.int64)
        for row, (at, info, begin, count) in enumerate(held):
            rest = info.shape[1] if len(info.shape) > 1 else 1
            numbers[row] = at, 0, 0, begin, 0, count, rest
        sizes = numbers[:, 5] * numbers[:, 6] * 4
        numbers[:, 1] = 4096 + np.cumsum(sizes) - sizes
        numbers[:, 2] = random.integers(-(2**63), 2**63, len(held))
        return rows.pack(numbers, table, ())

    every = [(RankFiles(rank, 0).data, rows_of(rank)) for rank in range(world)]
    found["bytes of a rank's message"] = len(every[0][1])

    def merged() -> bytes:
        index = rows.merge(every)
        check_coverage(index)
        return index_codec.to_bytes(index)

    found["coordinator of the save"], data = best(rounds, merged)
    found["bytes of the metadata"] = len(data)
    found["a rank reads the metadata"], index = best(rounds, lambda: index_codec.from_bytes(data, where="index"))

    def planned() -> int:
        check_complete(index)
        targets = []
        ids = index.ids()
        for name, shape in tensors.items():
            begin, count = part(shape, 0, world // 2)
            targets.append(Target(ids[name, "weight"], Box((begin, *(0 for _ in shape[1:])), (count, *shape[1:]))))
        return len(plan_reads(index, targets).fragment)

    found["a rank plans its load"], _ = best(rounds, planned)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2816)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=args.ranks, store=FakeStore())
    tensors = shapes(args.layers)
    ours, theirs = (of(tensors, args.ranks, args.rounds) for of in (of_unickpt, of_dcp))
    print(f"`python -m benchmarks.torch_planning --ranks {args.ranks} --layers {args.layers}`; {machine()}.\n")
    print(
        f"{len(tensors)} parameters with two moments, {args.ranks:,} ranks.\n\n| | unickpt | DCP | factor |\n|---|---|---|---|"
    )
    for name, value in ours.items():
        unit = "{:,.0f}" if "bytes" in name else "{:.3f} s"
        print(f"| {name} | {unit.format(value)} | {unit.format(theirs[name])} | {theirs[name] / value:.1f} |")


if __name__ == "__main__":
    main()
