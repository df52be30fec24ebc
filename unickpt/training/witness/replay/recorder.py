"""Records the steps of a job that ``unickpt replay-step`` has started, and ends its process after the last one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from unickpt.base.logs import logger
from unickpt.base.step_replay import ReplayRequest
from unickpt.training.witness.agreeing import Ranks
from unickpt.training.witness.hashes import hashes
from unickpt.training.witness.held import Stepped, local
from unickpt.training.witness.replay import records
from unickpt.training.witness.replay.layers import LayerTap, hash_of
from unickpt.training.witness.replay.records import Phase, Record, Row

Gradients = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class Recorder:
    """Records what a rank computes from the loaded step on. All ranks make the same calls.

    Args:
        request: what is asked.
        ranks: of the job.
        held: returns what steps of each optimizer change on this rank.
        buffers: of the model, by name.
        model_parallel: number of ranks that compute one replica of the model together.
        inexact: as of ``Record``.
    """

    def __init__(
        self, request: ReplayRequest, ranks: Ranks, held: Sequence[Callable[[], Sequence[Stepped]]],
        buffers: Callable[[], Mapping[str, torch.Tensor]] = dict, *, model_parallel: int = 1,
        inexact: str = "",
    ) -> None:  # fmt: skip
        self._request, self._ranks, self._held, self._buffers = request, ranks, held, buffers
        self._steps = [request.step] * len(held)
        facts = {"torch": torch.__version__, "threads": str(torch.get_num_threads()), "device": _device(ranks.device)}
        self._record = Record(ranks.rank, len(ranks.ranks), ranks.host, model_parallel, inexact, facts)
        self._layers: LayerTap | None = None
        self.hooks: list[Any] = []  # kept as long as the recorder

    def begin(self, layers: Callable[[], LayerTap]) -> None:
        """Record what was loaded. Of a request that asks for nothing more, the process ends here."""
        if self._ranks.leads:
            logger.warning(
                "unickpt: replay-step: this job has loaded step %d of %s. It ends after step %d, and saves nothing",
                self._request.step, self._request.directory, self._request.until,
            )  # fmt: skip
        for number in range(len(self._held)):
            self._hash_held(number)
        if self._request.until <= self._request.step:
            self._end()
        self._layers = layers()

    def add(self, phase: Phase, micro_batch: int, what: str, value: int) -> None:
        """Add a hash of the step that runs now."""
        self._record.rows.append(Row(min(self._steps) + 1, phase, micro_batch, what, value))

    def gradients(self, found: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Add the gradients that an optimizer uses."""
        for name, gradient in found:
            self.add(Phase.REDUCED, -1, name, hash_of([gradient]))

    def ended(self, number: int = 0) -> None:
        """A step of the n-th optimizer has ended. After the last step of all of them the process ends."""
        if self._steps[number] >= self._request.until:
            return  # of several optimizers, one steps more often
        self._steps[number] += 1
        with torch.no_grad():
            self._hash_held(number)
        if self._layers is not None and len(set(self._steps)) == 1:
            self._layers.begin_step()
        if min(self._steps) >= self._request.until:
            self._end()

    def _hash_held(self, number: int) -> None:
        step, rows = self._steps[number], self._record.rows
        every = [(each.called(key), tensor, each.moving) for each in self._held[number]() for key, tensor in each.read()]
        values = hashes([tensor for _, tensor, _ in every]).tolist()
        rows += [Row(step, Phase.HELD, -1, name, value, moving) for (name, _, moving), value in zip(every, values, strict=True)]
        if not number:
            rows += [Row(step, Phase.BUFFER, -1, name, hash_of([each])) for name, each in self._buffers().items()]

    def _end(self) -> None:
        """Write what was recorded, wait for the others, and end the process: nothing may be saved after it."""
        self._ranks.together(lambda: records.write(self._request.folder, self._record))
        if self._ranks.leads:
            logger.warning("unickpt: replay-step: step %d is recorded, and the job ends", self._request.until)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def named_gradients(
    optimizer: torch.optim.Optimizer, parts: Sequence[tuple[torch.Tensor, str, int, int]]
) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the gradients that a step of an optimizer uses, by the names of the parts of its tensors.

    Args:
        optimizer: about to step.
        parts: a tensor that it steps on, or a view of it; name of a part of it, and positions in the flat tensor.
    """
    of_place: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    for tensor, name, lo, hi in parts:
        of_place.setdefault(_place(tensor), []).append((name, lo, hi))
    for number, group in enumerate(optimizer.param_groups):
        for at, parameter in enumerate(group["params"]):
            if parameter.grad is None:
                continue
            gradient = local(parameter.grad)
            for name, lo, hi in of_place.get(_place(parameter), [(f"tensor {at} of group {number}", 0, gradient.numel())]):
                yield name, gradient if hi - lo == gradient.numel() else gradient.reshape(-1)[lo:hi]


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    found = local(tensor)
    return found.data_ptr(), found.numel()


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
