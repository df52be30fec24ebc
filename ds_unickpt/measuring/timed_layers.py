"""Layers of a DeepSpeed model, and pipelines with stages of given layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_unickpt.framework import internals
from unickpt.diagnosis.recording.layer_times import TimedLayer


def layers_of(model: torch.nn.Module) -> list[TimedLayer]:
    """Return the layers that this rank has.

    A pipeline has its layers. Another model has those of its largest ``ModuleList``, or ``Sequential`` if it has no such list,
    and its embeddings if it names them as models of transformers do. ZeRO-3 partitions parameters; a layer computes with the
    whole ones.
    """
    found = internals.pipeline_layers(model)
    if found is not None:
        first, total, functions = found
        rows = []
        seen: set[int] = set()
        for number, function in enumerate(functions, start=first):
            if isinstance(function, torch.nn.Module) and id(function) not in seen:
                seen.add(id(function))  # a tied layer that is on this rank twice counts once
                rows.append(_layer(number, str(number), "layer", function, total))
        return rows
    return _in_lists(model)


def _in_lists(model: torch.nn.Module) -> list[TimedLayer]:
    found: dict[type[Any], list[tuple[str, Any]]] = {torch.nn.ModuleList: [], torch.nn.Sequential: []}
    for name, each in model.named_modules():
        for kind, lists in found.items():
            if isinstance(each, kind):
                lists.append((name, each))
    candidates = next((lists for lists in found.values() if lists), None)
    if candidates is None:
        return []
    name, largest = max(candidates, key=lambda each: parameters_of(each[1]))
    total = len(largest) + 2
    rows = [_layer(at, f"{name}.{at - 1}".lstrip("."), "layer", module, total) for at, module in enumerate(largest, start=1)]
    for number, role, getter in ((0, "embedding", "get_input_embeddings"), (total - 1, "loss", "get_output_embeddings")):
        named: Callable[[], Any] | None = getattr(model, getter, None)
        module = named() if named is not None else None
        if isinstance(module, torch.nn.Module):
            rows.append(_layer(number, getter.removeprefix("get_"), role, module, total))
    return rows


def _layer(number: int, name: str, role: str, module: torch.nn.Module, total: int) -> TimedLayer:
    return TimedLayer(number, name, role, module, total, parameters_of(module))


def parameters_of(module: torch.nn.Module) -> int:
    """Return the number of parameters of a module, whole ones also under ZeRO-3."""
    return sum(getattr(each, "ds_numel", each.numel()) for each in module.parameters())


def stage_layers(layers: Sequence[Any], parts: Sequence[int]) -> tuple[list[Any], str]:
    """Return layers and a ``partition_method`` with which ``PipelineModule`` makes stages of given layers.

    ``PipelineModule`` takes no parts. It can balance the number of layers whose class has a given name, so the first layer of
    each stage becomes an instance of a subclass with such a name. Parameters, names and checkpoints stay the same.

    Args:
        layers: layers or ``LayerSpec`` of ``PipelineModule``.
        parts: first layer of each stage, and the number of layers, as from ``unickpt plan pipeline``.

    Returns:
        Arguments ``layers`` and ``partition_method`` of ``PipelineModule``.

    Raises:
        ValueError: ``parts`` does not cut the layers into stages, or this version of DeepSpeed balances in another way.

    Example:
        >>> layers, method = ds_unickpt.stage_layers(layers, [0, 5, 8])
        >>> module = PipelineModule(layers, num_stages=2, partition_method=method)
    """
    from deepspeed.runtime.utils import partition_balanced

    parts = list(parts)
    if len(parts) < 2 or parts[0] != 0 or parts[-1] != len(layers) or parts != sorted(set(parts)):
        raise ValueError(f"parts must ascend from 0 to the number of layers, {len(layers)}, not {parts}")
    stages = len(parts) - 1
    for marks in (parts[:-1], [end - 1 for end in parts[1:]]):
        weights = [int(at in marks) for at in range(len(layers))]
        if list(map(int, partition_balanced(weights=weights, num_parts=stages))) == parts:
            return [_marked(layer) if at in marks else layer for at, layer in enumerate(layers)], f"type:{MARK}"
    raise ValueError(f"this version of DeepSpeed cannot make the parts {parts}")


MARK = "UnickptStage"


def _marked(layer: Any) -> Any:
    """Return a layer whose class has ``MARK`` in its name."""
    if hasattr(layer, "typename"):  # LayerSpec
        marked = copy.copy(layer)  # one object may be in the list several times
        marked.typename = _subclass(layer.typename)
        return marked
    if isinstance(layer, torch.nn.Module):
        marked = copy.copy(layer)  # shares its parameters
        marked.__class__ = _subclass(type(layer))
        return marked

    def called(*args: Any) -> Any:
        return layer(*args)

    called.__name__ = MARK
    return called


def _subclass(kind: Any) -> Any:
    if not isinstance(kind, type):

        def made(*args: Any, **kwargs: Any) -> Any:
            return kind(*args, **kwargs)

        made.__name__ = f"{getattr(kind, '__name__', 'layer')}{MARK}"
        return made
    named = kind.__name__ if MARK in kind.__name__ else f"{kind.__name__}{MARK}"
    return type(named, (kind,), {"__module__": kind.__module__})
