"""A rank of a DeepSpeed job with a 1-bit optimizer: ``one_bit_job TASK.json``, with the variables of ``env://``.

DeepSpeed's backends for these optimizers pack signs with an operator for GPUs (``PackbitsBuilder`` of XPU, or cupy). This job
gives DeepSpeed the same operator for the CPU, from numpy, and gives ``all_gather`` of gloo the shape of its results, which NCCL
does not check. Everything else is DeepSpeed's: optimizer, error feedback, exchange, engine.

The task has ``optimizer`` and ``dtype``, ``steps`` (until the save, and after it), ``folder``, ``name``, ``save`` and
``unickpt``. With ``save`` the job trains, saves and goes on. Otherwise it begins with another seed, makes ``lived``
steps, loads and goes on. Each rank writes its losses, and its states after the load or save and at the end, to
``folder/NAME-RANK.pt``.

The optimizer ``LoCo`` is Adam under ZeRO-3 with the setting of LoCo-ZeRO++. DeepSpeed reduces with LoCo on CUDA alone, so this
job makes the error buffers itself and reduces without LoCo.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed import comm as dist
from deepspeed.ops import op_builder

from unickpt.testing.launch import leave

SETTINGS = {
    "OneBitAdam": {"freeze_step": 3},
    "OneBitLamb": {"freeze_step": 3},
    "ZeroOneAdam": {"var_freeze_step": 4, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 4},
}


class PackbitsOnCpu:
    """``csrc/xpu/packbits/packing.cpp`` on the CPU: bit 1 for a float whose sign bit is 0."""

    def load(self) -> Any:
        def packbits(values: torch.Tensor, _size: int, _rank: int) -> torch.Tensor:
            return torch.from_numpy(np.packbits(~np.signbit(values.numpy())))

        def unpackbits(packed: torch.Tensor, _size: int, _rank: int) -> torch.Tensor:
            return torch.from_numpy(np.unpackbits(packed.numpy()).astype(np.float32) * 2 - 1)

        return SimpleNamespace(packbits=packbits, unpackbits=unpackbits)


class GlooShapes:
    """``deepspeed.comm`` with an ``all_gather`` that reshapes a scalar as its results."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def all_gather(found: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> Any:
        return dist.all_gather(found, tensor.reshape(found[0].shape), group=group)


def build(task: dict[str, Any]) -> Any:
    torch.manual_seed(1 if task["save"] else 2)
    model = torch.nn.Sequential(torch.nn.Linear(7, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    settings = SETTINGS.get(task["optimizer"])
    params = {"lr": 1e-3} if settings is None else {"lr": 1e-3, "comm_backend_name": "compressed", **settings}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10**9,
        "optimizer": {"type": "Adam" if settings is None else task["optimizer"], "params": params},
    }  # fmt: skip
    if settings is None:
        config["optimizer"]["params"]["torch_adam"] = True
        config["zero_optimization"] = {"stage": 3, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
    if task["unickpt"]:
        config["unickpt"] = {"enabled": True, "async_save": False}
    if task["dtype"] == "bf16":
        config["bf16"] = {"enabled": True}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(int(engine.global_steps) * 10 + engine.global_rank)
        inputs = torch.randn(4, 7, generator=generator).to(next(engine.module.parameters()).dtype)
        loss = engine(inputs).float().square().mean()
        engine.backward(loss)
        engine.step()
        found.append(float(loss))
    return found


def make_buffers(engine: Any) -> None:
    """Set the error buffers of LoCo: int8 codes and scales, others on each rank."""
    generator = torch.Generator().manual_seed(int(engine.global_rank))
    for p in engine.module.parameters():
        for name in ("intra_ef_buf", "inter_ef_buf"):
            codes = torch.randint(-128, 128, (p.ds_numel,), dtype=torch.int8, generator=generator)
            setattr(p, name, [codes, torch.rand(4, generator=generator)])


def states(engine: Any) -> dict[str, Any]:
    """Return the live states of a rank, by number of the optimizer's tensor."""
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    found: dict[str, Any] = {f"weight {n}": p.detach().clone() for n, p in engine.module.named_parameters()}
    for number, p in enumerate(p for group in base.param_groups for p in group["params"]):
        found[f"{number} master"] = p.detach().clone()
        for key, value in base.state.get(p, {}).items():
            found[f"{number} {key}"] = value.clone() if isinstance(value, torch.Tensor) else value
    for number, p in enumerate(engine.module.parameters()):
        for name in ("intra_ef_buf", "inter_ef_buf"):
            found |= {f"{number} {name} {at}": t.clone() for at, t in enumerate(getattr(p, name, ()))}
    for name in ("worker_errors", "server_errors", "exp_avg_flat"):
        for number, value in enumerate(getattr(base, name, ())):
            found[f"{name} {number}"] = value.clone()
    return found


def main() -> None:
    warnings.filterwarnings("ignore")
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    op_builder.PackbitsBuilder = PackbitsOnCpu
    from deepspeed.runtime.comm import compressed

    compressed.dist = GlooShapes()
    deepspeed.init_distributed("gloo", verbose=False)
    engine = build(task)
    before, after = task["steps"]
    report: list[str] = []
    if task["save"]:
        train(engine, before)
        if task["optimizer"] == "LoCo":
            make_buffers(engine)
        engine.save_checkpoint(f"{task['folder']}/checkpoint", tag="saved")
    else:
        train(engine, task.get("lived", 0))
        path, _ = engine.load_checkpoint(f"{task['folder']}/checkpoint", tag="saved")
        assert path is not None
        last = getattr(engine.checkpoint_engine, "last_report", None)
        report = [] if last is None else [str(e) for e in last.entries if "residuals" in e.name]
    at_once = states(engine)
    losses = train(engine, after)
    found = {"losses": losses, "at_once": at_once, "states": states(engine), "report": report}
    torch.save(found, f"{task['folder']}/{task['name']}-{engine.global_rank}.pt")
    leave()


if __name__ == "__main__":
    main()
