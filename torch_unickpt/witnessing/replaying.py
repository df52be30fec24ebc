"""A training loop of one's own that ``unickpt replay-step`` has started: it records the steps after the load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel

from torch_unickpt.held_state.names import Names, names_of, plain, topology_of, without_ddp
from torch_unickpt.held_state.optimizers import unwrapped
from torch_unickpt.runtime import Runtime
from torch_unickpt.witnessing.held import Held, held_by
from unickpt.api.dtensors import is_dtensor
from unickpt.base.errors import ConfigError
from unickpt.base.step_replay import ReplayRequest
from unickpt.checkpoint.load.replayed import require_layout
from unickpt.checkpoint.save.late_copy import silent_steps
from unickpt.training.witness.agreeing import Ranks
from unickpt.training.witness.held import WEIGHT, Stepped, local
from unickpt.training.witness.replay.layers import LayerTap
from unickpt.training.witness.replay.recorder import Recorder, named_gradients


def begin(
    runtime: Runtime, request: ReplayRequest, model: torch.nn.Module, optimizer: Any, saved: Mapping[str, Any], group: Any
) -> None:
    """Record the steps of a model that was just loaded. Every rank calls it. Only the first load of a process counts.

    Raises:
        MismatchError: the layout is another one than that which saved the checkpoint.
        ConfigError: a step of an optimizer calls no hooks, or there is none.
    """
    if runtime.replay is not None:
        return
    optimizers, names = unwrapped(optimizer), names_of(model)
    silent = next(filter(None, map(silent_steps, optimizers)), "")
    if silent or not optimizers:
        reason = f"it sees the steps of an optimizer by its hooks: {silent or 'the job loads no optimizer'}"
        request.refuse(reason)
        raise ConfigError(f"unickpt replay-step: {reason}")
    held = [held_by(each, names, model) for each in optimizers]
    device = next((each.parameter.device for some in held for each in some), torch.device("cpu"))
    ranks = Ranks.of(group, device)
    require_layout(request, saved, topology_of(names, len(ranks.ranks)))
    recorder = Recorder(
        request, ranks, [partial(_stepped, some, names if not at else None) for at, some in enumerate(held)],
        lambda: names.buffers, model_parallel=_model_parallel(model, names, len(ranks.ranks)),
        inexact=_inexact(model, len(ranks.ranks)),
    )  # fmt: skip
    runtime.replay = recorder
    for number, (each, some) in enumerate(zip(optimizers, held, strict=True)):
        recorder.hooks += [
            each.register_step_pre_hook(partial(_before, recorder, some)),
            each.register_step_post_hook(_after(recorder, number)),
        ]
    recorder.begin(lambda: LayerTap([(model, without_ddp(model), "")], add=recorder.add, plain=plain))


def _stepped(held: Sequence[Held], names: Names | None) -> list[Stepped]:
    """Return what an optimizer steps on; with ``names``, also the parameters of the model that no optimizer has."""
    found = [each.stepped for each in held]
    if names is None:
        return found
    own = {each.name for each in found}
    rest = {name: tensor for name, tensor in names.parameters.items() if name not in own and not tensor.requires_grad}
    return found + [Stepped(name, partial(_weight, tensor)) for name, tensor in rest.items()]


def _weight(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [(WEIGHT, local(tensor))]


def _before(recorder: Recorder, held: Sequence[Held], optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    parts = [(each.parameter, each.stepped.name, 0, local(each.parameter).numel()) for each in held]
    with torch.no_grad():
        recorder.gradients(named_gradients(optimizer, parts))


def _after(recorder: Recorder, number: int) -> Callable[..., None]:
    return lambda *_: recorder.ended(number)


def _inexact(model: torch.nn.Module, world: int) -> str:
    """Return why the first step after a start adds gradients in another order than a later one, or ''."""
    rebuilds = isinstance(model, DistributedDataParallel) and (model.static_graph or not model.find_unused_parameters)
    if not rebuilds or world < 3:  # the sum of two has one order
        return ""
    return "DistributedDataParallel orders its buckets anew after its first step, so more than two ranks add in another order"


def _model_parallel(model: torch.nn.Module, names: Names, world: int) -> int:
    """Return the number of ranks that compute a replica together. Shards of ``fully_shard`` alone compute one each."""
    gathered = any(isinstance(each, FSDPModule) for each in model.modules())
    degree = 1
    for each in filter(is_dtensor, names.parameters.values()):
        found: Any = each
        sizes = [
            size for size, how in zip(found.device_mesh.shape, found.placements, strict=True) if not isinstance(how, Replicate)
        ]
        if len(sizes) > gathered:
            degree = max(degree, sizes[-1])
    return min(degree, world)
