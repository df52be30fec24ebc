"""Apply a policy to the layers of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from unickpt.base.logs import logger
from unickpt.diagnosis.recording.layer_times import device_name, devices_of
from unickpt.training.precision.policy import LOW, Policy
from unickpt.training.precision.regions import AUTOCAST, CAST, compute_in

_SHOWN = 5  # names in a message


@dataclass(frozen=True, slots=True)
class Applied:
    """What was done.

    Attributes:
        layers: names of the layers that have the dtype of the policy now.
        warnings: why others have not, as text.
    """

    layers: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def apply_policy(
    policy: Policy, layers: Mapping[str, torch.nn.Module], where: str, *, rank: int, world: int, all_layers: bool,
    knows_autocast: bool = True, together: Sequence[Any] = (),
) -> Applied:  # fmt: skip
    """Let the layers of a policy compute in its dtype, if this rank has the policy.

    Ranks that exchange activations inside of a layer must have the same dtypes. If only some of them have the policy, none uses
    it. This is a collective of these ranks.

    Args:
        policy: the policy.
        layers: layers of this rank by name.
        where: file of the policy, for messages.
        rank, world: global rank, and number of ranks of the job.
        all_layers: whether this rank has all layers of the model. A pipeline stage has not.
        knows_autocast: whether the backward functions of the layers know autocast on a processor.
        together: process groups of ranks that exchange activations inside of a layer: tensor, context, sequence and expert
            parallel ones.
    """
    if reason := policy.mismatch(world):
        return Applied(warnings=(f"{where} is not used: {reason}. Make a plan for this job, or name a kind of device",))
    kind = device_name({device for module in layers.values() for device in devices_of(module)})
    if not _all_have(policy, rank, kind, together):
        mixed = (
            f"{where} is not used: it has rank {rank}, and not all ranks that compute the same layers in parts. Name all ranks "
            "of a tensor, context, sequence or expert parallel group, or none"
        )
        return Applied(warnings=(mixed,) if policy.has(rank, kind) else ())
    done: list[str] = []
    narrow: list[str] = []
    for name, dtype in policy.dtypes.items():
        module = layers.get(name)
        if module is None:
            continue
        if any(each.is_floating_point() and each.dtype is not torch.float32 for each in module.parameters()):
            narrow.append(name)
            continue
        device = next((each.type for each in devices_of(module)), "cpu")
        way = CAST if dtype == LOW and device == "cpu" and not knows_autocast else AUTOCAST
        compute_in(module, dtype, device, way)
        done.append(name)
    missing = [name for name in policy.dtypes if name not in layers] if all_layers else []
    found = []
    if missing:
        found.append(f"{where} names layers that this model does not have: {_some(missing)}. It has {_some(list(layers))}")
    if narrow:
        found.append(
            f"{where} is not used for {_some(narrow)}: a plan needs float32 weights, and these are not. Train without bf16 and "
            "fp16 in the configuration of the framework, so that the plan decides which layers compute in bf16"
        )
    if policy.ranks and policy.dtypes and policy.has(rank, kind) and not done and not narrow and not missing:
        found.append(f"{where}: rank {rank} has none of the layers {_some(list(policy.dtypes))}. It has {_some(list(layers))}")
    return Applied(tuple(done), tuple(found))


def _all_have(policy: Policy, rank: int, device: str, together: Sequence[Any]) -> bool:
    """Return whether this rank and all ranks that it computes layers with have the same policy. Collective of each group."""
    has = policy.has(rank, device)
    for group in together:  # the groups are the axes of a grid, so one round is enough
        if dist.get_world_size(group) > 1:
            found: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, (has, policy), group=group)
            has = all(each == (True, policy) for each in found)
    return has


def log(applied: Applied, rank: int) -> None:
    """Log what was done, on every rank that has it."""
    for text in applied.warnings:
        logger.warning("unickpt: rank %d: %s", rank, text)
    if applied.layers:
        logger.info("unickpt: rank %d computes %s by the precision plan", rank, _some(list(applied.layers)))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more if names else "no layers that are known to unickpt"
