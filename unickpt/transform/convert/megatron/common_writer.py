"""Writer of ``common.pt`` in Megatron's ``torch_dist`` checkpoints: arguments, counters, groups of the optimizer.

It is the inverse of ``common_state.py``. Megatron reads the file in ``load_checkpoint`` (megatron/training/checkpointing.py)
and in ``load_state_dict`` of its optimizers (megatron/core/optimizer). The file contains only classes that ``torch.load``
accepts with ``weights_only`` and megatron/core/safe_globals.py.
"""

from __future__ import annotations

import argparse
import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unickpt.base.errors import MismatchError
from unickpt.checkpoint.format import objects
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.state.optimizer_record import decoded
from unickpt.transform.convert import training_progress
from unickpt.transform.convert.megatron.common_state import Report, dimensions
from unickpt.transform.convert.megatron.keys import BACKEND, CONTENT_METADATA, DIALECT, GROUP_IDENTITY, MARK, is_expert
from unickpt.transform.convert.optimizers import step_of_all
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.translated_checkpoint import TranslatedCheckpoint

SHARDING = "fully_reshardable"  # ``--dist-ckpt-optim-fully-reshardable``: every state has the shape of its parameter
VERSION = 3.0  # ``checkpoint_version`` since which queries, keys and values have their current order
_EXPERT = "is_expert_parallel"
_CONTENT: Mapping[str, Any] = {
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
_REQUIRED: Mapping[str, Any] = {"bias_correction": True}  # Adam of TransformerEngine and Apex needs it; others ignore it
_OF_SCHEDULERS = ("initial_lr",)  # keys that torch's schedulers add to groups
_COUNTS_IN_GROUPS = "FusedAdam"  # TransformerEngine and Apex have a step per group; optimizers of torch have one per parameter
_SCALARS = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_UNREADABLE = object()


def common_of(
    checkpoint: Checkpoint, trained: Mapping[str, Sequence[int]], *, separate_experts: bool | None, report: Report
) -> dict[str, Any]:
    """Return the content of ``common.pt``.

    Args:
        checkpoint: checkpoint under Megatron's names.
        trained: shapes of the parameters with optimizer states, by name.
        separate_experts: whether experts have a separate optimizer, as in jobs with ``--expert-model-parallel-size`` above
            1. None: as in the job that saved the checkpoint.
        report: receives a sentence for everything that is missing or differs from the checkpoint.

    Raises:
        MismatchError: Megatron's format cannot represent the optimizer.
    """
    found = (
        _translated(checkpoint, bool(trained), report) if is_translated(checkpoint) else _own(checkpoint, bool(trained), report)
    )
    found[CONTENT_METADATA] = {**_CONTENT, **found.get(CONTENT_METADATA, {}), "distrib_optim_sharding_type": SHARDING}
    found.setdefault("checkpoint_version", VERSION)
    found["iteration"] = checkpoint.manifest.step
    if trained:
        found["optimizer"] = _optimizer(checkpoint, trained, separate_experts, report)
    return found


def is_translated(checkpoint: Checkpoint) -> bool:
    """Return whether another framework wrote the checkpoint."""
    return isinstance(checkpoint, TranslatedCheckpoint) and checkpoint.manifest.writer.dialect != DIALECT


# -------------------------------------------------------------------- checkpoints of Megatron


def _own(checkpoint: Checkpoint, trained: bool, report: Report) -> dict[str, Any]:
    stored = checkpoint.objects().value.get("common")
    found: dict[str, Any] = {}
    for key, value in stored.items() if isinstance(stored, dict) else ():
        if key in ("args", "optimizer"):
            continue
        if key == CONTENT_METADATA and isinstance(value, dict):
            value = {name: each for name, each in value.items() if name != MARK}
        unreadable: list[str] = []
        plain = _plain(value, key, unreadable.append)
        if unreadable:
            report(f"{key}: left out, because Megatron cannot read {unreadable[0]} in it")
        else:
            found[key] = plain
    arguments = stored.get("args") if isinstance(stored, dict) else None
    if isinstance(arguments, argparse.Namespace):
        found["args"] = _arguments(arguments, checkpoint, trained, report)
    return found


def _arguments(stored: argparse.Namespace, checkpoint: Checkpoint, trained: bool, report: Report) -> argparse.Namespace:
    """Return the arguments of the scripts, which a resuming job compares with its own. They list what is not saved."""
    unreadable: list[str] = []
    held = {key: value for key, value in vars(stored).items() if not key.startswith(MARK)}
    values = ((key, _plain(value, f"args.{key}", unreadable.append)) for key, value in held.items())
    plain = {key: value for key, value in values if value is not _UNREADABLE}
    if unreadable:
        report(f"left out of args: {', '.join(unreadable)}; a job with --use-checkpoint-args uses its own values for them")
    made = argparse.Namespace(**plain)
    made.ckpt_format = BACKEND
    made.no_save_optim = not trained
    made.no_save_rng = not any(name.startswith("rng_state/") for name in checkpoint.shared_names())
    return made


def _plain(value: Any, where: str, report: Report) -> Any:
    """Return a value without the parts that Megatron's reader refuses; ``report`` receives the path of each.

    If nothing remains, the result is ``_UNREADABLE``.
    """
    if isinstance(value, _SCALARS) and type(value) in _SCALARS:
        return value
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, OrderedDict):
        pairs = ((key, _plain(each, f"{where}.{key}", report)) for key, each in value.items())
        return type(value)((key, each) for key, each in pairs if each is not _UNREADABLE)
    if type(value) in (list, tuple, set):
        items = [_plain(each, f"{where}[{at}]", report) for at, each in enumerate(value)]
        return type(value)(each for each in items if each is not _UNREADABLE)
    report(f"{where} ({value.type_name if isinstance(value, objects.Opaque) else type(value).__name__})")
    return _UNREADABLE


