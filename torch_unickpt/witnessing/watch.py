"""``witness`` for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_unickpt.edge import RUNTIME
from torch_unickpt.held_state.names import names_of
from torch_unickpt.held_state.optimizers import unwrapped
from torch_unickpt.witnessing.acting import act, serious
from torch_unickpt.witnessing.agreeing import Ranks, meet
from torch_unickpt.witnessing.buddies import Buddies
from torch_unickpt.witnessing.comparing import compare_at_rest, compare_replicas
from torch_unickpt.witnessing.counting import Counters, all_finite
from torch_unickpt.witnessing.held import Snapshot, Stepped, stepped_by
from torch_unickpt.witnessing.repeating import Tap
from unickpt.base.errors import ConfigError
from unickpt.base.logs import logger, make_visible
from unickpt.base.round_folder import folder_of_round
from unickpt.checkpoint.format.witnessed import Passed
from unickpt.checkpoint.save.late_copy import silent_steps
from unickpt.training.witness import words
from unickpt.training.witness.nonfinite import Cause, NonFinite
from unickpt.training.witness.record import passed_by_all
from unickpt.training.witness.schedule import is_checked
from unickpt.training.witness.settings import BUDDY, NONFINITE, REPLICAS, REST, settings_of
from unickpt.training.witness.vote import Verdict


def witness(model: torch.nn.Module, optimizer: Any, options: Mapping[str, Any] | None, *, step: int = 0) -> Witness:
    """Watch a training for numbers that are silently wrong. Every rank calls it, after the model is wrapped and loaded.

    Example:
        ```python
        model = DistributedDataParallel(module)
        optimizer = torch.optim.AdamW(model.parameters())
        start = torch_unickpt.resume_or_start(model, optimizer, "out")
        watching = torch_unickpt.witness(model, optimizer, {"every": 50}, step=start.step)
        ```

    Args:
        model: as the program calls it: plain, ``DistributedDataParallel``, ``fully_shard`` (FSDP2, HSDP).
        optimizer: one of ``torch.optim``, or several of them. All ranks make the same steps.
        options: ``{"every": 50, "checks": ["rest", "replicas", "nonfinite"]}``, or a part of it; there is also ``buddy``, and
            ``"act": true``. None: nothing is watched.
        step: optimizer steps done.

    Returns:
        What is found. It is also in the log.

    Raises:
        ConfigError: an option is wrong, a step of the optimizer calls no hooks, the model is compiled (``nonfinite``), or the
            ranks hold other parameters, such as those of another pipeline stage.
    """
    settings = settings_of(options)
    if settings is None:
        return Witness(None)
    make_visible()
    optimizers = unwrapped(optimizer)
    silent = next(filter(None, map(silent_steps, optimizers)), "")
    if silent or not optimizers:
        raise ConfigError(f"the witness sees the steps of an optimizer by its hooks: {silent or 'there is no optimizer'}")
    names = names_of(model)
    watched = [_Watched(each, stepped_by(each, names, model), step) for each in optimizers]
    ranks = meet(model, [each.stepped for each in watched])
    checks = set(settings.checks)
    if REPLICAS in checks and not any(any(each) for each in ranks.copies):
        checks.remove(REPLICAS)
        if ranks.leads:
            logger.warning("unickpt: witness: no parameter has a copy on another rank, so the check replicas sees nothing")
    of_buddies = None
    if BUDDY in checks and isinstance(model, DistributedDataParallel) and len(ranks.ranks) > 1 and len(optimizers) == 1:
        of_buddies = Buddies(Tap(model, watched[0].stepped), ranks)
    elif BUDDY in checks:
        checks.remove(BUDDY)
        if ranks.leads:
            logger.warning(
                "unickpt: witness: the check buddy needs DistributedDataParallel on several ranks, and one optimizer"
            )
    acts = settings.act and folder_of_round() is not None
    if settings.act and not acts and ranks.leads:
        logger.warning("unickpt: witness: act needs torchrun --rdzv-backend unickpt: the witness reports and does not act")
    counters = Counters(model) if NONFINITE in checks else None
    watching = _Watching(model, settings.every, acts, checks, watched, ranks, counters, of_buddies)
    RUNTIME.watch(model, watching.passed)
    return Witness(watching)


@dataclass
class _Watched:
    """An optimizer.

    Attributes:
        step: steps done.
        snapshot: of the end of a checked step, until the next step begins.
        last: last passed step by check.
    """

    optimizer: torch.optim.Optimizer
    stepped: Sequence[Stepped]
    step: int
    snapshot: Snapshot | None = None
    last: dict[str, int] = field(default_factory=dict)


class Witness:
    """What a witness has found on this rank."""

    def __init__(self, watching: _Watching | None) -> None:
        self._watching = watching

    @property
    def verdicts(self) -> list[Verdict | NonFinite]:
        """What was found, oldest first. Those of ``nonfinite`` are of this rank, all others are the same on
        all ranks."""
        return [] if self._watching is None else list(self._watching.verdicts)

    @property
    def passed(self) -> Passed:
        """The last step that passed all checks but ``nonfinite``, as far as they see something in this job. After a verdict
        about wrong numbers nothing passes any more."""
        if self._watching is None:
            return Passed(0, ())
        return self._watching.passed()

    def close(self) -> None:
        """Stop watching."""
        if self._watching is not None:
            self._watching.close()


@dataclass
class _Watching:
    """A witness at work.

    Attributes:
        acts: the agents of the job are asked to act on the first verdict about wrong numbers.
        checks: those that see something in this job.
        said: what is told once, such as copies that differ.
        wrong: there was such a verdict. Nothing passes after it.
    """

    model: torch.nn.Module
    every: int
    acts: bool
    checks: set[str]
    watched: Sequence[_Watched]
    ranks: Ranks
    counters: Counters | None
    buddies: Buddies | None
    verdicts: list[Verdict | NonFinite] = field(default_factory=list)
    said: set[Hashable] = field(default_factory=set)
    wrong: bool = False
    hooks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number, each in enumerate(self.watched):
            self.hooks.append(each.optimizer.register_step_pre_hook(partial(self.before, number, each)))
            self.hooks.append(each.optimizer.register_step_post_hook(partial(self.after, number, each)))
        self._arm()

    def close(self) -> None:
        RUNTIME.watch(self.model, None)
        for hook in self.hooks:
            hook.remove()
        if self.counters is not None:
            self.counters.close()
        if self.buddies is not None:
            self.buddies.tap.close()

    def passed(self) -> Passed:
        of_optimizers = {number: each.last for number, each in enumerate(self.watched)}
        left_out = {NONFINITE} if self.buddies is None or not self.buddies.off else {NONFINITE, BUDDY}
        return Passed(*passed_by_all(of_optimizers, self.checks - left_out))

    @torch.no_grad()
    def before(self, number: int, watched: _Watched, *_: Any) -> None:
        """A step begins."""
        if self.counters is not None:
            self._count(self.counters, watched)
        if self.buddies is not None and not self.buddies.off and is_checked(watched.step + 1, self.every):
            self._ask(self.buddies, watched)
        snapshot, watched.snapshot = watched.snapshot, None
        if snapshot is None:
            return
        verdicts, left_out = compare_at_rest(snapshot, watched.stepped, self.ranks.copies[number], self.ranks)
        if left_out < len(snapshot.keys) or verdicts:
            self._told(watched, REST, snapshot.step, verdicts)
        elif self._is_news("left out"):
            logger.warning(
                "unickpt: witness: the program writes to all weights and states between two steps: the check rest sees nothing"
            )

    @torch.no_grad()
    def after(self, number: int, watched: _Watched, *_: Any) -> None:
        """A step has ended."""
        watched.step += 1
        if self.counters is not None:
            self.counters.clear()
        self._arm()
        if not is_checked(watched.step, self.every) or not {REST, REPLICAS} & self.checks:
            return
        snapshot = Snapshot.of(watched.stepped, watched.step)
        if REST in self.checks:
            watched.snapshot = snapshot
        if REPLICAS in self.checks:
            found = compare_replicas(snapshot, watched.stepped, self.ranks.copies[number], self.ranks)
            self._told(watched, REPLICAS, watched.step, found)

    def _arm(self) -> None:
        if self.buddies is not None and not self.buddies.off and is_checked(self.watched[0].step + 1, self.every):
            self.buddies.tap.arm()

    def _ask(self, buddies: Buddies, watched: _Watched) -> None:
        step = watched.step + 1
        if self.counters is not None:
            self.counters.paused = True
        try:
            verdicts = buddies.check(step, step // self.every)
        finally:
            if self.counters is not None:
                self.counters.paused = False
        if verdicts or not buddies.off:
            self._told(watched, BUDDY, step, verdicts)

    def _count(self, counters: Counters, watched: _Watched) -> None:
        place = counters.found(watched.stepped)
        if place is None:
            return
        step, rank = watched.step + 1, self.ranks.rank
        if all_finite(each.parameter for each in watched.stepped):
            found = NonFinite(place, step, rank, self.ranks.host, Cause.UNDECIDED)
            self.verdicts.append(found)
            if self._is_news((place.layer, place.backward)):
                logger.error("unickpt: witness: %s", words.nonfinite(found))
        elif self._is_news("weights"):
            logger.warning(
                "unickpt: witness: step %d: rank %d has weights that were not finite before; look for an earlier NONFINITE",
                step, rank,
            )  # fmt: skip

    def _told(self, watched: _Watched, check: str, step: int, verdicts: Sequence[Verdict]) -> None:
        if not verdicts and not self.wrong:
            watched.last[check] = step
        fault = serious(verdicts)
        if fault is not None and not self.wrong:
            self.wrong = True
            if self.acts and self.ranks.leads:
                act(fault, self.passed().passed_until, RUNTIME.save_dirs(self.model))
        for each in verdicts:
            if check == REPLICAS and not self._is_news((each.kind, each.subject.what, each.ranks)):
                continue  # a copy that differs does so in every later check
            self.verdicts.append(each)
            if self.ranks.leads:
                logger.error("unickpt: witness: %s. Next: %s", words.text(each), words.next_steps(each))

    def _is_news(self, what: Hashable) -> bool:
        """Return whether something was not told before, and note it."""
        news = what not in self.said
        self.said.add(what)
        return news
