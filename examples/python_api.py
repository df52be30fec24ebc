"""Save on two ranks, load on one: ``torchrun --nproc-per-node 2 examples/python_api.py save out``, then
``python examples/python_api.py load out``.
"""

import sys

import torch
import torch.distributed as dist

import unickpt


def save(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weight = torch.arange(32, dtype=torch.float32).reshape(8, 4)
    state = {
        # each rank holds four of the eight rows of the weight and of its optimizer state
        "layer.weight": unickpt.LocalShard(weight[4 * rank : 4 * rank + 4], start=(4 * rank, 0), global_shape=(8, 4)),
        ("layer.weight", "exp_avg"): unickpt.LocalShard(
            -weight[4 * rank : 4 * rank + 4], start=(4 * rank, 0), global_shape=(8, 4)
        ),
        # both ranks hold the whole bias
        "layer.bias": torch.ones(8),
    }
    result = unickpt.save_checkpoint(state, f"{folder}/step100", step=100, objects={"epoch": 3}, rank_objects={"sampler": rank})
    if rank == 0:
        print(f"saved {result.size_bytes} bytes")
    dist.destroy_process_group()


def load(folder: str) -> None:
    columns = unickpt.LocalShard(torch.empty(8, 2, dtype=torch.bfloat16), start=(0, 2), global_shape=(8, 4))
    moment = torch.empty(8, 4)
    loaded = unickpt.load_checkpoint(folder, {"layer.weight": columns, ("layer.weight", "exp_avg"): moment})
    expected = torch.arange(32, dtype=torch.float32).reshape(8, 4)
    assert torch.equal(columns.data, expected[:, 2:].bfloat16())
    assert torch.equal(moment, -expected)
    print(f"loaded step {loaded.step}, epoch {loaded.objects['epoch']}")
    print("\n".join(loaded.report.lines()))


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](sys.argv[2])
