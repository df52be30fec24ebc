"""The tensors of a table under the names of transformers, in memory or in files. Both are rules of dialects."""

from __future__ import annotations

from dataclasses import replace

from unickpt.transform.dialects.hf_layouts import FILES, has_names_of, layouts_of
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.registry import choose, dialect
from unickpt.transform.dialects.translated_checkpoint import HUGGINGFACE
from unickpt.transform.edit.apply_dialect import Translate
from unickpt.transform.edit.table import Table


def under_memory_names(table: Table, model: Model) -> Table:
    """Return a table under the names of transformers in memory.

    Args:
        table: table under the names of any dialect.
        model: facts about its model.

    Raises:
        LanguageError, MismatchError: as ``Translate``.
    """
    table = replace(table, writer=replace(table.writer, model=model.as_json()))
    own = table.writer.dialect
    if own == FILES:
        return _other_layout(table, model.family)
    if own != HUGGINGFACE:
        return Translate(choose(own, HUGGINGFACE, "", model.family, where=table.where, config="--config")).apply(table)
    if not _differs(table, model.family, there=True):
        return table
    return _other_layout(replace(table, writer=replace(table.writer, dialect=FILES)), model.family)


def under_file_names(table: Table) -> Table:
    """Return a table of ``under_memory_names`` under the names in files. Raises as ``Translate``."""
    family = Model.from_json(table.writer.model).family
    return _other_layout(table, family) if _differs(table, family, there=False) else table


def _differs(table: Table, family: str, *, there: bool) -> bool:
    """Whether a table has names that only one layout has: that of files (``there``), or that of memory."""
    names = {each for some in table.names_of().values() for each in some}
    return any(has_names_of(rules, names, there=there) for rules in layouts_of(family) if rules.other == FILES)


def _other_layout(table: Table, family: str) -> Table:
    return Translate(dialect(HUGGINGFACE, family, other=FILES)).apply(table)
