"""Step that grows the model of a checkpoint without a change of its outputs (LEMON, arXiv 2310.07999).

New elements of tensors that write to the residual stream are zero, so new heads, neurons and layers add nothing. New elements
of tensors that read from the stream are free. If a norm subtracts the mean, new elements of the stream are the mean of the
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from unickpt.base.arrays import Ints
from unickpt.base.errors import MismatchError
from unickpt.base.listing import some
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup
from unickpt.transform.dialects.dialect import Dialect
from unickpt.transform.dialects.growth import LAYER, STREAM, Growth
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.registry import growth_of
from unickpt.transform.edit.cast import cast
from unickpt.transform.edit.residuals import without_residuals
from unickpt.transform.edit.table import Table, TableEntry, count_of
from unickpt.transform.edit.transformers_names import under_memory_names
from unickpt.transform.grow.configuration import grown_config, grown_model, refusals
from unickpt.transform.grow.origins import origins
from unickpt.transform.grow.refusals import NotLosslessError, Refusal
from unickpt.transform.grow.sizes import HEADS, LAYERS, Placed, Sizes, flows_of, planned, sizes_of
from unickpt.transform.grow.states import grown, order_of, scale_of

DEFAULT_STD = 0.02  # of transformers' initializer_range
_ROUNDED = ("BF16", "F16")


@dataclass(frozen=True)
class Grow:
    """Grow the model of a table.

    Attributes:
        changes: new sizes by keys of the configuration, such as ``hidden_size``.
        place: number in the grown model of every layer of the source; None: at equal distances.
        seed: seed of free elements.
        config: configuration of the source; empty if it is unknown.
        zero_second_moments: fill second moments with zeros instead of means, to show the effect.
    """

    changes: Mapping[str, int]
    place: tuple[int, ...] | None = None
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    zero_second_moments: bool = False

    def apply(self, table: Table) -> Table:
        """Return the grown table, under the names of transformers. Raises NotLosslessError, LanguageError, MismatchError."""
        return self.result(table)[0]

    def result(self, table: Table) -> tuple[Table, dict[str, Any]]:
        """Return the grown table and the new configuration, which is empty if that of the source is unknown.

        Raises:
            NotLosslessError: the growth cannot be lossless; the error has all reasons.
            LanguageError: the family is unknown, or shapes contradict its rules.
            MismatchError: the checkpoint is incomplete.
        """
        model = Model.of_config(self.config).with_more(Model.from_json(table.writer.model), table.where)
        rules = growth_of(model.family)
        growth = rules.growth or Growth()
        if growth.refuse:
            raise NotLosslessError(table.where, [Refusal("post-norm", model.family, more=growth.refuse)])
        table = without_residuals(under_memory_names(table, model))
        if table.excluded:
            raise MismatchError(f"{table.where}: was saved without {some(table.excluded)}, so the model cannot grow")
        flows, refused = flows_of(growth, table.names_of())
        refused += [
            Refusal("state", f"{entry.info.name} ({entry.info.state})")
            for entry in table.tensors()
            if order_of(entry.info.state) is None and entry.info.numel > 1
        ]
        if refused:
            raise NotLosslessError(table.where, refused[:8])
        shapes = {entry.info.name: entry.info.shape for entry in table.tensors() if order_of(entry.info.state) == 0}
        old = sizes_of(rules, model.facts, {name: each for name, each in flows.items() if name in shapes}, shapes)
        sizes, refused = planned(rules, model.facts, old, self.changes, self.place)
        refused += refusals(self.config, sizes) if sizes is not None else []
        if sizes is None or refused:
            raise NotLosslessError(table.where, refused)
        config = grown_config(self.config, growth, sizes) if self.config else {}
        new_model = grown_model(model, growth, sizes, config)
        return self._grown(table, rules, flows, shapes, sizes, new_model), config

    def _grown(
        self,
        table: Table,
        rules: Dialect,
        flows: Mapping[str, Placed],
        shapes: Mapping[str, tuple[int, ...]],
        sizes: Sizes,
        model: Model,
    ) -> Table:
        names = {name: list(_names(each, sizes)) for name, each in flows.items()}
        aliases = {
            new_alias: new_name
            for alias, name in table.aliases.items()
            if name in flows
            for new_alias, new_name in _alias(alias, flows[name], names[name])
        }
        made: dict[tuple[str, str], TableEntry] = {}
        for entry in sorted(table.tensors(), key=lambda each: each.info.derived_from is not None):  # masters first
            name = entry.info.name
            for new_name, is_new in names[name]:
                master = made.get((new_name, entry.info.derived_from or ""))
                found = self._entry(entry, new_name, is_new, flows[name], rules, shapes[name], sizes, master)
                made[found.info.key] = found
        std = self.config.get("initializer_range", DEFAULT_STD)
        writer = replace(table.writer, model=model.as_json())
        after = table.with_entries(made.values(), writer=writer)
        after = replace(after, optimizer=_renamed(table.optimizer, names), aliases=aliases)
        changed = [
            f"{name} {sizes.old[name]} to {sizes.new[name]}" for name in sorted(sizes.new) if sizes.old[name] != sizes.new[name]
        ]
        lines = [f"grown: {', '.join(changed) or 'nothing'}; {count_of(len(table.tensors()))} to {count_of(len(made))}"]
        if sizes.old[LAYERS] != sizes.new[LAYERS]:
            lines.append(f"layers of the source are at {', '.join(map(str, sizes.place))}")
        if any(name not in shapes or shapes[name] != each.info.shape for (name, _), each in made.items()):
            lines.append(f"free elements: normal, standard deviation {std:g}, seed {self.seed}")
        lines += _notes(table, flows, sizes, model)
        return after.with_done(*lines)

    def _entry(
        self, entry: TableEntry, name: str, is_new: bool, placed: Placed, rules: Dialect, shape: tuple[int, ...], sizes: Sizes,
        master: TableEntry | None,
    ) -> TableEntry:  # fmt: skip
        info, arrangement = entry.info, placed.flow.pattern.arrangement
        if arrangement is None or order_of(info.state) is None or (info.shape != shape and info.numel <= 1):
            return replace(entry, info=replace(info, name=name))
        if info.shape != shape:
            raise NotLosslessError(name, [Refusal("state", f"{info.name} ({info.state}) of shape {list(info.shape)}")])
        where = origins(arrangement, sizes.old, sizes.new, sizes.heads)
        new_info = replace(info, name=name, shape=tuple(len(origin) for origin in where))
        if not is_new and new_info.shape == shape and scale_of(placed.flow, sizes) == 1 and not _moved(where):
            return replace(entry, info=new_info)
        read = grown(
            name, info, entry.read, placed.flow, sizes, where, rules.growth.norm if rules.growth else "rms", seed=self.seed,
            std=self.config.get("initializer_range", DEFAULT_STD), zero_second_moments=self.zero_second_moments, new=is_new,
        )  # fmt: skip
        if info.derived_from is not None and master is not None and (is_new or not entry.overrides):
            return replace(entry, info=new_info, read=cast(master.read, info.dtype), overrides=(), origin="grown")
        overrides = (Box.whole(new_info.shape),) if info.derived_from is not None else ()
        return replace(entry, info=new_info, read=read, overrides=overrides, origin="new layer" if is_new else "grown")


def _names(placed: Placed, sizes: Sizes) -> Iterator[tuple[str, bool]]:
    """Yield the names in the grown model that are made of a tensor, and whether their layer is new."""
    if placed.layer < 0:
        yield placed.name, False
        return
    for layer in range(sizes.new[LAYERS]):
        if sizes.like(layer) == placed.layer:
            yield _in_layer(placed, placed.name, layer), sizes.is_new(layer)


def _in_layer(placed: Placed, name: str, layer: int) -> str:
    template = placed.flow.pattern.name
    values = template.match(name)
    return name if values is None else template.fill({**values, LAYER: layer})


def _alias(alias: str, placed: Placed, names: list[tuple[str, bool]]) -> Iterator[tuple[str, str]]:
    """Yield the further names of the tensors that are made of one. Tied tensors of layers keep their own numbers."""
    if placed.layer < 0:
        yield alias, names[0][0]


def _renamed(record: OptimizerRecord | None, names: Mapping[str, list[tuple[str, bool]]]) -> OptimizerRecord | None:
    if record is None:
        return None

    def renamed(group: ParameterGroup) -> ParameterGroup:
        return replace(group, parameters=tuple(new for name in group.parameters for new, _ in names.get(name, [(name, False)])))

    return OptimizerRecord(record.name, tuple(map(renamed, record.groups)), tuple(map(renamed, record.scalars)), record.stepped)


def _moved(where: Sequence[Ints]) -> bool:
    return any((origin != np.arange(len(origin))).any() for origin in where)


def _notes(table: Table, flows: Mapping[str, Placed], sizes: Sizes, model: Model) -> list[str]:
    """Return remarks on epsilon, rounding and gradients."""
    found = []
    if sizes.scale != 1:
        epsilon = model.settings.get("norm_epsilon")
        value = f" {epsilon:.9g}" if isinstance(epsilon, float) else f" the old one times {sizes.scale**2:.9g}"
        found.append(f"the norms need the epsilon{value}: config.json has it; set --norm-epsilon of Megatron")
        rounded = sorted(
            {
                entry.info.dtype
                for entry in table.tensors()
                if order_of(entry.info.state) == 0
                and entry.info.dtype in _ROUNDED
                and scale_of(flows[entry.info.name].flow, sizes) != 1
            }
        )
        if rounded and sizes.new[STREAM] != 4 * sizes.old[STREAM]:
            found.append(f"gains in {' and '.join(rounded)} are scaled by {sizes.scale:.6g} and rounded to this dtype")
    if sizes.new[STREAM] % sizes.new.get(HEADS, 1):
        found.append("the width is not a multiple of the heads, which some configurations of transformers refuse")
    if sizes.old[LAYERS] != sizes.new[LAYERS]:
        found.append("in new layers only the tensors that write to the stream have a gradient in the first step")
    return found
