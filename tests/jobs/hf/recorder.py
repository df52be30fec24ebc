"""Records the state of a training run through DeepSpeed's own accessors, for the tests to compare.

The accessors return full fp32 tensors whatever the ZeRO stage and world size are, and know nothing
of how a checkpoint is stored: an independent witness.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed import zero
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file
from transformers import TrainerCallback

STATES = ("exp_avg", "exp_avg_sq")


def full_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """``name|state`` -> full tensor: master and moments of what is trained, weight of everything.

    Collective. The optimizer must have moments: after a step, or after a resume.
    """
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        with zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[f"{name}|weight"] = parameter.detach().clone()
        if not parameter.requires_grad:
            continue
        found[f"{name}|master"] = safe_get_full_fp32_param(parameter).detach().clone()
        for state in STATES:
            found[f"{name}|{state}"] = safe_get_full_optimizer_state(parameter, state).detach().clone()
    return found


def record(folder: str, event: str, model: torch.nn.Module, **facts: Any) -> None:
    """Write ``<folder>/<event>.safetensors`` and ``.json``. Collective; the first rank writes."""
    state = full_state(model)
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(state, f"{folder}/{event}.safetensors")
        Path(folder, f"{event}.json").write_text(json.dumps(facts))


class Recorder(TrainerCallback):
    """Records ``begin`` (after a resume), ``save-<step>`` and ``end`` (after the best model is loaded)."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        if state.global_step:
            self._record("begin", args, state, **kwargs)

    def on_save(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        self._record(f"save-{state.global_step}", args, state, **kwargs)

    def on_train_end(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        self._record("end", args, state, **kwargs)

    def _record(self, event: str, args: Any, state: Any, *, model: Any, optimizer: Any, lr_scheduler: Any, **_: Any) -> None:
        scheduler = getattr(lr_scheduler, "scheduler", lr_scheduler)
        record(
            self.folder,
            event,
            model,
            step=state.global_step,
            best=state.best_model_checkpoint,
            log=state.log_history,
            lr=[group["lr"] for group in optimizer.param_groups],
            scheduler={k: v for k, v in scheduler.state_dict().items() if isinstance(v, (int, float, list))},
            config=args.hf_deepspeed_config.config,
            world=args.world_size,
        )
