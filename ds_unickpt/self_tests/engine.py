"""Self-test of the DeepSpeed adapter: ``python -m ds_unickpt.self_tests.engine FOLDER``.

For each ZeRO stage, an engine trains, saves as unickpt, and an engine of another seed loads. Their weights, masters, moments
and next losses must be equal bit for bit. Exits with an error otherwise. ``unickpt.base.self_test`` runs it for a DeepSpeed
whose hooked functions have changed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from unickpt.checkpoint.load.validation import is_checkpoint

STAGES = (1, 2, 3)


def main(folder: str) -> None:
    """Run all stages.

    Raises:
        SystemExit: something was not saved or loaded as it was.
    """
    begin()
    for stage in STAGES:
        _round_trip(stage, Path(folder, f"stage-{stage}"))
    torch.distributed.destroy_process_group()


def begin() -> None:
    """Begin with one rank, without operators that DeepSpeed would compile."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed.ops

    import ds_unickpt  # noqa: F401  (where torch does not load its plugins)

    deepspeed.ops.__compatible_ops__.clear()  # the shared-memory operator of its CPU backend: 40 s
    store = TCPStore("127.0.0.1", 0, 1, is_master=True)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)


def _round_trip(stage: int, folder: Path) -> None:
    saving, loading = _engine(stage, seed=1), _engine(stage, seed=2)
    _train(saving, [0, 1])
    _require(saving.save_checkpoint(str(folder), tag="tag"), f"ZeRO {stage}: save_checkpoint returned False")
    _require(is_checkpoint(folder / "tag"), f"ZeRO {stage}: the checkpoint was not saved as unickpt")
    path, _ = loading.load_checkpoint(str(folder))
    _require(path is not None, f"ZeRO {stage}: load_checkpoint found nothing")
    _compare(saving, loading, f"ZeRO {stage}, after the load")
    losses = _train(saving, [2]), _train(loading, [2])
    _require(losses[0] == losses[1], f"ZeRO {stage}: the next loss is {losses[1]} after the load, and {losses[0]} without")
    _compare(saving, loading, f"ZeRO {stage}, a step after the load")


def _engine(stage: int, *, seed: int) -> Any:
    import deepspeed

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8, bias=False))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "unickpt": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def _train(engine: Any, steps: list[int]) -> list[float]:
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = engine(torch.randn(2, 8, dtype=torch.bfloat16)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _state(engine: Any) -> dict[str, torch.Tensor]:
    """Return weights, masters and moments, by DeepSpeed's own accessors."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[f"weight {name}"] = parameter.detach().clone()
        found[f"master {name}"] = safe_get_full_fp32_param(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{key} {name}"] = safe_get_full_optimizer_state(parameter, key)
    return found


def _compare(saving: Any, loading: Any, where: str) -> None:
    expected, found = _state(saving), _state(loading)
    for name, tensor in expected.items():
        _require(tensor is not None and torch.equal(tensor, found[name]), f"{where}: {name} differs")


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        sys.exit(otherwise)


if __name__ == "__main__":
    main(sys.argv[1])
