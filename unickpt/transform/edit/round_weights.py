"""Step that rounds weights to few bits, and keeps them in their dtype.

The values are those that ``unickpt export --to vllm --bits`` gives to transformers. A job can train on from them, or measure
what rounding costs. The scales are in the dtype in which the model is served: bfloat16 for a model in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.transform.convert.huggingface.vllm import compute_dtype, plan_in, recipe_of
from unickpt.transform.dialects.hf_layouts import FILES
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.edit.select import NoOptimizer
from unickpt.transform.edit.table import Table, TableEntry, count_of
from unickpt.transform.edit.transformers_names import under_file_names, under_memory_names
from unickpt.transform.quantise.encoding import is_float
from unickpt.transform.quantise.rounding import restored, rounded
from unickpt.transform.quantise.scheme import Scheme


@dataclass(frozen=True)
class RoundWeights:
    """Round the weights of Linear modules. The optimizer is dropped: its masters are not rounded.

    Attributes:
        bits: a scheme (``Scheme.parse``), or the name of the plan in messages.
        plan: plan of ``unickpt plan bits``; None: ``bits`` is a scheme.
    """

    bits: str
    plan: Mapping[str, Any] | None = None

    @classmethod
    def parse(cls, text: str) -> RoundWeights:
        """Parse a scheme such as ``4/32``, or read the file of a plan.

        Raises:
            ConfigError: it is neither.
            FormatError: the file is not a JSON object.
        """
        return cls(text, plan_in(text))

    def apply(self, table: Table) -> Table:
        """Return the rounded table, under the names of transformers in memory.

        Raises:
            MismatchError: no weight can be rounded, or the plan is that of another model.
            LanguageError: the family is unknown.
        """
        model = Model.from_json(table.writer.model)
        table = under_file_names(NoOptimizer().apply(under_memory_names(table, model)))
        infos = [entry.info for entry in table.tensors() if is_float(entry.info)]
        recipe = recipe_of(infos, self.bits, self.plan, f"{table.where}: {self.bits}")
        dtype = compute_dtype(infos)
        entries, count = [], 0
        for entry in table.tensors():
            scheme = recipe.schemes.get(entry.info.name.removesuffix(".weight"))
            if scheme is not None and scheme.rounds and entry.info.name.endswith(".weight"):
                entry = _rounded(entry, scheme, dtype or torch_dtype(entry.info.dtype))
                count += 1
            entries.append(entry)
        line = f"{count_of(count, 'weight')} rounded: {self.bits}"
        found = table.with_entries(entries).with_done("; ".join((line, *recipe.notes)))
        return under_memory_names(found, model) if found.writer.dialect == FILES else found


def _rounded(entry: TableEntry, scheme: Scheme, scales: torch.dtype) -> TableEntry:
    read, info = entry.read, entry.info
    to = torch_dtype(info.dtype)

    def values(box: Box) -> torch.Tensor:
        """Round the whole rows of a box, because values of a row share scales."""
        rows = Box((box.start[0], 0), (box.shape[0], info.shape[1]))
        levels, found = rounded(read(rows).view(rows.shape), scheme, scales)
        if not bool(found.isfinite().all()):
            raise FormatError(f"{info.name}: has values that are not finite, or too large for scales in {scales}")
        whole = restored(levels, found).to(to)
        return whole[:, box.start[1] : box.stop[1]].reshape(-1)

    return replace(entry, read=values, origin=entry.origin_after(f"rounded to {scheme}"))
