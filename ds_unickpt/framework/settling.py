"""Hooks before functions of DeepSpeed that change the state between two steps, past torch's count of versions.

They wait for the copies that a save makes behind training (``unickpt.checkpoint.save.late_copy``). Without them such a save is
given up, because its copies are checked. A witness then does not compare what it has seen before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_unickpt.framework.declaration import declared
from ds_unickpt.framework.versions import ENGINE, version
from unickpt.base import hooks

_ZERO_3 = "deepspeed.runtime.zero.stage3"


def _settled(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    from unickpt.checkpoint.save.late_copy import settle_all
    from unickpt.training.witness.watching import forget_all

    settle_all()
    forget_all()
    return wrapped(*args, **kwargs)


HOOKS = [
    declared(
        f"deepspeed.settle.{name}", module, attribute, _settled, strict=False, why=why, until="DeepSpeed announces such writes"
    )
    for name, module, attribute, why in (
        (
            "fragment",
            "deepspeed.utils.tensor_fragment",
            "tensor_fragment.get_hp_fragment",
            "safe_set_full_fp32_param and its siblings write masters and states through .data",
        ),
        (
            "full",
            _ZERO_3,
            "DeepSpeedZeroOptimizer_Stage3.set_full_hp_param",
            "under ZeRO-3 safe_set_full_fp32_param writes a partition through .data",
        ),
        (
            "local",
            _ZERO_3,
            "DeepSpeedZeroOptimizer_Stage3.set_local_hp_param",
            "under ZeRO-3 safe_set_local_fp32_param writes a partition through .data",
        ),
        (
            "offload",
            ENGINE,
            "DeepSpeedEngine.offload_states",
            "offload_states moves masters and states between two steps",
        ),
        (
            "reload",
            ENGINE,
            "DeepSpeedEngine.reload_states",
            "reload_states moves masters and states back between two steps",
        ),
    )
]


def install() -> None:
    """Install the hooks, for a job whose saves copy behind training, or that has a witness."""
    hooks.install(HOOKS, framework="DeepSpeed", version=version(), lost="saves beside DeepSpeed's setters may be given up")
