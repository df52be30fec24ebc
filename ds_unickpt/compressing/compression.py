"""Compression of gradients in a DeepSpeed job, and its residuals in a checkpoint.

Residuals are shared objects of a checkpoint, one of each rank. ``optimizer_residuals`` has those of DeepSpeed's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch

from ds_unickpt.compressing import compression_hooks
from ds_unickpt.framework import internals
from ds_unickpt.framework.internals import ZERO_1_2, ZERO_3, wrapper_of
from ds_unickpt.framework.versions import version
from ds_unickpt.held_state.names import ModuleNames
from ds_unickpt.runtime import EngineRuntime
from unickpt.base import hooks
from unickpt.base.logs import logger
from unickpt.base.options.job import AUTO, CompressionOptions
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.report import LoadReport
from unickpt.training.compression.carried import COMMON, STORED
from unickpt.training.compression.exchange import GradientExchange
from unickpt.training.compression.settings import NONE, Compression
from unickpt.training.compression.wire import GroupWire

_WRAPPERS = ("plain", "FP16_Optimizer", "FP16_UnfusedOptimizer", ZERO_1_2)


def settings_of(options: CompressionOptions) -> Compression:
    """Return the settings of a job; without a scheme if the job chooses it."""
    found = {item.name: getattr(options, item.name) for item in fields(Compression)}
    return Compression(**{**found, "scheme": NONE if options.scheme == AUTO else options.scheme})


def refusal(engine: Any) -> str:
    """Return why the gradients of a job cannot be compressed, as text; '' if they can."""
    kind, zero = wrapper_of(engine), engine.zero_optimization()
    found = {
        "ZeRO-3, which reduces each gradient to the rank that keeps its part": kind == ZERO_3,
        "a pipeline": engine.pipeline_parallelism,
        "tensor parallelism": int(engine.mp_world_size) > 1,
        "mixture of experts": bool(engine.has_moe_layers),
        "sequence parallelism": int(getattr(engine, "sequence_parallel_size", 1)) > 1,
        "sparse gradients": internals.sparse_gradients(engine),
        "an optimizer that reduces gradients by itself": not engine.enable_backward_allreduce,
        "ZenFlow": bool(getattr(engine.optimizer, "zenflow", False)),
        "gradient_allreduce_op sum": not getattr(engine, "gradient_average", True),
        '"contiguous_gradients": false': zero and not internals.contiguous_gradients(engine),
        '"reduce_scatter": false': zero and not engine.zero_reduce_scatter(),
        f"the optimizer wrapper {kind}": kind not in (*_WRAPPERS, ZERO_3),
    }
    return ", ".join(what for what, present in found.items() if present)


class CompressedEngine:
    """Compression of the gradients of one engine.

    Attributes:
        exchange: exchanges gradients, and holds what was not sent.
    """

    def __init__(self, engine: Any, settings: Compression) -> None:
        self._engine = engine
        self.exchange = GradientExchange(settings, GroupWire(engine.seq_data_parallel_group))
        names = ModuleNames.read(engine.module)
        self._names = {id(parameter): name for name, parameter in names.parameters.items()}
        self._parameters = names.parameters
        self._bucket: list[tuple[str, torch.Tensor]] | None = None
        self._sent = False

    # ---------------------------------------------------------------- reduction

    @contextlib.contextmanager
    def bucket_of_zero(self, tensor: torch.Tensor, communication_data_type: torch.dtype) -> Iterator[None]:
        """Note the gradients in a bucket of ZeRO for ``exchanged_bucket``.

        Args:
            tensor: the bucket, 1-D: whole gradients back to back.
            communication_data_type: key of the bucket in DeepSpeed.
        """
        found, at = [], 0
        for parameter in internals.bucket_parameters(self._engine.optimizer, communication_data_type):
            gradient = tensor.narrow(0, at, parameter.numel()).view(parameter.shape)
            found.append((self._names[id(parameter)], gradient))
            at += parameter.numel()
        self._bucket, self._sent = found, False
        try:
            yield
        finally:
            self._bucket = None

    def exchanged_bucket(self) -> bool:
        """Replace the gradients of the noted bucket by their mean, the first time. Returns whether there is a bucket.

        DeepSpeed has divided them by the number of ranks before.
        """
        if self._bucket is None:
            return False
        if not self._sent:
            scale = internals.loss_scale(self._engine)
            self.exchange.exchange(self._bucket, scale_in=self.exchange.world / scale, scale_out=scale)
            self._sent = True
        return True

    def exchanged(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Replace gradients of an engine without ZeRO by their mean. Returns whether all are those of parameters."""
        trained = ((name, p.grad) for name, p in self._parameters.items() if p.grad is not None and p.numel())
        names = {gradient.data_ptr(): name for name, gradient in trained}
        found = [(names.get(gradient.data_ptr(), ""), gradient) for gradient in gradients]
        if not all(name for name, _ in found):
            return False
        scale = internals.loss_scale(self._engine)
        self.exchange.exchange(found, scale_in=1 / scale, scale_out=scale)
        return True

    # ---------------------------------------------------------------- checkpoints

    def elements(self) -> dict[str, int]:
        """Return the number of elements of each parameter."""
        return {name: parameter.numel() for name, parameter in self._parameters.items()}

    def shared_objects(self) -> dict[str, Any]:
        """Return the shared objects that this rank stores."""
        rank = self.exchange.rank
        found = {f"{STORED}{rank}": self.exchange.residuals.to_object()}
        return found if rank else {**found, f"{STORED}{COMMON}": self.exchange.common.to_object()}


