"""Step that makes a mixture of experts of a dense model without a change of its outputs.

Experts are numbered ``group * granularity + segment``. Each expert is one segment of the neurons, and the segments of a group
share a row of the router. The router takes the top k and then the softmax of these. Whole groups are chosen, so the weights of
a group sum to its softmax, and each segment gets 1 / granularity of it. Multiplying the down projection by the granularity
compensates this exactly. Scaling all three projections by the cube root does not, because SiLU is not linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from unickpt.base.errors import MismatchError
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.transform.convert.readings import Reading
from unickpt.transform.dialects.growth import Upcycling
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.registry import dialects
from unickpt.transform.edit.select import NoOptimizer
from unickpt.transform.edit.table import Table, TableEntry, count_of
from unickpt.transform.edit.transformers_names import under_memory_names
from unickpt.transform.grow.free_values import normal
from unickpt.transform.grow.refusals import NotLosslessError, Refusal
from unickpt.transform.grow.step import DEFAULT_STD

_PROJECTIONS = tuple(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
_SILU = ("silu", "swish")


@dataclass(frozen=True)
class Upcycle:
    """Make experts of the blocks of a dense model. The optimizer is dropped.

    Attributes:
        experts: number of experts of a layer.
        top_k: experts of a token.
        granularity: number of segments that the neurons are divided into.
        seed: seed of the router.
        config: configuration of the dense model.
    """

    experts: int
    top_k: int
    granularity: int = 1
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, table: Table) -> Table:
        """Return the table with experts. Raises as ``result``."""
        return self.result(table)[0]

    def result(self, table: Table) -> tuple[Table, dict[str, Any]]:
        """Return the table with experts under the names of transformers in memory, and the new configuration.

        Raises:
            NotLosslessError: the result would have other outputs; the error has all reasons.
            LanguageError: the family is unknown.
            MismatchError: the checkpoint lacks tensors.
        """
        model = Model.of_config(self.config).with_more(Model.from_json(table.writer.model), table.where)
        rules = _upcycling(model.family, table.where)
        table = NoOptimizer().apply(under_memory_names(table, model))
        layers = _layers(table)
        ffn = layers[0]["mlp.down_proj.weight"].info.shape[1]
        refused = [*self._numbers(ffn), *self._blocks(table, rules)]
        if refused:
            raise NotLosslessError(table.where, refused)
        replaced = {entry.info.key for layer in layers for entry in layer.values()}
        entries = [entry for entry in table.tensors() if entry.info.key not in replaced]
        for at, layer in enumerate(layers):
            entries += self._experts(f"model.layers.{at}.mlp", *(layer[name] for name in _PROJECTIONS))
        sizes = {rules.experts: self.experts, rules.ffn: ffn // self.granularity, "num_experts_per_tok": self.top_k}
        names = {"model_type": rules.family, "architectures": [rules.architecture]}
        head = {"head_dim": model.facts["head_dim"]} if "head_dim" in model.facts else {}
        config = {**self.config, **head, **rules.config, **sizes, **names} if self.config else {}
        facts = Model(rules.family, {**model.facts, "experts": self.experts}, model.settings)
        after = table.with_entries(entries, writer=replace(table.writer, model=facts.as_json()))
        segments = f" of {count_of(ffn // self.granularity, 'neuron')}" if self.granularity > 1 else ""
        line = f"{count_of(len(layers), 'layer')}: {count_of(self.experts, 'expert')}{segments}, {self.top_k} for each token"
        after = after.with_done(line)
        dtype = layers[0]["mlp.down_proj.weight"].info.dtype
        if self.granularity & (self.granularity - 1) and dtype in ("BF16", "F16"):
            after = after.with_done(f"down projections are multiplied by {self.granularity} and rounded to {dtype}")
        return after, config

    def _numbers(self, ffn: int) -> Iterator[Refusal]:
        parts = self.granularity
        if self.experts % parts:
            yield Refusal("granularity", "the number of experts", self.experts, parts)
        if ffn % parts:
            yield Refusal("granularity", "the size of the block", ffn, parts)
        if self.top_k % parts or not 0 < self.top_k <= self.experts:
            yield Refusal("top-k", old=self.top_k, new=parts, least=parts)

    def _blocks(self, table: Table, rules: Upcycling) -> Iterator[Refusal]:
        activation = self.config.get("hidden_act", "silu")
        if activation not in _SILU:
            yield Refusal("activation", "hidden_act", more=str(activation))
        if self.config.get("use_sliding_window"):
            yield Refusal("layer-dependent", "use_sliding_window")
        biases = [entry.info.name for entry in table.tensors() if entry.info.name.endswith(".bias")]
        if biases:
            yield Refusal("bias", biases[0], more=rules.family)

    def _experts(self, prefix: str, gate: TableEntry, up: TableEntry, down: TableEntry) -> Iterator[TableEntry]:
        """Yield the tensors of the experts of a layer: ``[expert, gate and up, hidden]``, ``[expert, hidden, ffn]``, router."""
        parts, (ffn, hidden), dtype = self.granularity, gate.info.shape, gate.info.dtype
        size = ffn // parts

        def fused(expert: int, box: Box) -> torch.Tensor:
            rows = torch.empty(box.shape, dtype=torch_dtype(dtype))
            for half, read in enumerate((gate.read, up.read)):
                part = box.intersect(Box((half * size, 0), (size, hidden)))
                if part is not None:
                    of = Box((part.start[0] - half * size + expert % parts * size, part.start[1]), part.shape)
                    rows[part.within(box).slices()] = read(of).view(of.shape)
            return rows

        def lower(expert: int, box: Box) -> torch.Tensor:
            of = Box((box.start[0], box.start[1] + expert % parts * size), box.shape)
            return down.read(of).view(of.shape) * parts

        name, std = f"{prefix}.gate.weight", float(self.config.get("initializer_range", DEFAULT_STD))

        def router(expert: int, box: Box) -> torch.Tensor:
            row = Box((expert // parts, *box.start), (1, *box.shape))
            return normal(self.seed, name, (self.experts // parts, hidden), row, std)[0]

        for name, shape, read in (
            (f"{prefix}.experts.gate_up_proj", (2 * size, hidden), fused),
            (f"{prefix}.experts.down_proj", (hidden, size), lower),
            (f"{prefix}.gate.weight", (hidden,), router),
        ):
            info = replace(gate.info, name=name, shape=(self.experts, *shape))
            yield TableEntry(info, _by_expert(read, dtype), "made of the block")


def _by_expert(read: Callable[[int, Box], torch.Tensor], dtype: str) -> Reading:
    """Return a reading of a tensor with a leading axis of experts."""

    def stacked(box: Box) -> torch.Tensor:
        inner = Box(box.start[1:], box.shape[1:])
        parts = [read(expert, inner) for expert in range(box.start[0], box.stop[0])]
        return torch.stack(parts).to(torch_dtype(dtype)).reshape(-1)

    return stacked


def _upcycling(family: str, where: str) -> Upcycling:
    known = [each.growth.upcycling for each in dialects() if each.growth is not None and each.growth.upcycling is not None]
    for each in known:
        if family in each.dense:
            return each
    names = ", ".join(sorted(name for each in known for name in each.dense))
    raise NotLosslessError(where, [Refusal("family", family, more=names)])


def _layers(table: Table) -> list[dict[str, TableEntry]]:
    """Return the projections of every block. Raises MismatchError if some are missing."""
    found: list[dict[str, TableEntry]] = []
    while True:
        keys = {name: (f"model.layers.{len(found)}.{name}", "weight") for name in _PROJECTIONS}
        layer = {name: table.entries[key] for name, key in keys.items() if key in table.entries}
        if len(layer) < len(_PROJECTIONS):
            if layer or not found:
                raise MismatchError(f"{table.where}: layer {len(found)} has no projections of a gated block")
            return found
        found.append(layer)
