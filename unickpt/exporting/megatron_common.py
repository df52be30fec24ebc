"""``common.pt`` of Megatron's ``torch_dist`` checkpoints: arguments, counters, groups of the optimizer.

What reads it: megatron/training/checkpointing.py (``load_checkpoint``), megatron/core/optimizer (``load_state_dict`` of every
optimizer). The inverse of ``foreign/megatron_state.py``. It has to be what ``torch.load`` takes with ``weights_only`` and the
classes that megatron/core/safe_globals.py adds, so nothing else is put there.
"""

from __future__ import annotations

import argparse
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unickpt import objects, schedules
from unickpt.errors import MismatchError
from unickpt.foreign.megatron_state import DIALECT, dimensions
from unickpt.language.facts import Model
from unickpt.loading import Checkpoint
from unickpt.manifest import OptimizerRecord, ParameterGroup
from unickpt.translated import TranslatedCheckpoint

SHARDING = "fully_reshardable"  # ``--dist-ckpt-optim-fully-reshardable``: every state in the shape of its parameter
VERSION = 3.0  # ``checkpoint_version``: since then queries, keys and values are in the order that they are in
# By which Megatron tells groups apart (megatron/core/optimizer/optimizer.py, ``param_group_identifier_keys``).
_IDENTITY: Mapping[str, Any] = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
_EXPERT = "is_expert_parallel"
_OWN = "unickpt"  # marks of the Megatron adapter, which mean nothing without it
_CONTENT: Mapping[str, Any] = {
    "distrib_optim_fully_reshardable_mem_efficient": False, "singleton_local_shards": False, "chained_optim_avoid_prefix": True,
}  # fmt: skip
_WANTED: Mapping[str, Any] = {"bias_correction": True}  # of Adam in TransformerEngine and Apex; in all others it goes without
_OF_SCHEDULERS = ("initial_lr",)  # keys that torch's schedulers leave in groups
_COUNTS_IN_GROUPS = "FusedAdam"  # of TransformerEngine and Apex; optimizers of torch count by parameter
_SCALARS = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_LEFT = object()

Told = Callable[[str], None]


def common_of(
    checkpoint: Checkpoint, trained: Mapping[str, Sequence[int]], *, apart: bool | None, told: Told
) -> dict[str, Any]:
    """What ``common.pt`` holds.

    Args:
        checkpoint: under Megatron's names.
        trained: shapes of the parameters that have states of an optimizer, by name.
        apart: whether experts have an optimizer of their own, as in jobs with ``--expert-model-parallel-size`` above 1;
            None: as in the job that saved it.
        told: called with a sentence for each thing that is not in it, or otherwise.

    Raises:
        MismatchError: the optimizer cannot be told in Megatron's terms.
    """
    found = _translated(checkpoint, bool(trained), told) if is_translated(checkpoint) else _own(checkpoint, bool(trained), told)
    found["content_metadata"] = {**_CONTENT, **found.get("content_metadata", {}), "distrib_optim_sharding_type": SHARDING}
    found.setdefault("checkpoint_version", VERSION)
    found["iteration"] = checkpoint.manifest.step
    if trained:
        found["optimizer"] = _optimizer(checkpoint, trained, apart, told)
    return found


def is_translated(checkpoint: Checkpoint) -> bool:
    """Whether another framework has written it."""
    return isinstance(checkpoint, TranslatedCheckpoint) and checkpoint.manifest.writer.dialect != DIALECT


# -------------------------------------------------------------------- of Megatron's own jobs


def _own(checkpoint: Checkpoint, trained: bool, told: Told) -> dict[str, Any]:
    stored = checkpoint.objects().value.get("common")
    found: dict[str, Any] = {}
    for key, value in stored.items() if isinstance(stored, dict) else ():
        if key in ("args", "optimizer"):
            continue
        if key == "content_metadata" and isinstance(value, dict):
            value = {name: each for name, each in value.items() if name != _OWN}
        lost: list[str] = []
        plain = _plain(value, key, lost.append)
        if lost:
            told(f"{key}: left out, for it has {lost[0]}")
        else:
            found[key] = plain
    arguments = stored.get("args") if isinstance(stored, dict) else None
    if isinstance(arguments, argparse.Namespace):
        found["args"] = _arguments(arguments, checkpoint, trained, told)
    return found


def _arguments(stored: argparse.Namespace, checkpoint: Checkpoint, trained: bool, told: Told) -> argparse.Namespace:
    """The scripts' arguments, which a resuming job compares with its own. They say what the checkpoint does not have."""
    lost: list[str] = []
    held = {key: value for key, value in vars(stored).items() if not key.startswith(_OWN)}
    plain = {key: each for key, value in held.items() if (each := _plain(value, f"args.{key}", lost.append)) is not _LEFT}
    if lost:
        told(f"left out of args: {', '.join(lost)}; a job with --use-checkpoint-args has its own of these")
    made = argparse.Namespace(**plain)
    made.ckpt_format = "torch_dist"
    made.no_save_optim = not trained
    made.no_save_rng = not any(name.startswith("rng_state/") for name in checkpoint.shared_names())
    return made


