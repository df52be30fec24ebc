"""State that only the own code of a module gives, in its state dict."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import torch

_EXTRA = "_extra_state"  # of torch, in a state dict


def of_module(
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    with_extra: Container[int],
    plain: Callable[[str], str],
    skipped: Callable[[torch.nn.Module], bool] = lambda _: False,
) -> list[str]:
    """Return the entries of a state dict that are neither parameters nor buffers nor extra states, by name.

    Modules without code of their own for a state dict are not asked.

    Args:
        module: the module.
        tensors: its parameters and persistent buffers under all of their names, as ``plain`` gives them.
        with_extra: ids of the modules of which the caller has ``get_extra_state``.
        plain: returns a name without the parts that wrappers add.
        skipped: whether the entries of a submodule do not count.
    """
    held = {_memory(each) for each in tensors.values()}
    passed = tuple(f"{plain(prefix)}." for prefix, child in module.named_modules() if prefix and skipped(child))
    named = module.named_modules(remove_duplicate=False)
    extra = {plain(f"{prefix}.{_EXTRA}" if prefix else _EXTRA) for prefix, child in named if id(child) in with_extra}
    found: dict[str, None] = {}
    for prefix, child in module.named_modules():
        if not _has_own_code(child) or skipped(child):
            continue
        try:
            entries = child.state_dict(keep_vars=True)
        except Exception as err:  # of the program, and no reason not to save the rest
            entries = {f"state_dict of {type(child).__name__} ({type(err).__name__}: {err})": None}
        for key, value in entries.items():
            name = plain(f"{prefix}.{key}" if prefix else str(key))
            shared = isinstance(value, torch.Tensor) and _memory(value) in held  # such as a part of a fused weight
            if name not in tensors and name not in extra and not shared and not name.startswith(passed):
                found[name] = None
    return list(found)


def _memory(tensor: torch.Tensor) -> int:
    """Return what a tensor and views of it have in common."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
        return id(tensor)


def _has_own_code(module: torch.nn.Module) -> bool:
    """Whether other code than that of all modules, and of FSDP, gives entries of a module's state dict."""
    kind, base = type(module), torch.nn.Module
    if kind.state_dict is not base.state_dict or kind._save_to_state_dict is not base._save_to_state_dict:
        return True
    hooks = [*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()]
    return any(not str(getattr(each, "__module__", "")).startswith("torch.distributed.") for each in hooks)
