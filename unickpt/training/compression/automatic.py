"""The choice of one scheme for all gradients of a job, or of none, from a replay of its own records.

The hook of a framework compresses all parameters alike, so the choice is one scheme for all of them. ``top-k`` and ``random-k``
are not considered: they send an element late, which limits the learning rate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from unickpt.base.errors import ConfigError, FormatError
from unickpt.diagnosis.recording.records import Op
from unickpt.planning.replay import edits
from unickpt.planning.replay.trace import Trace
from unickpt.training.compression.advisor import LEAST_GAIN, BucketReplay, Candidate, measured_code_s
from unickpt.training.compression.exchange import GradientExchange
from unickpt.training.compression.settings import NONE, Compression
from unickpt.training.compression.sizes import sent_bytes

CONSIDERED = ("bf16", "int8", "sign", "powersgd")
_MOST = 1 << 22  # elements of the tensor with which the code is timed
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """What a job does from a step on.

    Attributes:
        settings: settings of the exchange; the scheme is ``none`` if compression does not pay.
        step: step after which the choice was made.
        reason: why, as text.
    """

    settings: Compression
    step: int
    reason: str

    def __str__(self) -> str:
        return f"compression: {self.settings.scheme}: {self.reason}"

    def as_json(self) -> dict[str, Any]:
        """Return the choice as JSON types."""
        return {"settings": self.settings.as_json(), "step": self.step, "reason": self.reason}

    @classmethod
    def from_json(cls, value: Any) -> Choice:
        """Return the choice from JSON types.

        Raises:
            FormatError: the value has another form.
        """
        try:
            return cls(Compression(**value["settings"]), int(value["step"]), str(value["reason"]))
        except (KeyError, TypeError, ValueError, ConfigError) as err:
            raise FormatError(f"the choice of a gradient compression does not have the expected form: {err}") from err


def chosen(
    trace: Trace,
    candidates: Mapping[str, Candidate],
    settings: Compression,
    *,
    step: int,
    world: int,
    least_gain: float = LEAST_GAIN,
) -> Choice:
    """Choose the scheme with the shortest replayed step.

    Args:
        trace: records of the job, which does not compress.
        candidates: schemes by name.
        settings: the other settings of the job.
        step: newest step of the job.
        world: number of ranks that must have records.
        least_gain: smallest gain that is worth it, as a share of the step.

    Raises:
        FormatError: ranks have no records, or the records do not have the same all-reduces in every step.
    """
    if len(trace.ranks) < world:
        raise FormatError(f"records of {len(trace.ranks)} of {world} ranks are here")
    replay = BucketReplay(trace, _label(trace), candidates, None)
    count = len(replay.transfers)
    large = replay.sizes >= 4 * max(settings.least_elements, 1)
    every = [[name if fits else NONE for fits in large] for name in candidates]
    plain = replay.with_schemes([NONE] * count)
    times = replay.steps_s([plain, edits.without_time(plain, replay.every()), *map(replay.with_schemes, every)])
    now, costs = float(times[0]), max(float(times[0] - times[1]), 0.0) / float(times[0])
    about = f"communication costs {costs:.1%} of a step"
    best = int(np.argmin(times[2:])) if candidates else -1
    if best < 0 or now - times[2 + best] <= least_gain * now:
        return Choice(replace(settings, scheme=NONE), step, f"{about}, no scheme saves {least_gain:.0%}")
    scheme = list(candidates)[best]
    about = (
        f"all gradients, {int(large.sum())} of {count} reductions; {about}, and a step of {now * 1e3:.1f} ms is predicted to "
        f"take {times[2 + best] * 1e3:.1f} ms"
    )
    return Choice(replace(settings, scheme=scheme), step, about)


def _label(trace: Trace) -> str:
    """Return the kind of group that reduces most bytes."""
    sums: dict[str, int] = {}
    reduced = trace.calls[trace.calls["op"] == Op.ALL_REDUCE]
    for at, group in enumerate(trace.groups):
        sums[group.label] = sums.get(group.label, 0) + int(reduced["bytes"][reduced["comm"] == at].sum())
    if not any(sums.values()):
        raise FormatError("the records have no all-reduce")
    return max(sums, key=lambda label: sums[label])


class _Echo:
    """A wire that gives back what is sent. What is left of an exchange is the time of its code."""

    rank = 0

    def __init__(self, world: int) -> None:
        self.world = world

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        return row.repeat(self.world, 1)


def timed_candidates(
    settings: Compression, shapes: Sequence[tuple[int, ...]], world: int, device: torch.device | str
) -> dict[str, Candidate]:
    """Return the considered schemes with their bytes and the time of their code on a device.

    Args:
        settings: the other settings of the job.
        shapes: those of the trained parameters.
        world: number of ranks.
        device: where the gradients are.
    """
    whole = sent_bytes(replace(settings, scheme=NONE), shapes, world)
    largest = max(shapes, key=math.prod)
    shape = largest if math.prod(largest) <= _MOST else (2048, 2048)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu").to(device)
    found = {}
    for name in CONSIDERED:
        scheme = replace(settings, scheme=name)
        exchange = GradientExchange(scheme, _Echo(world))

        def code(exchange: GradientExchange = exchange) -> None:
            exchange.exchange([("", gradient)])
            gradient.view(-1)[0].item()  # waits for the device

        code()
        code_s = measured_code_s(code, gradient.nbytes, time.perf_counter, _REPEATS)
        found[name] = Candidate(sent_bytes(scheme, shapes, world) / max(whole, 1), code_s, str(device))
    return found