class RestoredResiduals:
    """Residuals of one load. ``read`` runs on all ranks before anything is set, ``apply`` after all ranks have read."""

    def __init__(self, compressed: CompressedEngine | None, checkpoint: Checkpoint, *, wanted: bool) -> None:
        """``wanted``: the load includes the optimizer."""
        self._compressed, self._checkpoint, self._wanted = compressed, checkpoint, wanted
        self._stored = f"{STORED}{COMMON}" in checkpoint.shared_names()
        self._found: GradientExchange | None = None
        self._same = True
        self._strange: list[str] = []

    def read(self) -> None:
        """Read the residuals of this rank, or those of all ranks if their number has changed.

        Raises:
            UnickptError: they are damaged or incomplete.
        """
        if self._compressed is None:
            return
        exchange = self._compressed.exchange
        self._found = GradientExchange(exchange.settings, exchange.wire)
        if self._stored and self._wanted:
            self._same = self._found.restore(lambda rank: self._object(str(rank)), self._object(COMMON))
            self._strange = self._found.keep_fitting(self._compressed.elements())

    def _object(self, name: str) -> Any:
        return self._checkpoint.shared_object(f"{STORED}{name}").value

    def apply(self, report: LoadReport) -> None:
        """Set the residuals, and report them."""
        key, state = "gradient_residuals", "object"
        if self._compressed is not None and self._found is not None:
            self._compressed.exchange.residuals = self._found.residuals
            self._compressed.exchange.common = self._found.common
        if not self._stored:
            if self._compressed is not None:
                report.add(key, state, "left out", "none was saved: they start at zero")
        elif self._compressed is None:
            report.add(key, state, "left out", "this job does not compress its gradients")
        elif not self._wanted:
            report.add(key, state, "left out", "not requested (load_optimizer_states or load_module_only)")
        elif self._strange:
            names = f"{', '.join(self._strange[:4])}{' and others' if len(self._strange) > 4 else ''}"
            report.add(
                key, state, "set", f"{len(self._strange)} parameters have other names or sizes, so theirs are zero: {names}"
            )
        elif self._same:
            report.add(key, state, "restored")
        else:
            report.add(key, state, "set", "another number of ranks: every rank has the mean of what the ranks had not sent")


def begin(runtime: EngineRuntime, engine: Any, options: CompressionOptions) -> CompressedEngine | None:
    """Compress the gradients of an engine, if the options ask for it and DeepSpeed's reduction allows it.

    Returns None if compression is off; then a warning of rank 0 has the reason.
    """
    settings = settings_of(options)
    if settings.scheme == NONE:
        return None
    reason = refusal(engine)
    if reason:
        if engine.global_rank == 0:
            logger.warning(
                "unickpt: gradients are not compressed, although compression.scheme is %s. This job uses %s.",
                settings.scheme,
                reason,
            )
        return None
    compressed = enabled(engine, settings)
    if compressed is None:
        return None
    start(runtime, engine, compressed)
    if engine.global_rank == 0:
        logger.info("unickpt: gradients are compressed: %s", settings)
    return compressed


def enabled(engine: Any, settings: Compression) -> CompressedEngine | None:
    """Return a compression that has not begun. None if it is off, or this job cannot compress its gradients."""
    if settings.scheme == NONE or refusal(engine):
        return None
    if not hooks.install(compression_hooks.HOOKS, framework="DeepSpeed", version=version(), lost="no compression"):
        return None
    return CompressedEngine(engine, settings)


def start(runtime: EngineRuntime, engine: Any, compressed: CompressedEngine) -> None:
    """Compress the gradients of an engine from now on."""
    runtime.compressed[_reducer(engine)] = compressed


def stop(runtime: EngineRuntime, engine: Any) -> None:
    """Leave the gradients of an engine to DeepSpeed from now on."""
    runtime.compressed.pop(_reducer(engine), None)


def _reducer(engine: Any) -> Any:
    return engine.optimizer if wrapper_of(engine) == ZERO_1_2 else engine
