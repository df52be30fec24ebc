"""``witness`` for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torch_unickpt.edge import RUNTIME
from torch_unickpt.held_state.names import names_of, plain, without_ddp
from torch_unickpt.held_state.optimizers import unwrapped
from torch_unickpt.witnessing.held import Held, held_by
from torch_unickpt.witnessing.taps import tap_of
from unickpt.api.acting import Recorded
from unickpt.api.dtensors import is_dtensor
from unickpt.api.witness import Witness
from unickpt.base.errors import ConfigError
from unickpt.base.logs import logger, make_visible
from unickpt.base.round_folder import folder_of_round
from unickpt.base.step_replay import asked
from unickpt.checkpoint.save.late_copy import silent_steps
from unickpt.training.witness.agreeing import Ranks, meet, ranks_of
from unickpt.training.witness.buddies import Buddies
from unickpt.training.witness.causes import Causes
from unickpt.training.witness.counting import Counters, all_finite
from unickpt.training.witness.held import local
from unickpt.training.witness.recalling import Recalled
from unickpt.training.witness.recomputing import Recomputed, Selves
from unickpt.training.witness.settings import BUDDY, NONFINITE, OUTLIER, SELF, UPDATE, settings_of
from unickpt.training.witness.updating import Range, StepTap, unsuited
from unickpt.training.witness.vote import Kind
from unickpt.training.witness.watching import Watched, Watching, seeing


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
        options: ``{"every": 50, "checks": ["rest", "replicas", "nonfinite"]}``, or a part of it; there are also ``buddy``,
            ``self`` and ``update``, ``"act": true`` and ``"batches": FOLDER``. None: nothing is watched.
        step: optimizer steps done.

    Returns:
        What is found. It is also in the log.

    Raises:
        ConfigError: an option is wrong, a step of the optimizer calls no hooks, the model is compiled (``nonfinite``), or the
            ranks hold other parameters, such as those of another pipeline stage.
    """
    settings = settings_of(options)
    if settings is None or asked() is not None:  # a job that repeats a step records all of it
        return Witness(None)
    make_visible()
    optimizers = unwrapped(optimizer)
    silent = next(filter(None, map(silent_steps, optimizers)), "")
    if silent or not optimizers:
        raise ConfigError(f"the witness sees the steps of an optimizer by its hooks: {silent or 'there is no optimizer'}")
    names = names_of(model)
    held = [held_by(each, names, model) for each in optimizers]
    ddp = model if isinstance(model, DistributedDataParallel) else None
    device = next((each.parameter.device for some in held for each in some), torch.device("cpu"))
    ranks = Ranks.of(None if ddp is None else ddp.process_group, device)
    watched = [_watched(some, ranks, step) for some in held]
    checks = seeing(settings.checks, watched, ranks)
    counters = [Counters(model, without_ddp(model), plain=plain)] if {NONFINITE, OUTLIER} & checks else []
    within = _ranks_within_layers(model)
    several = bool(ranks.gather(torch.tensor([len(within) > 1], device="cpu").long()).any())
    world = len(ranks.ranks)
    tap = tap_of(model, held, world, within_layers=several) if {BUDDY, NONFINITE, OUTLIER} & checks else None
    of_buddies = Buddies(tap, ranks) if BUDDY in checks and tap is not None and len(ranks.ranks) > 1 else None
    if BUDDY in checks and of_buddies is None:
        checks.remove(BUDDY)
        if ranks.leads:
            logger.warning(
                "unickpt: witness: the check buddy needs DistributedDataParallel, or fully_shard without tensor parallelism "
                "and torch.compile, on several ranks, and one optimizer"
            )
    causes = None
    if counters and tap is not None:
        causes = Causes(Recalled(tap), counters[0], ranks, partial(_folders, model, settings.batches))
    selves = Selves(Recomputed([without_ddp(model)], plain=plain), ranks, within) if SELF in checks else None
    updates = _updates(optimizers, held, ranks) if UPDATE in checks else None
    if updates is None:
        checks.discard(UPDATE)
    watching = Watching(settings.every, checks, watched, ranks, counters, of_buddies, causes, selves, updates)
    recorded = Recorded(watching, RUNTIME.folders(model))
    if settings.act:
        recorded.may_act()
    RUNTIME.watch(model, recorded)
    watching.hooks.append(partial(_forgotten, model, recorded))  # which keeps it
    for optimizer, each in zip(optimizers, watched, strict=True):
        watching.hooks += [_hooked(optimizer, watching, each)]
    return Witness(watching)