# -------------------------------------------------------------------- checkpoints of other frameworks


def _translated(checkpoint: Checkpoint, trained: bool, report: Report) -> dict[str, Any]:
    """Return counters with the same meaning in Megatron, and the arguments that follow from the tensors.

    The form of a learning-rate schedule has no counterpart. It is left empty, so a job that would take it from here (without
    ``--override-opt_param-scheduler``) stops.
    """
    step, stored = checkpoint.manifest.step, checkpoint.objects().value
    job, schedule = training_progress.of_job(step, stored), training_progress.of_schedule(step, stored)
    facts = Model.from_json(checkpoint.manifest.writer.model).facts
    embedding = checkpoint.info("embedding.word_embeddings.weight", "weight")
    found: dict[str, Any] = {
        "num_floating_point_operations_so_far": 0,
        CONTENT_METADATA: {"non_homogeneous_layers": True},  # names contain layer numbers (transformer_block.py)
    }
    if embedding is not None and {"layers", "heads"} <= facts.keys():
        found["args"] = argparse.Namespace(
            num_layers=facts["layers"], hidden_size=embedding.shape[1], num_attention_heads=facts["heads"],
            consumed_train_samples=job.samples or 0, skipped_train_samples=0, consumed_valid_samples=0,
            ckpt_format=BACKEND, no_save_optim=not trained, no_save_rng=True,
        )  # fmt: skip
        report("args has only values that follow from the checkpoint; a job describes its model by its own arguments")
    else:
        report("args is left out, because the numbers of layers and heads are unknown: load it with --no-load-rng")
    if trained and schedule.samples is not None:
        empty = dict.fromkeys(("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style"))
        found["opt_param_scheduler"] = {**empty, "num_steps": schedule.samples}
        report("the checkpoint has no learning-rate schedule of Megatron: load it with --override-opt_param-scheduler")
    elif trained:
        report("opt_param_scheduler is left out, because the job did not count samples: load it with --no-load-optim")
    return found


# -------------------------------------------------------------------- the optimizer


