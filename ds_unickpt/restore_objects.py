"""What is no tensor, from a checkpoint into a DeepSpeed engine: counters, schedulers, scalers, generators, the caller's state.

First ``read``, then, when all ranks have read, ``apply``. Everything gets an entry in the report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ds_unickpt import internals
from ds_unickpt.config import Options
from ds_unickpt.dialects import SCHEDULE
from ds_unickpt.names import plain
from ds_unickpt.wanted import Wanted
from unickpt import objects, rng, schedules
from unickpt.loading import Checkpoint
from unickpt.report import Entry, LoadReport
from unickpt.schedules import Progress
from unickpt.translated import TranslatedCheckpoint


class RestoredObjects:
    """The objects of one load into one engine; entries go into ``report``."""

    def __init__(self, engine: Any, checkpoint: Checkpoint, options: Options, wanted: Wanted, report: LoadReport) -> None:
        self.engine, self.checkpoint, self.options, self.wanted, self.report = engine, checkpoint, options, wanted, report
        self._saved: dict[str, Any] = {}
        self._rank_objects: dict[int, dict[str, Any]] = {}
        self._notes: list[Entry] = []

    def read(self) -> None:
        """Non-tensor state: the job's, this rank's, and that of the first two ranks (for the generators)."""
        decoded = self.checkpoint.objects(allow_pickle=self.options.allow_pickle)
        self._saved = decoded.value
        for line in decoded.left_out:
            path, reason = line.split(":", 1)
            self.report.add(path, "object", "left out", reason.strip())
        self._notes = list(self.checkpoint.job_notes) if isinstance(self.checkpoint, TranslatedCheckpoint) else []
        self.report.entries += [note for note in self._notes if note.outcome == "left out"]
        for rank in {0, 1, int(self.engine.global_rank)}:
            self._rank_objects[rank] = self.checkpoint.rank_objects(rank, allow_pickle=self.options.allow_pickle).value

    def of_this_rank(self, key: str) -> Any:
        """What this rank of the writing job stored for itself, or None."""
        return self._rank_objects[int(self.engine.global_rank)].get(key)

    def apply(self) -> dict[str, Any]:
        """Put it into the engine; returns the client state."""
        saved = self._saved
        if self.wanted.module_only:
            for key in ("engine", "lr_scheduler", "rng"):
                self._object(key, "left out", "load_module_only")
            self._object("client_state", "restored")
            return self._client_state(saved)
        counters = saved.get("engine") or {}
        for key in ("global_steps", "global_samples", "skipped_steps"):
            setattr(self.engine, key, int(counters.get(key, 0)))
        self.engine.loaded_checkpoint_dp_world_size = self.checkpoint.manifest.writer.topology.get("world_size")
        self.engine.loaded_checkpoint_mp_world_size = 1
        counted = [note for note in self._notes if note.outcome == "set"]
        self.report.entries += counted or [Entry("engine", "object", "restored")]
        self._set_scheduler(saved.get("lr_scheduler"), saved.get(SCHEDULE))
        self._set_loss_scaler(saved.get("loss_scaler"))
        self._set_stateful("grad_scaler", saved.get("grad_scaler"), internals.grad_scaler(self.engine))
        for name, target in internals.extra_states(self.engine).items():
            self._set_stateful(name, saved.get(name), target)
        self._set_extra_state(saved.get("module_extra_state") or {})
        self._set_rng()
        self._object("client_state", "restored")
        return self._client_state(saved)

    def _object(self, name: str, outcome: Any, reason: str = "") -> None:
        self.report.add(name, "object", outcome, reason)

    def _none_saved(self, name: str, target: Any) -> None:
        """Nothing to restore; worth a word only if this job has a place for it."""
        if target is not None:
            self._object(name, "left out", "none was saved")

    def _client_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The caller's state (this rank's own where it had one), beside what DeepSpeed returns with it."""
        client_state = saved.get("client_state") or {}
        world = self.checkpoint.manifest.writer.topology.get("world_size")
        if world == self.engine.world_size:
            client_state = self._rank_objects[int(self.engine.global_rank)].get("client_state", client_state)
        extras = {
            "ds_config": saved.get("ds_config"),
            "ds_version": self.checkpoint.manifest.writer.framework_version,
            "global_samples": (saved.get("engine") or {}).get("global_samples"),
        }
        if not self.wanted.scheduler and not self.wanted.module_only:
            extras["lr_scheduler"] = (saved.get("lr_scheduler") or {}).get("state")
        return {**extras, **client_state}

    def _set_scheduler(self, saved: dict[str, Any] | None, progress: Progress | None) -> None:
        target = internals.lr_scheduler(self.engine)
        if not self.wanted.scheduler:
            self._object("lr_scheduler", "left out", "not asked for (load_lr_scheduler_states)")
        elif progress is not None and target is not None:
            self._move_scheduler(target, progress)
        elif saved is None:
            self._none_saved("lr_scheduler", target)
        elif target is None:
            self._object("lr_scheduler", "left out", "this job has none")
        elif not _same_scheduler(saved, target):
            named = saved["class"] or f"one that counts {', '.join(map(str, saved['state']))}"
            self._object("lr_scheduler", "left out", f"saved from {named}, this job has {type(target).__name__}")
        else:
            target.load_state_dict(saved["state"])
            self._object("lr_scheduler", "restored")

    def _move_scheduler(self, target: Any, progress: Progress) -> None:
        """This job's own schedule, to where another framework's was: the last step is taken, so that it sets the rates."""
        kind = type(target).__name__
        meaning = schedules.SCHEDULERS.get(kind)
        before = dataclasses.replace(progress, steps=progress.steps - 1)
        state = schedules.state_at(kind, target.state_dict(), before) if meaning and meaning.unit == "steps" else None
        if state is None:
            reason = f"{kind} cannot be moved to step {progress.steps}: it starts anew"
            self._object("lr_scheduler", "left out", reason)
            return
        target.load_state_dict(state)
        target.step()
        self._object("lr_scheduler", "set", f"{progress.steps:,} steps of this job's own {kind} are over")

    def _set_loss_scaler(self, saved: dict[str, Any] | None) -> None:
        target = internals.loss_scaler(self.engine)
        if saved is None:
            self._none_saved("loss_scaler", target)
        elif target is None:
            self._object("loss_scaler", "left out", "this job does not scale its loss (not fp16)")
        elif not self.wanted.optimizer:
            self._object("loss_scaler", "left out", "not asked for (load_optimizer_states)")
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

    def _set_extra_state(self, saved: dict[str, Any]) -> None:
        modules = {plain(name): child for name, child in self.engine.module.named_modules()}
        saved = {plain(name): state for name, state in saved.items()}
        for name, state in saved.items():
            if name in modules and not isinstance(state, objects.Opaque):
                modules[name].set_extra_state(state)
                self._object(f"module_extra_state.{name}", "restored")
            else:
                reason = "needs allow_pickle" if isinstance(state, objects.Opaque) else "this job has no such module"
                self._object(f"module_extra_state.{name}", "left out", reason)
        self._object("module_extra_state", "restored")

    def _set_rng(self) -> None:
        """Every rank's generators: exactly on the same number of ranks, deterministically on another."""
        if not self.options.restore_rng:
            self._object("rng", "left out", "unickpt.restore_rng is false")
            return
        world = int(self.checkpoint.manifest.writer.topology.get("world_size") or 0)
        rank, now = int(self.engine.global_rank), int(self.engine.world_size)
        first = self._rng_of(0)
        own = self._rng_of(rank) if 0 < rank < world else first
        if isinstance(self.checkpoint, TranslatedCheckpoint):
            framework = self.checkpoint.manifest.writer.framework
            self._object(
                "rng", "left out", f"generators of {framework} have no counterpart: this job's own go on as it seeded them"
            )
        elif first is None or own is None:
            self._object("rng", "left out", "none was saved")
        elif rank < world:
            missing = rng.restore(own)
            if missing:
                self._object("rng", "left out", f"this process has no {', '.join(missing)} generator")
            elif now == world:
                self._object("rng", "restored")
            else:
                self._object(
                    "rng", "re-seeded", f"{world} ranks became {now}: ranks below {min(world, now)} keep their generators"
                )
        else:
            other = self._rng_of(1) if world > 1 else None
            if other is not None and rng.equal(first, other):
                rng.restore(first)
                self._object("rng", "re-seeded", f"{world} ranks became {now}: the ranks shared one state, and still do")
            else:
                rng.reseed(first, rank)
                self._object("rng", "re-seeded", f"{world} ranks became {now}: this rank had none and is seeded from rank 0's")

    def _rng_of(self, rank: int) -> rng.State | None:
        return self._rank_objects[rank].get("rng")


def _same_scheduler(saved: Mapping[str, Any], target: Any) -> bool:
    """Whether the state is of this scheduler; a converted checkpoint may not tell its class, but what it counts."""
    if saved["class"]:
        return bool(saved["class"] == type(target).__name__)
    return hasattr(target, "state_dict") and saved["state"].keys() == target.state_dict().keys()