def _ranks_within_layers(model: torch.nn.Module) -> set[int]:
    """Return the global ranks of the dimensions of meshes that are not those of ``fully_shard``, such as tensor parallelism."""
    of_data = ranks_of(group for module in model.modules() if isinstance(module, FSDPModule) for group in _groups_of(module))
    parameters: list[Any] = [each for each in model.parameters() if is_dtensor(each)]
    meshes = [each.device_mesh for each in parameters]
    dims = [ranks_of([mesh.get_group(at)]) for mesh in dict.fromkeys(meshes) for at in range(mesh.ndim)]
    return {rank for ranks in dims if not ranks <= of_data for rank in ranks}


def _groups_of(module: FSDPModule) -> list[Any]:
    """Return the process groups of one ``fully_shard`` (torch/distributed/fsdp/_fully_shard/_fsdp_common.py)."""
    state: Any = module._get_fsdp_state()
    own = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    infos = [each.mesh_info for each in own if each is not None]
    groups = (getattr(info, f"{kind}_process_group", None) for info in infos for kind in ("shard", "replicate"))
    return [group for group in groups if group is not None]


def _updates(
    optimizers: Sequence[torch.optim.Optimizer], held: Sequence[Sequence[Held]], ranks: Ranks
) -> Buddies[StepTap] | None:
    """Return what repeats steps of the optimizer on parameters without copies; None, with a warning, if nothing can."""
    alone = [each for each in held[0] if not each.stepped.ranks]
    no_copies = not bool((ranks.gather(torch.tensor([len(alone)], device="cpu")) == 0).any())
    why = unsuited(optimizers)
    if len(optimizers) > 1:
        why = "there are several optimizers"
    elif len(ranks.ranks) == 1 or not no_copies:
        why = "it needs FSDP2 on several ranks. Copies are compared by replicas"
    if why:
        if ranks.leads:
            logger.warning("unickpt: witness: there is no check update: %s", why)
        return None
    ranges = [Range(each.parameter, each.stepped.name, 0, local(each.parameter).numel()) for each in alone]
    chosen = [each for each in ranges if each.hi]
    return Buddies(StepTap(optimizers, lambda: chosen, ranks.rank), ranks, Kind.SDC_UPDATE)


def _folders(model: torch.nn.Module, named: str) -> list[str]:
    """Return where micro-batches with values that are not finite are written, the best first."""
    of_round = folder_of_round()
    return [each for each in (named, *RUNTIME.folders(model).known(), "" if of_round is None else str(of_round)) if each]


def _forgotten(model: torch.nn.Module, _: Recorded) -> None:
    RUNTIME.watch(model, None)


def _watched(held: Sequence[Held], ranks: Ranks, step: int) -> Watched:
    stepped = [each.stepped for each in held]

    def finite() -> bool:
        return all_finite(each.parameter.grad for each in held)

    return Watched(lambda: stepped, [meet(ranks, stepped)], finite, step)


def _hooked(optimizer: torch.optim.Optimizer, watching: Watching, watched: Watched) -> Callable[[], None]:
    """Let the steps of an optimizer call a witness. Returns what ends that."""
    before = optimizer.register_step_pre_hook(lambda *_: watching.before(watched))
    after = optimizer.register_step_post_hook(lambda *_: watching.after(watched))

    def remove() -> None:
        before.remove()
        after.remove()

    return remove