@dataclass(frozen=True)
class _Group:
    """A parameter group.

    Attributes:
        values: hyperparameters.
        parameters: names of its parameters; empty if they are unknown.
    """

    values: dict[str, Any]
    parameters: tuple[str, ...]

    @property
    def experts(self) -> bool:
        """Whether it contains, or may contain, parameters of experts."""
        return not self.parameters or any(is_expert(name) for name in self.parameters)

    @property
    def others(self) -> bool:
        """Whether it contains, or may contain, other parameters."""
        return not self.parameters or not all(is_expert(name) for name in self.parameters)

    @property
    def identity(self) -> tuple[Any, ...]:
        return tuple(self.values.get(key, self.values.get(f"pre_{key}")) for key in GROUP_IDENTITY)

    def with_expert_flag(self, flag: bool) -> _Group:
        """Return the group for the optimizer of experts (True), or for the other optimizer (False)."""
        return _Group({**self.values, _EXPERT: flag}, self.parameters)


def _optimizer(
    checkpoint: Checkpoint, trained: Mapping[str, Sequence[int]], separate_experts: bool | None, report: Report
) -> dict[Any, Any]:
    """Return the state of an optimizer, or of a chain of two if experts have a separate one."""
    where, record = str(checkpoint.storage), checkpoint.manifest.optimizer
    if record is None:
        raise _without_hyperparameters(where)
    step = _step(where, record, trained)
    groups = _groups(where, record, trained, report)
    stored_separate = any(group.values.get(_EXPERT) for group in groups)
    if not any(is_expert(name) for name in trained):
        separate_experts = False
    elif separate_experts is None:
        separate_experts = stored_separate
        which = "with" if separate_experts else "without"
        report(f"the optimizer is written for jobs {which} expert parallelism; choose with --expert-parallel")
    scaler = checkpoint.objects().value.get("grad_scaler") if not is_translated(checkpoint) else None
    if not separate_experts:
        return _optimizer_state(record.name, [group.with_expert_flag(False) for group in groups], step, scaler, where)
    experts = [group for group in groups if (group.values[_EXPERT] if stored_separate else group.experts)]
    others = [group for group in groups if (not group.values[_EXPERT] if stored_separate else group.others)]
    sides = [group.with_expert_flag(False) for group in others], [group.with_expert_flag(True) for group in experts]
    return {at: _optimizer_state(record.name, side, step, scaler, where) for at, side in enumerate(sides)}


def hyperparameters_of(
    checkpoint: Checkpoint, trained: Mapping[str, Sequence[int]], report: Report
) -> dict[str, dict[str, Any]]:
    """Return the hyperparameters of every trained parameter, with its step, as a group of Megatron has them.

    Arguments and errors: see ``common_of``.
    """
    where, record = str(checkpoint.storage), checkpoint.manifest.optimizer
    if record is None:
        raise _without_hyperparameters(where)
    step = _step(where, record, trained)
    held = {name: group.values for group in _groups(where, record, trained, report) for name in group.parameters}
    lacking = next((name for name in trained if name not in held), None)
    if lacking is not None:
        raise MismatchError(f"{where}: {lacking} is not in a group of the optimizer, so its hyperparameters are unknown")
    return {name: {**held[name], "step": step} for name in trained}


def _without_hyperparameters(where: str) -> MismatchError:
    return MismatchError(f"{where}: has optimizer states but no hyperparameters, which Megatron needs to load them")


def _groups(where: str, record: OptimizerRecord, trained: Mapping[str, Sequence[int]], report: Report) -> list[_Group]:
    """Return the groups of Megatron's optimizer: the stored ones, or Megatron's default groups."""
    groups = [_megatron_group(group) for group in record.groups]
    if all(group.values.keys() & {"wd_mult", "pre_wd_mult"} for group in groups):
        return groups
    report(
        "hyperparameters are in Megatron's default groups (no weight decay for biases and 1-D parameters); a job replaces "
        "the values by its arguments at the first step"
    )
    return _standard(where, record, trained)


