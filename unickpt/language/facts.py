"""What is known of a model beyond the shapes of its tensors: numbers that tell heads apart, and its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unickpt.errors import MismatchError

FACTS = {
    "layers": "transformer layers",
    "heads": "attention heads, of queries",
    "groups": "groups of heads that share a key and a value",
    "head_dim": "elements of a head",
    "experts": "routed experts of a layer",
    "vocab": "entries of the vocabulary, without padding",
    "query_rank": "of the low-rank queries of multi-latent attention",
    "latent_rank": "of the latent keys and values of multi-latent attention",
    "plain_dim": "elements of a head's query and key without a position, in multi-latent attention",
    "rotary_dim": "those with one",
    "value_dim": "elements of a head's value, in multi-latent attention",
}


@dataclass(frozen=True)
class Model:
    """Attributes: family, as transformers names it (``model_type``), or ''; facts, by the names of ``FACTS``."""

    family: str = ""
    facts: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For a manifest; empty if nothing is known."""
        return {"family": self.family, "facts": dict(self.facts)} if self.family or self.facts else {}

    @classmethod
    def from_json(cls, value: Any) -> Model:
        """What a manifest says; what is not of this form is not known."""
        if not isinstance(value, dict):
            return cls()
        family, facts = value.get("family"), value.get("facts")
        known = {
            name: number
            for name, number in (facts.items() if isinstance(facts, dict) else ())
            if name in FACTS and type(number) is int and 0 < number < 1 << 40
        }
        return cls(family if isinstance(family, str) else "", known)

    def with_more(self, other: Model, where: str) -> Model:
        """This job's model, and what a checkpoint tells of the same one.

        Args:
            other: what the checkpoint tells.
            where: it is.

        Raises:
            MismatchError: they are not the same.
        """
        for name in sorted(self.facts.keys() & other.facts.keys()):
            if self.facts[name] != other.facts[name]:
                raise MismatchError(f"{where}: {other.facts[name]} {FACTS[name]}; this job's model has {self.facts[name]}")
        return Model(self.family or other.family, {**other.facts, **self.facts})
