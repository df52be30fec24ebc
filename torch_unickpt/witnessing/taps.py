"""What repeats micro-batches of a model of plain torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torch_unickpt.held_state.names import plain, without_ddp
from torch_unickpt.witnessing.held import Held
from unickpt.api.dtensors import is_dtensor
from unickpt.training.witness.counting import is_compiled
from unickpt.training.witness.repeating import Tap
from unickpt.training.witness.surroundings import Surroundings


class Sharded(Surroundings):
    """A model with parameters that are gathered when layers are called."""

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        self._modules = modules

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Free the gathered parameters afterwards: the next step changes the shards, and not those.

        After an exception halfway, FSDP2 would reduce no gradient any more: its state is reset.
        """
        try:
            yield
        except Exception:
            for module in self._modules:
                with contextlib.suppress(RuntimeError):  # only the root can
                    module.reset_iter_state()
            raise
        finally:
            for module in self._modules:
                module.reshard()


def tap_of(model: torch.nn.Module, held: Sequence[Sequence[Held]], world: int, *, within_layers: bool) -> Tap | None:
    """Return what repeats micro-batches; None if ranks cannot repeat what others have computed.

    Args:
        model: as the program calls it.
        held: parameters of each optimizer.
        world: number of ranks.
        within_layers: ranks compute parts of the same layers, as with tensor parallelism.
    """
    trained = {each.stepped.name: each.parameter for some in held for each in some if each.parameter.requires_grad}
    inner = without_ddp(model)
    sharded = {name: each for name, each in inner.named_modules() if isinstance(each, FSDPModule)}
    if len(held) != 1 or not trained or within_layers:
        return None
    if not sharded:
        alone = isinstance(model, DistributedDataParallel) or world == 1
        return None if not alone or any(map(is_dtensor, trained.values())) else Tap(inner, trained)
    if not hasattr(FSDPModule, "reset_iter_state"):  # an error halfway would leave FSDP2 as it is then
        return None
    if isinstance(model, DistributedDataParallel) or is_compiled(inner) or any(map(_reduces_unused, sharded.values())):
        return None
    modules = {name: each for name, each in sharded.items() if isinstance(each, torch.nn.Module)}
    return Tap(inner, trained, gathering=modules, plain=plain, surroundings=Sharded(list(sharded.values())))


def _reduces_unused(module: FSDPModule) -> bool:
    """Return whether a backward pass without gradients reduces zeros (torch/distributed/fsdp/_fully_shard/_fsdp_state.py)."""
    state = module._get_fsdp_state()
    own = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return any(bool(getattr(each, "reduce_scatter_unused_params", False)) for each in own)
