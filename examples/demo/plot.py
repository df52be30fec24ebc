"""Plots the loss of the chain and of an uninterrupted run, and their difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

LEG_COLORS = ("#0072b2", "#d55e00", "#009e73", "#aa4499")
REFERENCE_COLOR = "#b8bec6"
MARK_COLOR = "#8c959f"
TEXT_COLOR = "#30363d"
STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#d0d7de",
    "axes.labelcolor": TEXT_COLOR,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "text.color": TEXT_COLOR,
    "xtick.color": TEXT_COLOR,
    "ytick.color": TEXT_COLOR,
}

Losses = Mapping[int, float]


@dataclass(frozen=True)
class Curve:
    """Losses of one training by global step, and its label in the picture."""

    label: str
    losses: Losses


def difference(a: Losses, b: Losses) -> dict[int, float]:
    """Return the absolute difference at the steps of both."""
    return {step: abs(a[step] - b[step]) for step in sorted(a.keys() & b.keys())}


def draw(path: Path, legs: Sequence[Curve], reference: Curve, other: Curve) -> None:
    """Write the picture as PNG.

    Args:
        legs: the chain, one curve per process group, in order.
        reference: an uninterrupted run.
        other: an uninterrupted run under another layout. Its distance from ``reference`` is the effect of the layout.
    """
    with plt.rc_context(STYLE):
        figure, (top, bottom) = plt.subplots(
            2, 1, figsize=(9, 6), sharex=True, height_ratios=(5, 2), layout="constrained", facecolor="white"
        )
        _losses(top, legs, reference)
        _differences(bottom, legs, reference, other)
        for axes in (top, bottom):
            _mark_hand_overs(axes, legs)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _losses(axes: Axes, legs: Sequence[Curve], reference: Curve) -> None:
    axes.plot(*_points(reference.losses), color=REFERENCE_COLOR, linewidth=7, solid_capstyle="round", label=reference.label)
    for at, leg in enumerate(legs):
        color = _color(at)
        axes.plot(*_points(leg.losses), color=color, linewidth=1.8, marker="o", markersize=3)
        middle = (min(leg.losses) + max(leg.losses)) / 2
        over = axes.get_xaxis_transform()
        axes.text(middle, 0.97, leg.label, color=color, ha="center", va="top", weight="bold", transform=over)
    axes.set_xlim(min(reference.losses) - 0.5, max(reference.losses) + 0.5)
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("One training, another layout after every stop", loc="left", weight="bold", fontsize=12)
    axes.legend(loc="lower left", frameon=False)


def _differences(axes: Axes, legs: Sequence[Curve], reference: Curve, other: Curve) -> None:
    axes.bar(*_in_millionths(difference(other.losses, reference.losses)), width=1, color=REFERENCE_COLOR, label=other.label)
    dots: dict[str, Any] = {"linewidth": 0, "marker": "o", "markersize": 3.5, "zorder": 3}
    for at, leg in enumerate(legs):
        axes.plot(*_in_millionths(difference(leg.losses, reference.losses)), color=_color(at), clip_on=False, **dots)
    axes.plot([], [], color=TEXT_COLOR, label="the chain", **dots)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("global step")
    axes.set_ylabel("millionths of a nat")
    axes.set_title(f"Distance in loss from the {reference.label} run", loc="left", fontsize=10)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1, ncols=2, frameon=False)


def _mark_hand_overs(axes: Axes, legs: Sequence[Curve]) -> None:
    for at, leg in enumerate(legs):
        begin, end = min(leg.losses) - 0.5, max(leg.losses) + 0.5
        axes.axvspan(begin, end, color=_color(at), alpha=0.06, linewidth=0, zorder=0)
        if at:
            axes.axvline(begin, color=MARK_COLOR, linewidth=1, linestyle=(0, (4, 3)))


def _color(leg: int) -> str:
    return LEG_COLORS[leg % len(LEG_COLORS)]


def _points(losses: Losses) -> tuple[list[int], list[float]]:
    return sorted(losses), [losses[step] for step in sorted(losses)]


def _in_millionths(losses: Losses) -> tuple[list[int], list[float]]:
    return _points({step: 1e6 * value for step, value in losses.items()})