def _plain(value: Any, where: str, lost: Told) -> Any:
    """The same without what Megatron's reader would refuse, which ``lost`` is called with; ``_LEFT`` if that is all of it."""
    if isinstance(value, _SCALARS) and type(value) in _SCALARS:
        return value
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, OrderedDict):
        pairs = ((key, _plain(each, f"{where}.{key}", lost)) for key, each in value.items())
        return type(value)((key, each) for key, each in pairs if each is not _LEFT)
    if type(value) in (list, tuple, set):
        items = [_plain(each, f"{where}[{at}]", lost) for at, each in enumerate(value)]
        return type(value)(each for each in items if each is not _LEFT)
    lost(f"{where} ({value.type_name if isinstance(value, objects.Opaque) else type(value).__name__})")
    return _LEFT


# -------------------------------------------------------------------- of other frameworks


def _translated(checkpoint: Checkpoint, trained: bool, told: Told) -> dict[str, Any]:
    """Counters that mean the same in Megatron, and arguments as far as the tensors tell them.

    The form of a learning-rate schedule has no counterpart: it is left empty, so that a job that would take it from here
    (without ``--override-opt_param-scheduler``) stops.
    """
    step, stored = checkpoint.manifest.step, checkpoint.objects().value
    job, schedule = schedules.of_job(step, stored), schedules.of_schedule(step, stored)
    facts = Model.from_json(checkpoint.manifest.writer.model).facts
    embedding = checkpoint.info("embedding.word_embeddings.weight", "weight")
    found: dict[str, Any] = {
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"non_homogeneous_layers": True},  # names have numbers of layers (transformer_block.py)
    }
    if embedding is not None and {"layers", "heads"} <= facts.keys():
        found["args"] = argparse.Namespace(
            num_layers=facts["layers"], hidden_size=embedding.shape[1], num_attention_heads=facts["heads"],
            consumed_train_samples=job.samples or 0, skipped_train_samples=0, consumed_valid_samples=0,
            ckpt_format="torch_dist", no_save_optim=not trained, no_save_rng=True,
        )  # fmt: skip
        told("args has only what the checkpoint tells: a job names its model by its own arguments")
    else:
        told("args is left out, for the numbers of layers and heads are not known: load it with --no-load-rng")
    if trained and schedule.samples is not None:
        empty = dict.fromkeys(("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style"))
        found["opt_param_scheduler"] = {**empty, "num_steps": schedule.samples}
        told("the learning-rate schedule is the job's own: load it with --override-opt_param-scheduler")
    elif trained:
        told("opt_param_scheduler is left out, for nobody has counted samples: Megatron loads it with --no-load-optim only")
    return found


# -------------------------------------------------------------------- the optimizer


@dataclass(frozen=True)
class _Group:
    """Attributes: hyperparameters; whether experts are in it, or may be; and whether anything else is."""

    values: dict[str, Any]
    experts: bool
    others: bool

    @property
    def identity(self) -> tuple[Any, ...]:
        return tuple(self.values.get(key, self.values.get(f"pre_{key}")) for key in _IDENTITY)

    def of(self, *, apart: bool) -> _Group:
        """As the group of the optimizer that has experts alone, or of the other one."""
        return _Group({**self.values, _EXPERT: apart}, self.experts, self.others)


def _optimizer(checkpoint: Checkpoint, trained: Mapping[str, Sequence[int]], apart: bool | None, told: Told) -> dict[Any, Any]:
    """The state of an optimizer, or of a chain of two where experts have their own."""
    where, record = str(checkpoint.storage), checkpoint.manifest.optimizer
    if record is None:
        raise MismatchError(f"{where}: has states of an optimizer, but no hyperparameters; without them Megatron loads none")
    step = _step(where, record, trained)
    groups = [_told_in_megatrons_terms(group) for group in record.groups]
    if not all(group.values.keys() & {"wd_mult", "pre_wd_mult"} for group in groups):
        groups = _standard(where, record, trained)
        told("hyperparameters are in the groups that Megatron makes by default (no weight decay for biases and what has one "
             "dimension); a job's arguments tell the values from the first step on")  # fmt: skip
    stored_apart = any(group.values.get(_EXPERT) for group in groups)
    if not any(_is_expert(name) for name in trained):
        apart = False
    elif apart is None:
        apart = stored_apart
        told(f"the optimizer is written for jobs with{'' if apart else 'out'} expert parallelism; --expert-parallel chooses")
    scaler = checkpoint.objects().value.get("grad_scaler") if not is_translated(checkpoint) else None
    if not apart:
        return _leaf(record.name, [group.of(apart=False) for group in groups], step, scaler, where)
    experts = [group for group in groups if (group.values[_EXPERT] if stored_apart else group.experts)]
    others = [group for group in groups if (not group.values[_EXPERT] if stored_apart else group.others)]
    sides = [group.of(apart=False) for group in others], [group.of(apart=True) for group in experts]
    return {at: _leaf(record.name, side, step, scaler, where) for at, side in enumerate(sides)}


