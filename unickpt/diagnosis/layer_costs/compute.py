"""Time of a layer at another size or on another device, from measured layers of this job and of earlier ones.

Layers of one class and data type on one kind of device have a line: ``constant + slope * work``, where work is the number of
tokens times the number of parameters, to which the operations of matrix products are proportional. With one size the constant
is 0. A layer of another size takes its own measured time, times the ratio of both places on the line. On another kind of device
it takes that, times the median ratio of the classes that were measured on both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from unickpt.diagnosis.layer_costs.measured import MeasuredLayer

LayerKey = tuple[str, str, str]  # device, class and data type of a layer
SIGMA = 1.4826  # standard deviation / median absolute deviation


@dataclass(frozen=True, slots=True)
class WorkLine:
    """Seconds of a forward and backward computation by work."""

    constant_s: float
    slope_s: float

    def at(self, work: float) -> float:
        return self.constant_s + self.slope_s * work


class ComputeCosts:
    """Predictor of the times of layers, from measured layers of any jobs."""

    def __init__(self, samples: Iterable[MeasuredLayer]) -> None:
        points: dict[LayerKey, dict[float, list[float]]] = {}
        for each in samples:
            time_s = each.forward_s + each.backward_s
            if each.tokens and each.parameters and time_s > 0:
                points.setdefault(key_of(each), {}).setdefault(work_of(each), []).append(time_s)
        self.lines: Mapping[LayerKey, WorkLine] = {key: _line(found) for key, found in points.items()}
        self._works = {key: sorted(found) for key, found in points.items()}
        self._points = points

    def expected(self, layer: MeasuredLayer) -> float | None:
        """Return the seconds of a layer, forward and backward; None if its class was not measured so."""
        line = self.lines.get(key_of(layer))
        return line.at(work_of(layer)) if line is not None and layer.tokens and layer.parameters else None

    def error(self, layer: MeasuredLayer) -> float:
        """Return the spread of the measured times on its line, as a share of the expected ones."""
        line = self.lines[key_of(layer)]
        points = self._points[key_of(layer)]
        return SIGMA * median(abs(time_s / line.at(work) - 1) for work, times in points.items() for time_s in times)

    def resized(self, layer: MeasuredLayer, tokens: float, shards: float) -> MeasuredLayer:
        """Return a layer with other sizes: its times, parameters and memory.

        Args:
            layer: measured layer.
            tokens: new number of tokens as a multiple of the measured one.
            shards: number of parts of its weights as a multiple of the measured one.
        """
        factor = tokens / shards
        line = self.lines.get(key_of(layer))
        if line is not None and layer.tokens and layer.parameters:
            work = work_of(layer)
            factor = line.at(work * factor) / line.at(work)
        return replace(
            layer, forward_s=layer.forward_s * factor, backward_s=layer.backward_s * factor,
            parameters=round(layer.parameters / shards), activation_bytes=round(layer.activation_bytes * tokens / shards),
            input_bytes=round(layer.input_bytes * tokens), tokens=round(layer.tokens * tokens),
        )  # fmt: skip

    def speed(self, device: str, measured: str) -> float | None:
        """Return the speed of a kind of device as a multiple of that of another one; None if no class was measured on both."""
        ratios = []
        for key, line in self.lines.items():
            name, kind, dtype = key
            other = self.lines.get((measured, kind, dtype))
            if name == device and other is not None:
                ratios += [other.at(work) / line.at(work) for work in self._works[key]]
        return median(ratios) if ratios else None


def key_of(layer: MeasuredLayer) -> LayerKey:
    """Return what layers of one line have in common."""
    return layer.device, layer.kind, layer.dtype


def work_of(layer: MeasuredLayer) -> float:
    """Return tokens times parameters."""
    return float(layer.tokens) * float(layer.parameters)


def _line(points: Mapping[float, list[float]]) -> WorkLine:
    """Fit a line to the medians of each work, with the least relative error and without negative parts."""
    works = np.array(sorted(points))
    seconds = np.array([median(points[work]) for work in works.tolist()])
    if len(works) > 1:
        columns = np.stack([1 / seconds, works / seconds], axis=1)
        constant, slope = np.linalg.lstsq(columns, np.ones(len(works)), rcond=None)[0].tolist()
        if constant >= 0 and slope > 0:
            return WorkLine(constant, slope)
    return WorkLine(0.0, float(np.median(seconds / works)))
