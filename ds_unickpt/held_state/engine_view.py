"""What an engine holds on this rank. A save or a load reads it here, and reads each part once."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from ds_unickpt.framework import internals, partitions, tensor_parallel
from ds_unickpt.framework.partitions import Partition
from ds_unickpt.held_state.names import KnownNames, ModuleNames
from ds_unickpt.held_state.optimizer_record import ElementStates, classify
from ds_unickpt.placing.placement import Placement
from ds_unickpt.placing.slices import RankValues, Slices
from unickpt.checkpoint.format.dtypes import name_of
from unickpt.checkpoint.save.late_copy import silent_steps

EXTRA_STATE = "module_extra_state"  # key in the objects of the job; the shared objects of other ranks start with it
MICRO_BATCHES = "pipeline_micro_batches"  # key in the objects of the job
SCALARS = "scalars"  # key in the objects of a rank and in the announcement


class EngineView:
    """What an engine holds on this rank. Each attribute is read when it is needed first. Calls no collective.

    The attributes raise UnsupportedLayoutError or FormatError if unickpt does not support the job.

    Args:
        engine: the DeepSpeedEngine.
        names: of an earlier read.
        ranges: of an earlier read.
    """

    def __init__(self, engine: Any, names: KnownNames | None = None, ranges: partitions.KnownRanges | None = None) -> None:
        self.engine = engine
        self._known_names, self._known_ranges = names or KnownNames(), ranges or partitions.KnownRanges()

    @property
    def rank(self) -> int:
        return int(self.engine.global_rank)

    @property
    def world(self) -> int:
        return int(self.engine.world_size)

    @cached_property
    def wrapper(self) -> str:
        """Kind of DeepSpeed's optimizer wrapper (``internals.wrapper_of``)."""
        return internals.wrapper_of(self.engine)

    @cached_property
    def base(self) -> torch.optim.Optimizer | None:
        """The optimizer below the wrapper; None without an optimizer."""
        return internals.base_optimizer(self.engine)

    @cached_property
    def slices(self) -> Slices:
        """The part of each parameter on this rank."""
        return tensor_parallel.slices(self.engine)

    @cached_property
    def names(self) -> ModuleNames:
        """Names of the module, with this tensor-parallel rank's own values."""
        return self._known_names.read(self.engine.module, self._values)

    @cached_property
    def _values(self) -> RankValues:
        return tensor_parallel.rank_values(self.engine, self.slices)

    @cached_property
    def placed(self) -> Placement:
        """Where this rank stands among the ranks of the job."""
        return partitions.placement(self.engine, self.names.experts.values(), self._values)

    @cached_property
    def parts(self) -> list[Partition]:
        """What the optimizer holds."""
        return partitions.partitions(self.engine, self.placed, self._known_ranges)

    @cached_property
    def kinds(self) -> ElementStates:
        """Kinds of the optimizer's states."""
        return classify(self.parts, self.base)

    def states(self, part: Partition) -> dict[str, torch.Tensor]:
        """Return the elementwise states of a partition."""
        state = {} if self.base is None else partitions.states_of(self.base, part)
        return {key: value for key, value in state.items() if key in self.kinds.tensors and value is not None}

    @cached_property
    def unsteady(self) -> str:
        """Why weights, masters and states may change between two steps of the base optimizer, or ''.

        Muon folds gradients into its momentum during the backward pass (``get_flat_partition`` of
        runtime/zero/stage_1_and_2.py). What lies on NVMe is read into buffers that the next parameters use again.
        """
        if self.base is None:
            return "the job has no optimizer"
        if any(part.swapped is not None or part.weights for part in self.parts):
            return "parameters or states lie on NVMe"
        if internals.is_muon(self.base):
            return "Muon changes its momentum in the backward pass"
        return silent_steps(self.base)

    @cached_property
    def topology(self) -> dict[str, Any]:
        """Parallel degrees and modes, for the manifest and for reports."""
        engine, placed = self.engine, self.placed
        dtypes = sorted(map(name_of, {p.dtype for p in self.names.parameters.values()}))
        sequence = int(getattr(engine, "sequence_parallel_size", 1))
        model_parallel = placed.stages > 1 or placed.tensors > 1
        degree = max((layer.degree for layer in self.names.experts.values()), default=1)
        return {
            "world_size": self.world,
            "zero_stage": int(engine.zero_optimization_stage()),
            "optimizer_wrapper": self.wrapper,
            "weight_dtypes": dtypes,
            **({"sequence": sequence} if sequence > 1 else {}),
            **({"tensor": placed.tensors} if placed.tensors > 1 else {}),
            **({"pipeline": placed.stages} if placed.stages > 1 else {}),
            **({"data": len(placed.data)} if model_parallel else {}),
            **({"expert": degree} if degree > 1 else {}),
        }

    def forget(self) -> None:
        """Release what was read. The next use reads it again."""
        for name in [name for name in vars(self) if isinstance(getattr(type(self), name, None), cached_property)]:
            del vars(self)[name]
