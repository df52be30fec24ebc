"""Restores the non-tensor state of a DeepSpeed engine: counters, schedulers, scalers, generators, client state.

``read`` runs first. ``apply`` runs after all ranks have read. Every object gets an entry in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_unickpt.batch import batches
from ds_unickpt.batch.batches import Batch
from ds_unickpt.framework import internals
from ds_unickpt.framework.internals import plain
from ds_unickpt.held_state import curriculum, named_generators
from ds_unickpt.held_state.beginning import Beginning
from ds_unickpt.held_state.engine_view import EXTRA_STATE, MICRO_BATCHES, EngineView
from ds_unickpt.held_state.names import own_entries
from ds_unickpt.loading.dialects import SCHEDULE
from ds_unickpt.placing.placement import Generators
from unickpt.base.logs import logger
from unickpt.base.options.job import Options
from unickpt.checkpoint.format import objects
from unickpt.checkpoint.load import rng
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.lr_progress import Progress
from unickpt.checkpoint.load.report import Entry, LoadReport
from unickpt.checkpoint.state import client_states, optimizer_entries
from unickpt.checkpoint.state.client_states import CLIENT
from unickpt.transform.convert import training_progress
from unickpt.transform.dialects.translated_checkpoint import TranslatedCheckpoint


@dataclass(frozen=True, slots=True)
class LoadArguments:
    """Arguments of ``load_checkpoint``.

    Attributes:
        strict: parameters and buffers of the module and of the checkpoint must match one to one.
        optimizer: also load optimizer states and hyperparameters.
        scheduler: also load the state of the learning-rate scheduler.
        module_only: load weights only. Counters, generators and client state keep their values.
        custom_load_fn: ``f(src=full state dict, dst=module)``, which loads the weights instead.
    """

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False
    custom_load_fn: Callable[..., Any] | None = None


class RestoredObjects:
    """The non-tensor state of one load into one engine. Adds its entries to ``report``."""

    def __init__(
        self,
        view: EngineView,
        checkpoint: Checkpoint,
        options: Options,
        wanted: LoadArguments,
        report: LoadReport,
        beginning: Beginning,
    ) -> None:
        """``beginning``: of the engine. What the checkpoint lacks starts anew."""
        self.view, self.names, self.beginning = view, view.names, beginning
        self.engine, self.checkpoint, self.options, self.wanted, self.report = view.engine, checkpoint, options, wanted, report
        self._saved: dict[str, Any] = {}
        self._of_stages: dict[str, Any] = {}
        self._rank_objects: dict[int, dict[str, Any]] = {}
        self._notes: list[Entry] = []
        self.sampler_refused = ""  # why no rank sets the state of the curriculum sampler; rank 0 finds it in ``read``

    def read(self) -> None:
        """Read the state of the job, of this rank, and of the ranks whose generators it may use."""
        decoded = self.checkpoint.objects(allow_pickle=self.options.allow_pickle)
        self._saved = decoded.value
        for each in decoded.left_out:
            self._object(each.path, "left out", each.reason)
        self._notes = list(self.checkpoint.job_notes) if isinstance(self.checkpoint, TranslatedCheckpoint) else []
        self.report.entries += [note for note in self._notes if note.outcome == "left out"]
        self._of_stages = self._extra_states_of_stages()
        source = self._generators()
        for rank in {0, 1, source.second, source.rank, self.view.rank}:
            self._rank_objects[rank] = self.checkpoint.rank_objects(rank, allow_pickle=self.options.allow_pickle).value
        sampler, saved = internals.extra_states(self.engine)[internals.SAMPLER], self._saved.get(internals.SAMPLER)
        if sampler is not None and saved is not None and self.view.rank == 0 and not self.wanted.module_only:
            self.sampler_refused = curriculum.refusal(sampler, saved)

    def of_this_rank(self, key: str) -> Any:
        """Return an object that this rank of the saving job stored for itself, or None."""
        return self._rank_objects[self.view.rank].get(key)

    def saved_batch(self) -> Batch | None:
        """Return the batch size of the job that saved the checkpoint; None if unknown."""
        topology = self.checkpoint.manifest.writer.topology
        return batches.of_saved(self._saved, topology.get("data", topology.get("world_size")) or 1)

    def apply(self) -> dict[str, Any]:
        """Set the state in the engine, and return the client state."""
        saved = self._saved
        if self.wanted.module_only:
            for key in ("engine", "lr_scheduler", "rng"):
                self._object(key, "left out", "load_module_only")
            return self._client_state(saved)
        step = self.checkpoint.manifest.step
        counters = saved.get("engine") or {"global_steps": step}
        for key in ("global_steps", "global_samples", "skipped_steps"):
            setattr(self.engine, key, int(counters.get(key, 0)))
        topology = self.checkpoint.manifest.writer.topology
        self.engine.loaded_checkpoint_dp_world_size = topology.get("data", topology.get("world_size"))
        self.engine.loaded_checkpoint_mp_world_size = topology.get("tensor", topology.get("pipeline", 1))
        counted = [note for note in self._notes if note.outcome == "set"]
        if saved.get("engine") is None and not counted:
            counted = [Entry("engine", "object", "set", f"global_steps {step:,}: the checkpoint counts no samples")]
        self.report.entries += counted or [Entry("engine", "object", "restored")]
        if self.wanted.optimizer and self.view.base is not None:
            found, reason = optimizer_entries.of_rank(self._rank_objects, self.view.rank, self._ranks_before, self.view.world)
            optimizer_entries.restore([[self.view.base]], found, self.report, reason)
        self._set_scheduler(saved.get("lr_scheduler"), saved.get(SCHEDULE))
        self._set_loss_scaler(saved.get("loss_scaler"))
        self._set_stateful("grad_scaler", saved.get("grad_scaler"), internals.grad_scaler(self.engine))
        for name, target in internals.extra_states(self.engine).items():
            if name == internals.SAMPLER and target is not None:
                self._set_sampler(target, saved.get(name))
            else:
                self._set_stateful(name, saved.get(name), target)
        internals.restart_curriculum(self.engine)
        self._set_extra_state({**(saved.get(EXTRA_STATE) or {}), **self._of_stages})
        if internals.micro_batches(self.engine) is not None:
            internals.set_micro_batches(self.engine, saved.get(MICRO_BATCHES) or 0)
            if saved.get(MICRO_BATCHES) is not None:
                self._object(MICRO_BATCHES, "restored")
        self._set_rng()
        return self._client_state(saved)

    @property
    def _ranks_before(self) -> int:
        """Number of ranks of the job that saved."""
        return int(self.checkpoint.manifest.writer.topology.get("world_size") or 1)

    def _object(self, name: str, outcome: Any, reason: str = "") -> None:
        self.report.add(name, "object", outcome, reason)

    def _none_saved(self, name: str, target: Any, reason: str = "none was saved") -> None:
        """Start an object anew, if this job has it, because the checkpoint has no state for it."""
        if target is not None:
            anew = self.beginning.reset(name, target)
            self._object(name, "left out", f"{reason}: it starts anew" if anew else reason)

    def _client_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the client state, this rank's own if it stored one, with the values that DeepSpeed adds to it."""
        client_state, changed = client_states.of_rank(
            saved, self._rank_objects, self.view.rank, self._ranks_before, self.view.world
        )
        self._object(CLIENT, "set" if changed else "restored", changed)
        counters = saved.get("engine") or {}
        extras = {
            "ds_config": saved.get("ds_config"),
            "ds_version": self.checkpoint.manifest.writer.framework_version,
            "global_samples": counters.get("global_samples"),
        }
        if self.wanted.module_only:  # the engine keeps its own
            steps = counters.get("global_steps", self.checkpoint.manifest.step)
            extras |= {"global_steps": steps, "skipped_steps": counters.get("skipped_steps")}
        if not self.wanted.scheduler and not self.wanted.module_only:
            extras["lr_scheduler"] = (saved.get("lr_scheduler") or {}).get("state")
        return {**extras, **client_state}

    def _set_scheduler(self, saved: dict[str, Any] | None, progress: Progress | None) -> None:
        target = self.engine.lr_scheduler
        if not self.wanted.scheduler:
            self._object("lr_scheduler", "left out", "not requested (load_lr_scheduler_states)")
        elif progress is not None and target is not None:
            self._move_scheduler(target, progress)
        elif saved is None:
            self._none_saved("lr_scheduler", target)
        elif target is None:
            self._object("lr_scheduler", "left out", "this job has none")
        elif not _same_scheduler(saved, target):
            named = saved["class"] or f"one that counts {', '.join(map(str, saved['state']))}"
            self._none_saved("lr_scheduler", target, f"saved from {named}, this job has {type(target).__name__}")
        else:
            target.load_state_dict(saved["state"])
            self._object("lr_scheduler", "restored")
        if self.wanted.scheduler and target is not None:
            internals.renew_last_lr(target)

    def _move_scheduler(self, target: Any, progress: Progress) -> None:
        """Move this job's scheduler to the progress of another framework's schedule."""
        kind = type(target).__name__
        if training_progress.move(target, progress):
            self._object("lr_scheduler", "set", f"{kind} of this job is set to step {progress.steps:,}")
        else:
            self._none_saved("lr_scheduler", target, f"{kind} cannot be moved to step {progress.steps}")

    def _set_loss_scaler(self, saved: dict[str, Any] | None) -> None:
        target = internals.loss_scaler(self.engine)
        if saved is not None and target is None:
            self._object("loss_scaler", "left out", "this job does not scale its loss (not fp16)")
        elif target is not None and not self.wanted.optimizer:
            self._object("loss_scaler", "left out", "not requested (load_optimizer_states)")
        elif saved is None:
            self._none_saved("loss_scaler", target)
        else:
            for key, value in saved.items():
                if hasattr(target, key):
                    setattr(target, key, value)
            self._object("loss_scaler", "restored")

    def _set_stateful(self, name: str, saved: Any, target: Any) -> None:
        if saved is None:
            self._none_saved(name, target)
        elif target is None:
            self._object(name, "left out", "this job has none")
        else:
            target.load_state_dict(saved)
            self._object(name, "restored")

    def _set_sampler(self, sampler: Any, saved: dict[str, Any] | None) -> None:
        """Restore DeepSpeed's curriculum sampler, or let it start anew."""
        refused = self.sampler_refused if saved is not None else "none was saved"
        if saved is None or refused:
            curriculum.begin(sampler)
            problem = f"{refused}: it starts from its first sample"
        else:
            problem = curriculum.restore(sampler, saved)
        if problem and self.view.rank == 0:
            logger.warning("unickpt: %s: the curriculum sampler is not restored: %s", self.checkpoint.storage, problem)
        self._object(internals.SAMPLER, "left out" if problem else "restored", problem)

    def _set_extra_state(self, saved: dict[str, Any]) -> None:
        modules = dict(self.names.modules)
        for name, state in {plain(name): state for name, state in saved.items()}.items():
            if name in modules and not isinstance(state, objects.Opaque):  # of another stage
                modules[name].set_extra_state(state)
                self._object(f"{EXTRA_STATE}.{name}", "restored")
            elif name in modules:
                self._object(f"{EXTRA_STATE}.{name}", "left out", "needs allow_pickle")
            elif self.view.placed.partial:
                self._object(f"{EXTRA_STATE}.{name}", "on other ranks")
            else:
                self._object(f"{EXTRA_STATE}.{name}", "left out", "this job has no such module")
        self._object(EXTRA_STATE, "restored")
        for name in own_entries(self.engine.module):
            self._object(
                name, "left out", "only the module's own state dict has it, which unickpt does not store: it keeps its value"
            )

    def _extra_states_of_stages(self) -> dict[str, Any]:
        """Return the extra states that other pipeline stages than the first one stored, for the modules of this rank."""
        found = {}
        own = {f"{EXTRA_STATE}/{name}": name for name, _ in self.names.modules}
        self.checkpoint.fetch_shared(own)
        for key in self.checkpoint.shared_names():
            if key in own:
                found[own[key]] = self.checkpoint.shared_object(key, allow_pickle=self.options.allow_pickle).value
        return found

    def _set_rng(self) -> None:
        """Restore the generators of this rank: exactly on the same number of ranks, deterministically on another."""
        if not self.options.restore_rng:
            self._object("rng", "left out", "unickpt.restore_rng is false")
            return
        world, now = int(self.checkpoint.manifest.writer.topology.get("world_size") or 0), self.view.world
        source = self._generators()
        first = self._rng_of(0)
        own = self._rng_of(source.rank) if source.rank < world else first
        if isinstance(self.checkpoint, TranslatedCheckpoint):
            framework = self.checkpoint.manifest.writer.framework
            self._object("rng", "left out", f"generators of {framework} have no counterpart: this job's own keep their state")
        elif first is None or own is None:
            self._object("rng", "left out", "the checkpoint has none. Trainer loads its own, rng_state_*.pth, beside it")
        elif source.rank < world:
            missing = rng.restore(own)
            if missing:
                self._object("rng", "left out", f"this process has no {', '.join(missing)} generator")
            elif source.regrouped:
                self._object("rng", "re-seeded", f"the ranks of a tensor-parallel group share those of rank {source.rank}")
            elif now == world:
                self._object("rng", "restored")
            else:
                self._reseeded(world, now, rng.kept(world, now))
        else:
            other = self._rng_of(source.second) if world > source.second else None
            if other is not None and rng.equal(first, other):
                rng.restore(first)
                self._reseeded(world, now, "all ranks shared one state, and still share it")
            else:
                rng.reseed(first, source.number)
                self._reseeded(world, now, "this rank is new, and is seeded from rank 0")
        self._set_named_generators(source, world)

    def _set_named_generators(self, source: Generators, before: int) -> None:
        """Restore the named generators of a rank that the checkpoint has. Their seeds depend on the tensor-parallel rank."""
        key, saved = named_generators.KEY, self.of_this_rank(named_generators.KEY)
        if source.regrouped or source.rank >= before:
            if named_generators.captured():
                self._object(key, "left out", "this rank is new among the tensor-parallel ranks: they keep their states")
        elif saved:
            lacking = named_generators.restore(saved)
            reason = f"this process has no {', '.join(lacking)}" if lacking else ""
            self._object(key, "left out" if reason else "restored", reason)
        elif named_generators.captured():
            self._object(key, "left out", "none was saved: they keep their states")

    def _reseeded(self, before: int, now: int, how: str) -> None:
        self._object("rng", "re-seeded", rng.change(rng.counted(before), str(now), how))

    def _generators(self) -> Generators:
        """Return whose generators this rank takes."""
        before = self.checkpoint.manifest.writer.topology.get("tensor", 1)
        return Generators.of(self.view.placed, before if isinstance(before, int) else 1)

    def _rng_of(self, rank: int) -> rng.RngState | None:
        return self._rank_objects[rank].get("rng")


def _same_scheduler(saved: Mapping[str, Any], target: Any) -> bool:
    """Whether the state belongs to this scheduler. A converted checkpoint may lack the class; then the keys are compared."""
    if saved["class"]:
        return bool(saved["class"] == type(target).__name__)
    return hasattr(target, "state_dict") and saved["state"].keys() == target.state_dict().keys()
