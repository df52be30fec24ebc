"""Hooked methods of Megatron's optimizers: their state by parameter, where a save or a load of unickpt asks for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import CheckpointingException, ShardedTensorFactory

from megatron_unickpt.framework.optimizer_internals import unsupported_reason
from megatron_unickpt.held_state import optimizer
from megatron_unickpt.held_state.hyperparameters import OptimizerPart
from megatron_unickpt.runtime import Purpose, Runtime, ScriptCall
from unickpt.base.errors import UnsupportedLayoutError
from unickpt.base.logs import logger
from unickpt.base.switch import switch
from unickpt.training.witness.watching import forget_all
from unickpt.transform.convert.megatron import keys


def hooked_state_dict(
    runtime: Runtime,
    wrapped: Callable[..., Any],
    instance: Any,
    model_sharded_state_dict: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrap ``optimizer.sharded_state_dict``: return model space if the metadata, the scripts or the switch select it.

    Otherwise the result is in Megatron's form, and a save or load of unickpt can still describe it by parameter. Selected by
    the switch, the state in Megatron's form is made when a save or load of Megatron's own format needs it: it may gather.
    """
    metadata = kwargs.get("metadata") or {}
    by_scripts = runtime.call.purpose in (Purpose.SAVE, Purpose.LOAD)  # 0.12 passes no metadata
    switched = runtime.call.purpose is None and switch().saves
    selected = metadata.get(keys.MARK) or by_scripts
    reason = unsupported_reason(instance)
    if not selected and not (switched and not reason):
        known = {} if reason or runtime.call.purpose is Purpose.NATIVE else optimizer.items_of(model_sharded_state_dict)
        if not known:
            return wrapped(model_sharded_state_dict, *args, **kwargs)
        return optimizer.MegatronsForm(_in_megatrons_form(wrapped, model_sharded_state_dict, *args, **kwargs), instance, known)
    native = partial(_natively, runtime, wrapped, model_sharded_state_dict, *args, **kwargs)
    if reason:
        return _as_megatron_describes_it(runtime, reason, native)
    is_loading = bool(args[0]) if args else bool(kwargs.get("is_loading", False))
    try:
        later = not is_loading and instance in runtime.known.optimizers
        state = optimizer.sharded_state_dict(instance, model_sharded_state_dict, is_loading=is_loading, later=later)
    except UnsupportedLayoutError as err:
        if selected:
            raise
        return _as_megatron_describes_it(runtime, str(err), native)
    if not selected:
        state[optimizer.PART].obj.native = native
    return state


def _natively(runtime: Runtime, wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call Megatron's function. An optimizer in a chain is described by its own hooked function, in the same form."""
    with runtime.during(ScriptCall(Purpose.NATIVE)):
        return wrapped(*args, **kwargs)


def _as_megatron_describes_it(runtime: Runtime, reason: str, native: Callable[[], Any]) -> Any:
    if runtime.is_news(reason):
        logger.warning(
            "unickpt: not supported: %s. Its state is stored as Megatron describes it, and loads only where Megatron's "
            "own checkpoint would.",
            reason,
        )
    return native()


def _in_megatrons_form(wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the state dict in Megatron's form. If there is none, it raises Megatron's error when another program uses it.

    The form that Megatron describes without metadata has been impossible since 0.15.
    """
    try:
        return wrapped(*args, **kwargs)
    except CheckpointingException as err:
        err.__traceback__ = None  # its frames hold the state
        return {"optimizer": ShardedTensorFactory("optimizer", torch.empty(0), partial(_raise, err), lambda _: None)}


def _raise(err: Exception, *_: Any) -> Any:
    raise err


def hooked_load(wrapped: Callable[..., Any], state_dict: Any) -> Any:
    """Wrap ``optimizer.load_state_dict``: load a state dict in model space."""
    forget_all()
    part = state_dict.get(optimizer.PART) if isinstance(state_dict, dict) else None
    if not isinstance(part, OptimizerPart):
        return wrapped(state_dict)
    optimizer.load_state_dict(part)
    state_dict.pop(optimizer.TENSORS, None)
    return None
