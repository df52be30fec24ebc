"""Detection of values that differ between ranks although they must be equal. Pure functions of messages."""

from __future__ import annotations

from collections.abc import Sequence

from unickpt.base.listing import some
from unickpt.checkpoint.coordination.message_exchange import Message
from unickpt.checkpoint.format.manifest import OptimizerRecord


def message_of(different: Sequence[tuple[str, str]], replica: tuple[int, str] | None) -> Message:
    """Return the members that a rank adds to its report after writing. The arguments are those of ``Contribution``."""
    found: Message = {}
    if different:
        found["different"] = [list(pair) for pair in different]
    if replica is not None:
        found["replica"] = list(replica)
    return found


def notes_on_optimizer(record: OptimizerRecord | None) -> tuple[str, ...]:
    """Return one sentence for each key of the optimizer that cannot be stored, for the log, the manifest, and a report."""
    lacking: dict[str, list[str]] = {}
    for group in () if record is None else (*record.groups, *record.scalars):
        for key in group.left_out:
            lacking.setdefault(key, []).extend(group.parameters)
    return tuple(
        f"not stored of the optimizer: {key} (of {some(names)}). Its value is neither plain nor one number. A load keeps the "
        "value that its job has."
        for key, names in lacking.items()
    )


def notes_of(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return one sentence per kind of difference, for the log, the manifest, and the report of a load.

    ``messages``: reports of all ranks, in rank order.
    """
    return (*_replicas(messages), *_different(messages))


def _replicas(messages: Sequence[Message]) -> list[str]:
    first: dict[int, tuple[int, str]] = {}
    pairs = []
    for rank, message in enumerate(messages):
        if "replica" not in message:
            continue
        part, fingerprint = message["replica"]
        stored, expected = first.setdefault(part, (rank, fingerprint))
        if fingerprint != expected:
            pairs.append(f"the values of rank {rank} differ from those of rank {stored}")
    if not pairs:
        return []
    return [
        f"{some(pairs)}. These ranks are replicas (sequence-parallel peers). The checkpoint stores only the values of the "
        "latter ranks. Their gradients are probably not reduced over the sequence-parallel group."
    ]


def _different(messages: Sequence[Message]) -> list[str]:
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, message in enumerate(messages):
        for what, consequence in message.get("different", ()):
            ranks.setdefault((what, consequence), []).append(rank)
    named: dict[tuple[str, str], list[str]] = {}
    for (what, consequence), where in ranks.items():
        named.setdefault((consequence, some(where)), []).append(what)
    return [
        f"differs between rank {where} and rank 0: {some(what)}. {consequence}" for (consequence, where), what in named.items()
    ]
