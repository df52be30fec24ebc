"""Load a checkpoint into named tensors, on all ranks of a group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from unickpt.api.group import Group
from unickpt.api.requests import Wanted
from unickpt.api.state import Key, Value
from unickpt.base.listing import some
from unickpt.base.logs import logger
from unickpt.base.options.job import check
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.report import LoadReport
from unickpt.checkpoint.load.resume import Together
from unickpt.checkpoint.state.filling import WEIGHT, Filling


@dataclass(frozen=True, slots=True)
class Found:
    """What a rank loads from an opened checkpoint.

    Attributes:
        checkpoint: under the names of this job.
        items: what this rank fills.
        tied: further names of tensors among these. They are not lost if no rank requests them.
    """

    checkpoint: Checkpoint
    items: Iterable[tuple[Key, Value]]
    tied: Iterable[str] = ()


Find: TypeAlias = Callable[[Checkpoint], Found]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded checkpoint.

    Attributes:
        checkpoint: the opened checkpoint. ``checkpoint.rank_objects(rank)`` has the objects of one rank of the saving job,
            ``checkpoint.manifest.step`` the training step.
        objects: non-tensor state of the job, by name.
        report: outcome for every tensor of the checkpoint, and bytes and seconds of this rank.
    """

    checkpoint: Checkpoint
    objects: dict[str, Any]
    report: LoadReport

    @property
    def step(self) -> int:
        """Training step of the checkpoint."""
        return self.checkpoint.manifest.step


@dataclass(frozen=True, slots=True)
class HowToLoad:
    """Arguments of ``unickpt.load_checkpoint``.

    Attributes:
        strict, missing_state, verify, allow_pickle: as there.
        what: what is filled, for the report.

    Raises:
        ConfigError: ``missing_state`` or ``verify`` has another value than those described there.
    """

    strict: bool = False
    missing_state: str = "error"
    verify: str = "always"
    allow_pickle: bool = False
    what: str = "a state dict"

    def __post_init__(self) -> None:
        check(missing_state=self.missing_state, verify=self.verify)

    @property
    def fresh(self) -> bool:
        """Whether states of an optimizer that the checkpoint lacks start anew."""
        return self.missing_state == "fresh"


def load(
    exchange: MessageExchange, directory: str, find: Find, group: Group, how: HowToLoad, skipped: tuple[str, ...] = (), *,
    report: LoadReport | None = None, source: Callable[[], Checkpoint] | None = None,
) -> Loaded:  # fmt: skip
    """Load one checkpoint. Every rank calls this.

    Args:
        exchange: of this load.
        directory: of the checkpoint.
        find: returns what this rank loads. It reads no data of tensors and does not communicate.
        group: the ranks.
        how: arguments of the load.
        skipped: newer checkpoints that were damaged, for the report.
        report: gets the entries, those of ``find`` too. None: a new one.
        source: opens the checkpoint, if it is in memory. ``directory`` is then its name in messages.

    Raises:
        AgreedFailureError: the load failed on at least one rank.
    """
    begin = time.monotonic()
    together = Together(exchange, directory)
    report = LoadReport() if report is None else report
    report.source = directory
    report.target = f"{how.what} on {exchange.world} {'rank' if exchange.world == 1 else 'ranks'}"

    def opened() -> Wanted:
        found = find(Checkpoint.open(directory) if source is None else source())
        wanted = Wanted.of(Filling(found.checkpoint, report), found.items, group, fresh=how.fresh)
        wanted.infos += [info for name in found.tied if (info := found.checkpoint.info(name, WEIGHT)) is not None]
        return wanted

    wanted = together.step("open", opened)
    filling, checkpoint = wanted.filling, wanted.filling.checkpoint
    planned, opener = together.plan(filling.plan, identity=lambda: checkpoint.identity, share=exchange.world > 1)
    wanted.agree(exchange)
    if how.strict:
        together.step("complete", wanted.refuse_lost)
    together.read(lambda host_peers: filling.read(planned, verify=how.verify, host_peers=host_peers), opener)
    decoded = together.step("finish", lambda: checkpoint.objects(allow_pickle=how.allow_pickle))
    wanted.account(decoded)
    if wanted.lost and exchange.rank == 0:
        logger.warning(
            "unickpt: %s: no rank requested %d of its parameters: %s", directory, len(wanted.lost), some(wanted.lost)
        )
    report.skipped, report.notes = list(skipped), list(checkpoint.manifest.notes)
    report.seconds = time.monotonic() - begin
    return Loaded(checkpoint, decoded.value, report)
