"""Modules that compute in a dtype of their own, by hooks. Weights, gradients and optimizer states keep their dtype.

There are two ways:

``AUTOCAST``: the module runs under ``torch.autocast``. Matrix products take bf16 copies of weights and inputs; operators that
need a wide range, such as normalization, stay in float32. Weights may be partitioned by ZeRO-3 at that time.

``CAST``: the module runs with bf16 copies of its weights and of its inputs. It is for modules with backward functions of their
own that do not know autocast, as Megatron's on a processor (``torch.amp.custom_fwd`` there is for CUDA).

In both ways gradients reach the float32 weights through the cast. Outputs are float32 again, unless the job itself runs under
autocast. A recomputation of the whole module in the backward pass has the same dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from unickpt.training.precision.policy import LOW

AUTOCAST, CAST = "autocast", "cast"
_LOW = torch.bfloat16
_NARROW = (torch.bfloat16, torch.float16)


def compute_in(module: torch.nn.Module, dtype: str, device: str, way: str = AUTOCAST) -> list[RemovableHandle]:
    """Let a module compute in a dtype.

    Args:
        module: module with float32 weights.
        dtype: ``bf16``, or ``fp32`` inside of a job under autocast.
        device: type of its device, such as ``cuda``.
        way: ``AUTOCAST`` or ``CAST``. A float32 module has the first.

    Returns:
        Handles of the hooks. Without the hooks, the module computes as before.
    """
    if dtype == LOW and way == CAST:
        return _hooked(module, _with_cast_weights(module))
    return _hooked(module, _under_autocast(dtype == LOW, device))


Leave = Callable[[Any], Any]  # takes the output of the module
Enter = Callable[[Any, Any], tuple[Any, Any, Leave]]  # takes args and kwargs


def _hooked(module: torch.nn.Module, enter: Enter) -> list[RemovableHandle]:
    entered: list[Leave] = []  # a module may be called inside of its own call

    def begins(_module: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs, leave = enter(args, kwargs)
        entered.append(leave)
        return args, kwargs

    def ends(_module: Any, _args: Any, _kwargs: Any, output: Any) -> Any:
        return entered.pop()(output) if entered else None

    return [
        module.register_forward_pre_hook(begins, with_kwargs=True),
        module.register_forward_hook(ends, with_kwargs=True, always_call=True),  # also after an error in the module
    ]


def _under_autocast(low: bool, device: str) -> Enter:
    def enter(args: Any, kwargs: Any) -> tuple[Any, Any, Leave]:
        within = torch.is_autocast_enabled(device)
        region = torch.autocast(device, dtype=_LOW, enabled=low)
        if not low:
            args, kwargs = _as(torch.float32, args), _as(torch.float32, kwargs)
        region.__enter__()  # type: ignore[no-untyped-call]

        def leave(output: Any) -> Any:
            region.__exit__(None, None, None)
            return output if within or not low else _as(torch.float32, output)

        return args, kwargs, leave

    return enter


def _with_cast_weights(module: torch.nn.Module) -> Enter:
    def enter(args: Any, kwargs: Any) -> tuple[Any, Any, Leave]:
        copies: dict[torch.Tensor, torch.Tensor] = {}
        places = [
            (each._parameters, name, parameter)
            for each in module.modules()
            for name, parameter in each._parameters.items()
            if parameter is not None and parameter.dtype is torch.float32
        ]
        for own, name, parameter in places:
            if parameter not in copies:
                copies[parameter] = parameter.to(_LOW)
            own[name] = copies[parameter]  # type: ignore[assignment]

        def leave(output: Any) -> Any:
            for own, name, parameter in places:
                own[name] = parameter
            return _as(torch.float32, output)

        return _as(_LOW, args), _as(_LOW, kwargs), leave

    return enter


def _as(dtype: torch.dtype, value: Any) -> Any:
    """Return nested values with their float tensors in another dtype."""
    if isinstance(value, torch.Tensor):
        others = _NARROW if dtype is torch.float32 else (torch.float32,)
        return value.to(dtype) if value.dtype in others else value
    if isinstance(value, tuple):
        cast = [_as(dtype, each) for each in value]
        return type(value)(*cast) if hasattr(value, "_fields") else tuple(cast)
    if isinstance(value, list):
        return [_as(dtype, each) for each in value]
    if type(value) is dict:
        return {key: _as(dtype, each) for key, each in value.items()}
    return value
