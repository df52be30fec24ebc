"""Residuals of torch's own PowerSGD hook, by parameter name.

``PowerSGDState`` keeps them by the number of a bucket. They belong to this rank, to this number of ranks and to these buckets;
``DistributedDataParallel`` forms others after its first step. Here they have the names of parameters between two steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from unickpt.base.errors import ConfigError
from unickpt.training.compression.carried import Common, NamedTensors, Residuals, own_or_resized


class CarriedPowerSGD:
    """State of ``carried_powersgd``: torch's state, and the parameters of its buckets.

    Example:
        The same hook with residuals in the checkpoint::

            carried = CarriedPowerSGD(module, PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=100))
            model.register_comm_hook(carried, carried_powersgd)
            ...
            residuals, common = carried.to_objects()  # rank_objects and objects of unickpt.save_checkpoint
            carried.restore(lambda rank: ..., common)

    Attributes:
        state: torch's state.
    """

    def __init__(self, module: torch.nn.Module, state: PowerSGDState) -> None:
        """Name the parameters.

        Args:
            module: the module inside ``DistributedDataParallel``.
            state: a new state of torch's hook.

        Raises:
            ConfigError: the state joins matrices of one shape (``batch_tensors_with_same_shape``).
        """
        if state.batch_tensors_with_same_shape:
            raise ConfigError("CarriedPowerSGD does not support batch_tensors_with_same_shape")
        self.state = state
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._errors: NamedTensors = {}
        self._factors: NamedTensors = {}
        self._buckets: dict[int, list[tuple[str, torch.Tensor]]] = {}

    # ---------------------------------------------------------------- buckets

    def before(self, bucket: GradBucket) -> None:
        """Give torch's state the residuals of a bucket, if its parameters are others than in the step before."""
        index = bucket.index()
        own = [(self._names[id(parameter)], parameter) for parameter in bucket.parameters()]
        before = self._buckets.get(index)
        if before is not None and [name for name, _ in before] == [name for name, _ in own]:
            return
        self._collect([each for each in self._buckets if each >= index])
        self._buckets[index] = own
        names = [name for name, _ in own]
        if any(name in self._errors for name in names):
            parts = [self._part(self._errors.pop(name, None), parameter) for name, parameter in own]
            self.state.error_dict[index] = torch.cat(parts).to(bucket.buffer())
        factors = [name for name, _, _ in self._matrices(own)]
        if factors and all(name in self._factors for name in factors):
            rows = sum(shape[0] * rank for _, shape, rank in self._matrices(own))
            self.state.p_memory_dict[index] = bucket.buffer().new_empty(rows)
            self.state.q_memory_dict[index] = torch.cat([self._factors.pop(name).reshape(-1) for name in factors]).to(
                bucket.buffer()
            )

    @staticmethod
    def _part(error: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
        return torch.zeros(parameter.numel(), device=parameter.device) if error is None else error.to(parameter.device)

    def _matrices(self, own: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, tuple[int, int], int]]:
        """Return name, shape and rank of the matrices that torch factors, in its order: by shape."""
        by_shape: dict[tuple[int, int], list[tuple[str, tuple[int, int], int]]] = defaultdict(list)
        for name, parameter in own:
            rows = parameter.shape[0] if parameter.dim() else 1
            shape = (rows, parameter.numel() // rows)
            rank = min(*shape, self.state.matrix_approximation_rank)
            if sum(shape) * rank * self.state.min_compression_rate < parameter.numel():
                by_shape[shape].append((name, shape, rank))
        return [each for found in by_shape.values() for each in found]

    def _collect(self, buckets: Sequence[int]) -> None:
        """Move the residuals of buckets from torch's state to their names."""
        errors, factors = self._by_name(buckets)
        self._errors |= errors
        self._factors |= factors
        for index in buckets:
            del self._buckets[index]
            for held in (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict):
                held.pop(index, None)

    def _by_name(self, buckets: Sequence[int]) -> tuple[NamedTensors, NamedTensors]:
        errors: NamedTensors = {}
        factors: NamedTensors = {}
        for index in buckets:
            own = self._buckets[index]
            if index in self.state.error_dict:
                parts = torch.split(self.state.error_dict[index], [parameter.numel() for _, parameter in own])
                errors |= {name: part.clone() for (name, _), part in zip(own, parts, strict=True)}
            if index in self.state.q_memory_dict:
                at = 0
                for name, (_, columns), rank in self._matrices(own):
                    factors[name] = self.state.q_memory_dict[index][at : at + columns * rank].view(columns, rank).clone()
                    at += columns * rank
        return errors, factors

    # ---------------------------------------------------------------- checkpoints

    def to_objects(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the object of this rank, and the object of the job, for a checkpoint between two steps."""
        group = self.state.process_group
        errors, factors = self._by_name(list(self._buckets))
        own = Residuals(dist.get_rank(group), dist.get_world_size(group), {**self._errors, **errors})
        common = Common(factors={**self._factors, **factors}).to_object()
        kind, keys, *numbers = self.state.rng.get_state(legacy=True)
        random = [kind, [int(key) for key in keys], *numbers]
        return own.to_object(), {**common, "iter": self.state.iter, "random": random}

    def restore(self, saved: Callable[[int], Any], common: Any) -> bool:
        """Take the residuals of a checkpoint, before the first step.

        Args:
            saved: returns the object of a rank of the saving job.
            common: the object of the job.

        Returns:
            Whether each rank got its own residuals. False: every rank got the mean, from another number of ranks.

        Raises:
            FormatError: objects of the checkpoint are missing or have another form.
        """
        group = self.state.process_group
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        found, same = own_or_resized(saved, rank, world)
        self._collect(list(self._buckets))
        self._errors, self._factors = found.sent, Common.from_object(common).factors
        self.state.iter = int(common["iter"])
        kind, keys, *numbers = common["random"]
        self.state.rng.set_state((kind, keys, *numbers))
        return same


def carried_powersgd(carried: CarriedPowerSGD, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Run torch's ``powerSGD_hook`` with residuals by name. Pass it to ``register_comm_hook``.

    On gloo, one bucket is exchanged after the other. A callback of torch's hook waits for a reduction in a thread of gloo, and
    gloo has two: with torch's own hook and several buckets, both may wait for ever.
    """
    carried.before(bucket)
    found: torch.futures.Future[torch.Tensor] = powerSGD_hook(carried.state, bucket)
    if bucket.buffer().device.type == "cpu":
        found.wait()
    return found


# register_comm_hook compares the annotations with these types, not with their names
carried_powersgd.__annotations__ = {
    "carried": CarriedPowerSGD, "bucket": GradBucket, "return": torch.futures.Future[torch.Tensor],
}  # fmt: skip
