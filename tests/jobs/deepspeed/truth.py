"""The state of an engine through DeepSpeed's own accessors, without unickpt."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

Truth = dict[str, Any]


def optimizer_of(engine: Any) -> Any:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def consolidated(engine: Any, states: tuple[str, ...]) -> Truth:
    """Return all full weights, masters, optimizer states and buffers, and the steps and hyperparameters. Collective.

    Weights come from the live module (gathered under ZeRO-3). Masters and states come from
    ``safe_get_full_*`` where DeepSpeed provides them, else (no ZeRO) from the optimizer itself.
    """
    truth: Truth = {}
    parameters = dict(engine.module.named_parameters())
    for name, p in parameters.items():
        # One at a time: of several, DeepSpeed waits only for the last all-gather (comm/torch.py, all_gather_coalesced),
        # and gloo may still be busy with the others.
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            truth[f"weight/{name}"] = p.detach().cpu().clone()
    for name, p in parameters.items():
        if p.requires_grad and p.numel() + getattr(p, "ds_numel", 0):
            for key in ("master", *states):
                truth[f"{key}/{name}"] = _full(engine, p, key)
    truth |= {f"buffer/{n}": b.detach().clone() for n, b in engine.module.named_buffers() if n != "volatile"}
    base = optimizer_of(engine)
    truth["step"] = sorted({float(s["step"]) for s in base.state.values() if "step" in s})
    truth["groups"] = [{k: v for k, v in g.items() if k != "params" and not k.startswith("_ds")} for g in base.param_groups]
    truth["counters"] = [engine.global_steps, engine.global_samples, engine.skipped_steps]
    truth["scheduler"] = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    return truth


def _full(engine: Any, p: torch.nn.Parameter, key: str) -> torch.Tensor:
    if hasattr(p, "ds_id") or hasattr(p, "_hp_mapping"):
        value = safe_get_full_fp32_param(p) if key == "master" else safe_get_full_optimizer_state(p, key)
    else:
        master = _plain_masters(engine)[p]
        value = master if key == "master" else optimizer_of(engine).state[master][key]
    assert value is not None, f"DeepSpeed has no {key} for a parameter of shape {tuple(p.shape)}"
    return value.detach().cpu().clone()


def _plain_masters(engine: Any) -> dict[torch.nn.Parameter, torch.Tensor]:
    optimizer = engine.optimizer
    if not hasattr(optimizer, "fp16_groups"):
        return {p: p for g in optimizer.param_groups for p in g["params"]}
    if hasattr(optimizer, "fp32_groups"):
        return {
            p: m
            for ps, ms in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            for p, m in zip(ps, ms, strict=True)
        }
    raise NotImplementedError(type(optimizer).__name__)


def comparable(expected: Truth, found: Truth, source: Any, target: Any) -> tuple[Truth, Truth]:
    """Return states that should be equal. Weights in another precision than the source's are the cast of its masters.

    Floating-point buffers have the dtype that this DeepSpeed gives them: 0.18 casts them to bf16, 0.19 does not.
    """
    expected = dict(expected)
    low, high = (layout.precision != "fp32" for layout in (source, target))
    if low != high:
        dtype = torch.bfloat16 if high else torch.float32
        for key in [k for k in expected if k.startswith("weight/")]:
            expected[key] = expected.get(key.replace("weight/", "master/"), expected[key]).to(dtype)
    for key in [k for k in expected if k.startswith("buffer/") and expected[k].is_floating_point()]:
        expected[key] = expected[key].to(found[key].dtype)
    return expected, found


def differences(expected: Truth, found: Truth, *, ignore: tuple[str, ...] = ()) -> list[str]:
    """Return the differences, bit for bit (also of NaNs). A different dtype counts, except for weights."""
    out = [f"{key}: only on one side" for key in sorted(expected.keys() ^ found.keys()) if not key.startswith(ignore)]
    for key in expected.keys() & found.keys():
        if key.startswith(ignore):
            continue
        a, b = expected[key], found[key]
        if isinstance(a, torch.Tensor):
            same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
        else:
            same = a == b
        if not same:
            out.append(f"{key}: {_short(a)} expected, {_short(b)} found")
    return sorted(out)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} sum {value.double().sum().item():.9g}"
    return str(value)[:200]
