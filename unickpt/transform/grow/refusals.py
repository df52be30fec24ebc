"""Reasons against a growth. They are values; ``text`` renders them last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from unickpt.base.errors import MismatchError

RefusalKind = Literal[
    "smaller", "unknown-size", "head-dim", "kv-heads", "divide", "square-heads", "post-norm", "layer-dependent", "epsilon",
    "place", "state", "no-rule", "experts", "vocabulary", "latent-rank", "activation", "bias", "family", "top-k", "granularity",
]  # fmt: skip

_TEXTS: dict[RefusalKind, str] = {
    "smaller": "{name} {old} to {new}: a smaller model cannot have the same outputs",
    "unknown-size": "{name}: this family has no such size; known are {more}",
    "head-dim": "head_dim {old} to {new}: rotary positions give each element of a head a frequency that depends on head_dim",
    "kv-heads": "{old} to {new} key and value heads: the {more} queries per head of the source do not fit; use {least} or more",
    "divide": "{old} heads cannot be divided among {new} key and value heads",
    "square-heads": "the width must be heads * {old} in this family, which has no head_dim in its configuration; use {more}",
    "post-norm": "{more}",
    "layer-dependent": "{name}: the layers depend on their number, so new layers change the old ones",
    "epsilon": "the configuration has no epsilon of the norms, which must be multiplied by {more} for the new width",
    "place": "place {more}: expected {old} increasing positions below {new}",
    "state": "{name}: no growth rule for this optimizer state; 'unickpt edit --no-optimizer' removes the optimizer first",
    "no-rule": "{name}: no growth rule for this tensor",
    "experts": "{name} {old} to {new}: more experts change the choice of the router; 'unickpt upcycle' makes experts",
    "vocabulary": "{name} {old} to {new}: 'unickpt edit --vocabulary' resizes the vocabulary",
    "latent-rank": "{name} {old} to {new}: the epsilon of the norm over this rank cannot be configured",
    "activation": "{name} is {more}: an expert must be a gated linear unit with SiLU",
    "bias": "{name}: experts and their attention have no bias in {more}",
    "family": "no family with experts is known for {name!r}; known are {more}",
    "top-k": "top-k {old} with granularity {new}: each token needs whole groups of segments, so top-k must be a multiple of it",
    "granularity": "{name} {old} cannot be divided into {new} equal parts",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a growth cannot be lossless.

    Attributes:
        kind: reason, a key for programs.
        name: size, tensor or family that it concerns, or ''.
        old, new: numbers of the source and the target.
        least: smallest possible number, where there is one.
        more: further text, such as known names.
    """

    kind: RefusalKind
    name: str = ""
    old: int = 0
    new: int = 0
    least: int = 0
    more: str = ""

    def text(self) -> str:
        """Return the sentence."""
        return _TEXTS[self.kind].format(name=self.name, old=self.old, new=self.new, least=self.least, more=self.more)


class NotLosslessError(MismatchError):
    """A growth was refused.

    Attributes:
        refusals: all reasons.
    """

    def __init__(self, where: str, refusals: Sequence[Refusal]) -> None:
        self.refusals = tuple(refusals)
        super().__init__(f"{where}: " + "; ".join(each.text() for each in refusals))