def _told_in_megatrons_terms(group: ParameterGroup) -> _Group:
    """A stored group; keys of its identity that older releases do not have are those of the default."""
    values = _decoded(group)
    for key, usual in _IDENTITY.items():
        if key == _EXPERT or (key != "wd_mult" and f"pre_{key}" not in values):
            values.setdefault(key, usual)
    kinds = [_is_expert(name) for name in group.parameters] or [True, False]  # it is not told what is in it: it may be either
    return _Group(values, any(kinds), not all(kinds))


def _decoded(group: ParameterGroup) -> dict[str, Any]:
    found: dict[str, Any] = objects.decode(group.hyperparameters, tensors={}, where="optimizer").value
    return found


def _is_expert(name: str) -> bool:
    return ".experts." in name


def _standard(where: str, record: OptimizerRecord, trained: Mapping[str, Sequence[int]]) -> list[_Group]:
    """The groups of Megatron's default (optimizer/__init__.py, ``get_standard_config_overrides``), with stored values.

    Raises:
        MismatchError: parameters of one group have other hyperparameters than those that Megatron derives for it.
    """
    number = {name: at for at, group in enumerate(record.groups) for name in group.parameters}
    members: dict[float, list[str]] = {}
    for name, shape in trained.items():
        decays = dimensions(name, shape) > 1 and not name.endswith(".bias")
        members.setdefault(1.0 if decays else 0.0, []).append(name)
    found = []
    for multiplier, names in sorted(members.items(), reverse=True):
        held = {at: _decoded(record.groups[at]) for name in names if (at := number.get(name, -1)) >= 0}
        if not held:
            raise MismatchError(f"{where}: {names[0]} is in no group of the optimizer, so its hyperparameters are not known")
        first, *others = [{key: each for key, each in values.items() if key != "weight_decay"} for values in held.values()]
        if any(other != first for other in others):
            raise MismatchError(
                f"{where}: parameters that are one group in Megatron ({names[0]} and {len(names) - 1} more) have different "
                "hyperparameters; Megatron itself loads such a checkpoint with --ckpt-format unickpt"
            )
        own = {key: value for key, value in next(iter(held.values())).items() if key not in _OF_SCHEDULERS}
        values = {**_WANTED, **own, **_IDENTITY, "wd_mult": multiplier, "default_config": True}
        experts = [_is_expert(name) for name in names]
        found.append(_Group(values, any(experts), not all(experts)))
    return found


def _step(where: str, record: OptimizerRecord, trained: Mapping[str, Any]) -> int | float:
    """The step of all parameters: Megatron keeps one. Raises MismatchError."""
    steps: dict[str, Any] = {}
    for group in record.scalars:
        steps |= dict.fromkeys(group.parameters, _decoded(group).get("step"))
    lacking = next((name for name in trained if not isinstance(steps.get(name), (int, float))), None)
    if lacking is not None:
        raise MismatchError(f"{where}: {lacking} has no step, without which Megatron cannot load its states")
    found = {float(steps[name]): name for name in trained}
    if len(found) > 1:
        (a, first), (b, second) = list(found.items())[:2]
        raise MismatchError(
            f"{where}: {first} is at step {a:g}, {second} at step {b:g}; torch_dist has one step for all. Megatron itself "
            "loads such a checkpoint with --ckpt-format unickpt"
        )
    step = next(iter(found))
    return int(step) if step.is_integer() else step


def _leaf(name: str, groups: Sequence[_Group], step: int | float, scaler: Any, where: str) -> dict[str, Any]:
    """The state of one optimizer, for each of Megatron's classes at once: each looks at its own keys.

    ``DistributedOptimizer`` wants ``param_state_sharding_type`` and steps in groups, ``Float16OptimizerWithFloat16Params``
    ``common_step`` beside the groups, and ``FP32Optimizer`` the same one level above.
    """
    held = [{**group.values, "step": step} for group in _one_of_each(groups, where)]
    state = {} if name == _COUNTS_IN_GROUPS else {"common_step": torch.tensor(float(step), dtype=torch.float32)}
    made: dict[str, Any] = {
        "optimizer": {"param_groups": held, "state": state},
        "param_groups": copy.deepcopy(held), "state": dict(state), "param_state_sharding_type": SHARDING,
    }  # fmt: skip
    return made if not scaler else {**made, "grad_scaler": scaler}


def _one_of_each(groups: Sequence[_Group], where: str) -> Iterator[_Group]:
    """Groups that Megatron can tell apart. Raises MismatchError if it cannot."""
    found: dict[tuple[Any, ...], _Group] = {}
    for group in groups:
        known = found.setdefault(group.identity, group)
        if known is group:
            yield group
        elif known.values != group.values:
            differ = sorted(key for key in known.values | group.values if known.values.get(key) != group.values.get(key))
            raise MismatchError(
                f"{where}: two groups of the optimizer differ in {', '.join(differ)}, and Megatron's torch_dist tells groups "
                f"apart by {', '.join(_IDENTITY)} alone. Megatron itself loads such a checkpoint with --ckpt-format unickpt"
            )
