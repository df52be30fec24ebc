"""A checkpoint of another framework under the names of a megatron-core model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_unickpt.framework import internals
from megatron_unickpt.held_state import foreign_state, sharded_tensors
from megatron_unickpt.held_state.common_state import COMMON
from megatron_unickpt.held_state.foreign_state import Receiver
from unickpt.base.errors import MismatchError
from unickpt.base.listing import some
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.state.filling import shapes_of_all
from unickpt.transform.convert.megatron.keys import DIALECT as OWN
from unickpt.transform.dialects.hf_layouts import in_memory
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.named_here import through_transformers
from unickpt.transform.dialects.registry import choose
from unickpt.transform.dialects.translated_checkpoint import translated


def as_named_here(
    checkpoint: Checkpoint,
    items: Iterable[ShardedTensor],
    exchange: MessageExchange | None,
    receiver: Receiver | None = None,
    chosen: str = "",
) -> Checkpoint:
    """Return the checkpoint under the keys of this job's model.

    Args:
        checkpoint: checkpoint of any framework, the same on all ranks.
        items: tensors that this rank loads.
        exchange: message exchange of the ranks, which all call this; each then knows the tensors of all. None: one rank.
        receiver: objects of the job, which receive the state of another framework.
        chosen: model family, or path of a dialect file. '' for ``--unickpt-load-dialect``.

    Raises:
        LanguageError: no dialect for this model is known, or the dialect does not fit.
        MismatchError: the checkpoint holds another model.
    """
    stored = checkpoint.manifest.writer
    if stored.dialect == OWN:
        return checkpoint
    own = {sharded_tensors.tensor_of(item.key)[0]: tuple(int(extent) for extent in item.global_shape) for item in items}
    wanted = own if exchange is None else shapes_of_all(own, exchange)
    if not stored.model and any(
        checkpoint.info(name, state) for name in wanted for state in (sharded_tensors.WEIGHT, sharded_tensors.MASTER)
    ):
        return checkpoint  # a model of unknown family with the same names
    where = str(checkpoint.storage)
    model = internals.model().with_more(Model.from_json(stored.model), where)
    chosen = chosen or internals.options().load_dialect
    family = "" if chosen.endswith(".toml") else chosen
    checkpoint = in_memory(through_transformers(checkpoint, OWN, model, family))
    stored = checkpoint.manifest.writer
    model = model.with_more(Model.from_json(stored.model), where)
    rules = choose(OWN, stored.dialect, chosen, model.family, where=where, option="--unickpt-load-dialect").of_model(
        model.facts
    )
    view = translated(checkpoint, rules.rules, wanted, rules.sizes_of(model.facts))
    if view.untranslated and exchange is not None:
        raise MismatchError(f"{where}: this model has no counterpart of {some(view.untranslated)}. Nothing is loaded.")
    common, notes = foreign_state.common_state(checkpoint, receiver or Receiver())
    return dataclasses.replace(view, job_objects={COMMON: common}, job_notes=notes)
