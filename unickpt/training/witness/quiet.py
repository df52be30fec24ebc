"""Hooks that a program does not notice: their errors do not reach it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def quiet(
    hook: Callable[..., object], failed: Callable[[Exception], object], *, loud: Callable[[], bool] = lambda: False
) -> Callable[..., None]:
    """Return a hook of a module that returns nothing, and gives its errors to ``failed``, which never raises.

    Such as the errors of a device without memory, or of any object that a program passes to its model.

    Args:
        hook: what is called.
        failed: gets the error.
        loud: whether the errors are raised now.
    """

    def called(*args: Any) -> None:
        try:
            hook(*args)
        except Exception as err:
            if loud():
                raise
            failed(err)

    return called


def quiet_gradient(hook: Callable[[torch.Tensor], object], failed: Callable[[Exception], object]) -> Callable[..., None]:
    """As ``quiet``, of a tensor. Without a gradient the hook is not called.

    torch calls the hook of a tensor with None if nothing uses it, but something else that the same operator has computed.
    """

    def called(gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        try:
            hook(gradient)
        except Exception as err:
            failed(err)

    return called


def ignore(_err: Exception) -> None:
    """Of what a check can leave out."""