def _megatron_group(group: ParameterGroup) -> _Group:
    """Return a stored group. Identity keys that older releases lack get their default values."""
    values = decoded(group, where="optimizer")
    for key, usual in GROUP_IDENTITY.items():
        if key == _EXPERT or (key != "wd_mult" and f"pre_{key}" not in values):
            values.setdefault(key, usual)
    return _Group(values, tuple(group.parameters))


def _standard(where: str, record: OptimizerRecord, trained: Mapping[str, Sequence[int]]) -> list[_Group]:
    """Return Megatron's default groups (``get_standard_config_overrides`` in optimizer/__init__.py) with the stored values.

    Raises:
        MismatchError: parameters of one default group have different hyperparameters.
    """
    number = {name: at for at, group in enumerate(record.groups) for name in group.parameters}
    members: dict[float, list[str]] = {}
    for name, shape in trained.items():
        decays = dimensions(name, shape) > 1 and not name.endswith(".bias")
        members.setdefault(1.0 if decays else 0.0, []).append(name)
    found = []
    for multiplier, names in sorted(members.items(), reverse=True):
        held = {at: decoded(record.groups[at], where="optimizer") for name in names if (at := number.get(name, -1)) >= 0}
        if not held:
            raise MismatchError(f"{where}: {names[0]} is not in a group of the optimizer, so its hyperparameters are unknown")
        first, *others = [{key: each for key, each in values.items() if key != "weight_decay"} for values in held.values()]
        if any(other != first for other in others):
            raise MismatchError(
                f"{where}: parameters of one Megatron group ({names[0]} and {len(names) - 1} more) have different "
                "hyperparameters. Load the checkpoint in Megatron with --ckpt-format unickpt"
            )
        own = {key: value for key, value in next(iter(held.values())).items() if key not in _OF_SCHEDULERS}
        values = {**_REQUIRED, **own, **GROUP_IDENTITY, "wd_mult": multiplier, "default_config": True}
        found.append(_Group(values, tuple(names)))
    return found


def _step(where: str, record: OptimizerRecord, trained: Mapping[str, Any]) -> int | float:
    """Return the step of all parameters; Megatron stores a single one. Raises MismatchError."""
    step = step_of_all(
        record,
        trained,
        where,
        needs="Megatron needs to load its states",
        single="torch_dist has a single step. Load the checkpoint in Megatron with --ckpt-format unickpt",
    )
    return int(step) if step.is_integer() else step


def _optimizer_state(name: str, groups: Sequence[_Group], step: int | float, scaler: Any, where: str) -> dict[str, Any]:
    """Return the state of one optimizer in a form that all of Megatron's optimizer classes read; each uses its own keys.

    ``DistributedOptimizer`` reads ``param_state_sharding_type`` and steps in groups, ``Float16OptimizerWithFloat16Params``
    reads ``common_step`` beside the groups, and ``FP32Optimizer`` reads the same one level above.
    """
    held = [{**group.values, "step": step} for group in _one_of_each(groups, where)]
    state = {} if name == _COUNTS_IN_GROUPS else {"common_step": torch.tensor(float(step), dtype=torch.float32)}
    made: dict[str, Any] = {
        "optimizer": {"param_groups": held, "state": state},
        "param_groups": copy.deepcopy(held),
        "state": dict(state),
        "param_state_sharding_type": SHARDING,
    }
    return made if not scaler else {**made, "grad_scaler": scaler}


def _one_of_each(groups: Sequence[_Group], where: str) -> Iterator[_Group]:
    """Yield groups with distinct identities. Raises MismatchError if different groups have the same identity."""
    found: dict[tuple[Any, ...], _Group] = {}
    for group in groups:
        known = found.setdefault(group.identity, group)
        if known is group:
            yield group
        elif known.values != group.values:
            differ = sorted(key for key in known.values | group.values if known.values.get(key) != group.values.get(key))
            raise MismatchError(
                f"{where}: two parameter groups differ in {', '.join(differ)}, but torch_dist identifies a "
                f"group only by {', '.join(GROUP_IDENTITY)}. Load the checkpoint in Megatron with --ckpt-format unickpt"
            )
