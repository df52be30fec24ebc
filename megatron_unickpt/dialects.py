"""A checkpoint of another framework, as a model of megatron-core sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_unickpt import capture, crossing, internals, mapping
from megatron_unickpt.crossing import DIALECT as OWN
from unickpt.coordination import Rendezvous
from unickpt.errors import MismatchError
from unickpt.language.facts import Model
from unickpt.language.shipped import choose
from unickpt.loading import Checkpoint
from unickpt.spellings import in_memory
from unickpt.translated import translated

Shapes = dict[str, tuple[int, ...]]


def as_named_here(checkpoint: Checkpoint, items: Iterable[ShardedTensor], meet: Rendezvous | None) -> Checkpoint:
    """The checkpoint under the keys of this job's model.

    Args:
        checkpoint: of whatever framework, the same on all ranks.
        items: what this rank wants.
        meet: all ranks call this together, and what any of them wants is known to all. None: this one is alone.

    Raises:
        LanguageError: no dialect for this model is known, or it does not fit.
        MismatchError: the checkpoint is of another model.
    """
    stored = checkpoint.manifest.writer
    if stored.dialect == OWN:
        return checkpoint
    own = {mapping.tensor_of(item.key)[0]: tuple(int(extent) for extent in item.global_shape) for item in items}
    wanted = own if meet is None else _of_all_ranks(own, meet)
    if not stored.model and any(checkpoint.info(name, state) for name in wanted for state in (mapping.WEIGHT, mapping.MASTER)):
        return checkpoint  # of something that has the same names
    checkpoint = in_memory(checkpoint)
    arguments = internals.global_arguments()
    where = str(checkpoint.storage)
    model = internals.model().with_more(Model.from_json(stored.model), where)
    chosen = str(getattr(arguments, "unickpt_load_dialect", None) or "")
    rules = choose(OWN, stored.dialect, chosen, model.family, where=where, option="--unickpt-load-dialect").of_model(
        model.facts
    )
    view = translated(checkpoint, rules.rules, wanted, rules.sizes_of(model.facts))
    if view.untranslated and meet is not None:
        names = ", ".join(view.untranslated[:8]) + (f" and {len(view.untranslated) - 8} more" if view.untranslated[8:] else "")
        raise MismatchError(f"{where}: this model has no counterpart of {names}. Nothing is loaded.")
    common, notes = crossing.common_state(checkpoint)
    return dataclasses.replace(view, job_objects={capture.COMMON: common}, job_notes=notes)


def _of_all_ranks(own: Shapes, meet: Rendezvous) -> Shapes:
    """Names and shapes that any rank wants."""
    gathered = meet.gather("wanted", {name: list(shape) for name, shape in own.items()})
    found: dict[str, Any] | None = None
    if gathered is not None:
        found = {name: shape for message in gathered for name, shape in message.items()}
    return {name: tuple(shape) for name, shape in meet.broadcast("wanted-by-all", found).items()}
