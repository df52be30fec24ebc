"""Wraps the functions of Megatron-LM's training scripts: save as unickpt, and resume from any checkpoint in ``--load``.

The arguments say ``torch_dist`` (see ``arguments``), so Megatron's own functions run. While they save, the hook on
``dist_checkpointing.save`` writes unickpt's format, whatever strategy they select.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_unickpt.dist_checkpointing import loading, masters, metadata, saving
from megatron_unickpt.dist_checkpointing.lacking import ERROR
from megatron_unickpt.framework import internals, marks
from megatron_unickpt.framework.errors import MegatronCheckpointError, MegatronSaveError, as_megatron_errors
from megatron_unickpt.framework.flags import options_of
from megatron_unickpt.framework.marks import BACKEND
from megatron_unickpt.held_state import foreign_state
from megatron_unickpt.held_state.foreign_state import Receiver
from megatron_unickpt.held_state.optimizer import METADATA
from megatron_unickpt.pretraining import argument_changes, local_layouts, memory, non_persistent, schedule, tracker_hooks
from megatron_unickpt.pretraining.arguments import (
    NATIVE_FORMAT,
    accepted_changes,
    asynchronous_arguments,
    save_options,
    set_asynchronous,
    take_retention,
)
from megatron_unickpt.runtime import Purpose, Runtime, ScriptCall
from megatron_unickpt.tracker import Diverted
from megatron_unickpt.witnessing import replaying
from unickpt.base.errors import MismatchError, NotACheckpointError, StorageError
from unickpt.base.logs import logger
from unickpt.base.step_replay import saves_nothing
from unickpt.base.switch import switch
from unickpt.checkpoint.checkpoint_folder import ITERATION
from unickpt.checkpoint.format.topology import describe
from unickpt.checkpoint.load import rng
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.replayed import layout_of, replays
from unickpt.checkpoint.load.resume import AgreedFailureError, Offer, Together, resume
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.storage.base import absolute, split
from unickpt.transform.dialects.model_facts import Model

RNG = "rng_state"
_NATIVE = ScriptCall(Purpose.NATIVE)


def active() -> bool:
    """Return whether this job was started with ``--ckpt-format unickpt``, or made its arguments itself under the switch."""
    arguments = internals.global_arguments()
    return bool(getattr(arguments, BACKEND, arguments is not None and switch().saves))


def _arguments() -> argparse.Namespace:
    """Return the arguments that the hooked functions use."""
    from megatron.training import checkpointing as native

    found: argparse.Namespace = native.get_args()
    return found


@contextmanager
def _changed(options: argparse.Namespace, values: Mapping[str, Any]) -> Iterator[None]:
    """Change arguments inside this block."""
    before = {key: getattr(options, key, None) for key in values}
    vars(options).update(values)
    try:
        yield
    finally:
        vars(options).update(before)


def _native(runtime: Runtime, wrapped: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Load, or save a local checkpoint, in Megatron's own format."""
    with runtime.during(_NATIVE):
        return wrapped(*args, **kwargs)


# ---------------------------------------------------------------- saving


def save_checkpoint(runtime: Runtime, wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap ``save_checkpoint``: a failed save logs a warning, and the tracker file names the last complete checkpoint.

    If unickpt does not support the job's state on a rank, Megatron saves in its own format in the same call.
    """
    if saves_nothing(getattr(_arguments(), "save", None), first=not torch.distributed.get_rank()):
        return None
    if not active():
        with runtime.during(_NATIVE if switch().saves else runtime.call):  # the flag counts more than the switch
            return wrapped(*args, **kwargs)
    options = _arguments()
    given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    if non_persistent.is_local_save(options, given):
        place, rank = str(options.non_persistent_local_ckpt_dir), torch.distributed.get_rank()
        local_layouts.note(place, rank, int(given["iteration"]), internals.topology())
        return _native(runtime, wrapped, args, kwargs)
    set_asynchronous(options)
    take_retention(options)
    runtime.saver(save_options(options))
    turn = memory.turn_of(runtime, options, given)
    call = ScriptCall(Purpose.SAVE, order=runtime.trackers.begin(), replaces=not given.get("non_persistent_ckpt"))
    if turn is not None and _saved_in_memory(runtime, wrapped, options, replace(call, memory=turn), args, kwargs):
        return None
    before, place = runtime.saves_begun, memory.folder_of(options, str(options.save))
    try:
        with runtime.during(replace(call, memory_folder=place, diverted=Diverted())):
            return wrapped(*args, **kwargs)
    except MegatronSaveError as err:
        failed = err
    except Exception as err:
        if runtime.saves_begun != before:
            raise
        failed = saving.refuse(runtime, err)  # the other ranks wait for this one
    first = torch.distributed.get_rank() == 0
    if not failed.framework_saves:
        if first:
            logger.warning("unickpt: %s Training continues; the next save tries again.", failed)
        torch.distributed.barrier()
        return None
    if first:
        logger.warning("unickpt: %s Megatron saves this checkpoint in its own format instead (torch_dist).", failed)
    natively = replace(call, purpose=Purpose.NATIVE, diverted=Diverted())
    with _changed(options, {BACKEND: False, "async_save": False}), runtime.during(natively):
        result = wrapped(*args, **kwargs)
    if first:
        tracker_hooks.name_native(runtime, options, given, call)
    torch.distributed.barrier()
    return result


def _saved_in_memory(
    runtime: Runtime, wrapped: Callable[..., Any], options: argparse.Namespace, call: ScriptCall, args: Any, kwargs: Any
) -> bool:
    """Save a checkpoint into memory. Returns whether it is on its way; the same on every rank.

    Megatron's function runs as for an asynchronous save, because it then leaves the tracker file to a function that is dropped
    here: the file names checkpoints on disk.
    """
    before = runtime.saves_begun
    try:
        with _changed(options, asynchronous_arguments(options)), runtime.during(call):
            wrapped(*args, **kwargs)
    except MegatronSaveError:
        return False
    except Exception as err:
        if runtime.saves_begun != before:
            raise
        saving.refuse(runtime, err, turn=call.memory)
        return False
    return True


def sharding_metadata(runtime: Runtime, wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap ``_build_sharded_state_dict_metadata``: optimizers are saved in model space, without a gather."""
    native = wrapped(*args, **kwargs)
    return {**native, **METADATA} if active() and runtime.call.purpose in (None, Purpose.SAVE) else native


def get_rng_state(runtime: Runtime, wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap ``get_rng_state``: one object per (pipeline, tensor, data parallel) position, for every expert parallel size.

    Megatron stores one per (pipeline, tensor) position, and with experts one per data parallel rank. A resume with another
    expert parallel size would look for objects that do not exist.
    """
    state = wrapped(*args, **kwargs)
    source = runtime.call.source
    ours = source is not None or (runtime.call.purpose in (None, Purpose.SAVE) and active())
    if not ours or not isinstance(state, ShardedObject):
        return state
    place, sizes = internals.coordinates(), internals.topology()
    count = sizes["world_size"] // (sizes.get("tensor", 1) * sizes.get("pipeline", 1))
    position = place["data"]
    if source is not None:
        count = _data_parallel(source.manifest.writer.topology)
        position %= count
    by_position = ShardedObject(
        RNG, state.data, (sizes.get("pipeline", 1), sizes.get("tensor", 1), count),
        (place["pipeline"], place["tensor"], position), replica_id=0,
    )  # fmt: skip
    if source is not None and by_position.unique_key not in source.shared_names():
        return state  # saved through the strategy, without the scripts: with Megatron's own positions
    return by_position


def _data_parallel(layout: Mapping[str, Any]) -> int:
    return max(int(layout.get("world_size", 1)) // (int(layout.get("tensor", 1)) * int(layout.get("pipeline", 1))), 1)


# ---------------------------------------------------------------- loading


def load_checkpoint(runtime: Runtime, wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap ``load_checkpoint``: detect the format of the directory, and fall back to the newest complete checkpoint."""
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    options = _arguments()
    load_dir = getattr(options, bound.arguments["load_arg"], None)
    if load_dir is None:
        return _native(runtime, wrapped, args, kwargs)
    shutdown.finish_all(ending=False)  # a save of this process that is still in progress may be the newest checkpoint
    exchange = runtime.exchange()
    exchange.begin("choose")
    step = getattr(options, "ckpt_step", None)
    choices = non_persistent.choices_of(options, str(load_dir), step)
    in_memory = memory.resume_of(runtime, options, str(load_dir), step)
    offers = in_memory.offers(lambda: _marked(choices()), partial(memory.tracked, str(load_dir)))
    tried = False

    def attempt(offer: Offer, skipped: tuple[str, ...]) -> Any:
        nonlocal tried
        first, tried = not tried, True
        if offer.native or (first and _local_is_newer(options, bound, offer)):
            return _megatrons(runtime, wrapped, bound, _NATIVE)
        if offer.checked:
            Together(exchange, offer.directory).step("check", partial(in_memory.check, offer))
        result = _universal(runtime, wrapped, bound, options, offer, skipped, partial(in_memory.open, offer))
        in_memory.loaded(offer, offer.step)
        loaded.append(offer.directory)
        return result

    loaded: list[str] = []
    with as_megatron_errors():
        result = resume(
            exchange,
            offers.next,
            attempt,
            partial(_nothing, runtime, wrapped, bound, options, str(load_dir)),
            where=str(load_dir),
            fall_back=options_of(options).fall_back,
        )
    request = replays(str(load_dir))
    if request is not None and loaded:
        replaying.begin(runtime, request, bound.arguments["ddp_model"], bound.arguments["optimizer"], layout_of(loaded[-1]))
    return result


def _scheduled(bound: inspect.BoundArguments) -> tuple[Any, Any]:
    """Return the optimizer and its scheduler of a ``load_checkpoint`` call."""
    return bound.arguments["optimizer"], bound.arguments["opt_param_scheduler"]


def _megatrons(runtime: Runtime, wrapped: Callable[..., Any], bound: inspect.BoundArguments, call: ScriptCall) -> Any:
    """Let Megatron load. A job that saves with unickpt keeps its own bounds of the schedule if it overrides them."""
    with runtime.during(call), schedule.own_bounds(*_scheduled(bound) if active() else (None, None)):
        try:
            return wrapped(*bound.args, **bound.kwargs)
        except RuntimeError as err:
            if "mismatch after resume" in str(err):
                raise type(err)(f"{err}\n{_TWO_STEPS}") from err
            raise


_TWO_STEPS = (
    "unickpt: this form of the optimizer (dp_reshardable, Megatron's default) loads under the tensor and pipeline parallel "
    "sizes that saved it, on any number of data parallel ranks. Start the job once with these sizes and --ckpt-format "
    "unickpt, on as many GPUs as you have, and let it save: that checkpoint loads under every layout"
)


def _nothing(
    runtime: Runtime, wrapped: Callable[..., Any], bound: inspect.BoundArguments, options: argparse.Namespace, load_dir: str,
    offer: Offer,
) -> Any:  # fmt: skip
    """Let Megatron load a checkpoint of its own, or start without one. All ranks call it.

    Raises:
        NotACheckpointError: what the user names is not there.
    """
    step = getattr(options, "ckpt_step", None)
    local = non_persistent.newest_local(options, bound.arguments.get("checkpointing_context")) if offer.missing else -1
    if not offer.missing or (local == step if step else local >= 0):
        return _megatrons(runtime, wrapped, bound, _NATIVE)
    ends = getattr(options, "exit_on_missing_checkpoint", False) and not getattr(options, "pretrained_checkpoint", None)
    if step or ends:
        raise NotACheckpointError(offer.missing)
    if torch.distributed.get_rank() == 0:
        logger.warning(
            "unickpt: %s THE JOB STARTS WITHOUT A CHECKPOINT. --exit-on-missing-checkpoint ends it instead. If the checkpoint "
            "should be there, look at --load and at the file system.",
            offer.missing,
        )
    return _megatrons(runtime, wrapped, bound, ScriptCall(Purpose.NATIVE, hidden=absolute(load_dir)))


def _local_is_newer(options: argparse.Namespace, bound: inspect.BoundArguments, offer: Offer) -> bool:
    """Return whether Megatron has a local checkpoint to load instead of this one."""
    local = non_persistent.newest_local(options, bound.arguments.get("checkpointing_context"))
    newer = local == offer.step if offer.explicit else local >= max(offer.step, 0)
    if not newer:
        return False
    layouts: list[dict[str, Any] | None] = [None] * torch.distributed.get_world_size()
    place, rank = str(options.non_persistent_local_ckpt_dir), torch.distributed.get_rank()
    mine = local_layouts.other_layout(place, rank, local, internals.topology())
    torch.distributed.all_gather_object(layouts, mine)
    other = next((layout for layout in layouts if layout is not None), None)
    if other is None:
        return True
    local_layouts.set_aside(bound.arguments["checkpointing_context"]["local_checkpoint_manager"])
    if torch.distributed.get_rank() == 0:
        logger.warning(
            "unickpt: the local checkpoint of iteration %d was saved under %s, and this job has %s. Local checkpoints load "
            "under the same layout only. They are set aside (other_layout). The job resumes from %s.",
            local, describe(other), describe(internals.topology()), offer.directory,
        )  # fmt: skip
    return False


def _marked(offer: Offer) -> Offer:
    """Write Megatron's mark into the directory of an offer; called on the coordinator."""
    if offer.name.startswith(ITERATION):
        with contextlib.suppress(OSError, StorageError):  # the directory may be read-only
            marks.mark(offer.directory)
    return offer


def checkpoint_name(runtime: Runtime, wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap ``get_checkpoint_name``: return the directory of the checkpoint that is being loaded, whatever its name."""
    base = inspect.signature(wrapped).bind(*args, **kwargs).arguments.get("return_base_dir", False)
    return (runtime.call.directory if base else "") or wrapped(*args, **kwargs)


def first_file(runtime: Runtime, wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap ``find_checkpoint_rank_0``: return the directory of the checkpoint that is being loaded."""
    return runtime.call.directory or wrapped(*args, **kwargs)


def checkpoint_format(runtime: Runtime, wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap ``_get_checkpoint_format``: also recognise a directory without Megatron's mark, of another framework."""
    return NATIVE_FORMAT if runtime.call.source is not None else wrapped(*args, **kwargs)


def _universal(
    runtime: Runtime, wrapped: Callable[..., Any], bound: inspect.BoundArguments, options: argparse.Namespace, offer: Offer,
    skipped: tuple[str, ...], source: Callable[[], Checkpoint],
) -> Any:  # fmt: skip
    """Load a unickpt checkpoint, which ``source`` opens, through Megatron's own function.

    Raises:
        AgreedFailureError: the load failed, on all ranks.
    """
    finetune, with_schedule = bool(getattr(options, "finetune", False)), not _weights_alone(options)
    receiver = Receiver(options, bound.arguments["opt_param_scheduler"] if with_schedule else None)
    accepted = accepted_changes(options)

    def opened() -> tuple[Checkpoint, Any]:
        checkpoint = source()
        foreign = foreign_state.is_foreign(checkpoint)
        stored = None if foreign else metadata.common_state_dict(checkpoint).get("args")
        if stored is not None and not finetune:
            argument_changes.compare(vars(stored), vars(options), where=offer.directory, accepted=accepted)
        if refused := _optimizer_refusal(options, stored, bound.arguments["optimizer"]):
            raise MismatchError(f"{offer.directory} {refused}")
        return checkpoint, stored

    checkpoint, stored = Together(runtime.exchange(), offer.directory).step("compare", opened)
    _warn_of_function_changes(stored, options, checkpoint)
    kept = any(name.startswith(f"{RNG}/") for name in checkpoint.shared_names())
    same = kept and _same_positions(checkpoint.manifest.writer.topology)
    wanted = not (finetune or getattr(options, "no_load_rng", False) or getattr(stored, "no_save_rng", False))
    changes = _arguments_for(options, bound.arguments["load_arg"], offer)
    if wanted and not same:
        changes["no_load_rng"] = True
    if getattr(stored, "no_save_optim", False):
        changes["no_load_optim"] = True  # Megatron would look for the optimizer's state
    begun = runtime.loads_begun
    try:
        directory = offer.directory if offer.generation else str(checkpoint.storage)
        call = ScriptCall(Purpose.LOAD, checkpoint, receiver, directory, _takes_all(options, bound.arguments))
        with _changed(options, changes), runtime.during(call), schedule.own_bounds(*_scheduled(bound)):
            result = wrapped(*bound.args, **bound.kwargs)
            alone = _weights_alone(options) or bound.arguments["optimizer"] is None
            if alone and not getattr(options, "load_main_params_from_ckpt", False):
                masters.follow_weights(p for chunk in _listed(bound.arguments["ddp_model"]) for p in chunk.parameters())
    except MegatronCheckpointError as err:
        if err.failures:
            raise AgreedFailureError(err.failures, err) from None
        _take_part(runtime, offer, err, begun)
        raise
    except Exception as err:
        _take_part(runtime, offer, err, begun)
        raise
    report = runtime.last_report
    reseeded = (
        "" if not wanted else _reseed(options, offer.step, checkpoint) if not same else _data_ranks_changed(options, checkpoint)
    )
    if reseeded and report is not None:
        report.add(RNG, "object", "re-seeded", reseeded)
    if report is not None:
        report.skipped = list(skipped)
    return result


def _weights_alone(options: argparse.Namespace) -> bool:
    return bool(getattr(options, "finetune", False) or getattr(options, "no_load_optim", False))


def _optimizer_refusal(options: argparse.Namespace, stored: Any, optimizer: Any) -> str:
    """Return why a checkpoint without an optimizer is refused; '' if it has one, or if the job loads none."""
    lacks = bool(getattr(stored, "no_save_optim", False))
    if not lacks or _weights_alone(options) or optimizer is None or options_of(options).missing_state != ERROR:
        return ""
    return (
        "was saved with --no-save-optim: it has no optimizer. Pass --no-load-optim or --finetune to load the weights alone, or "
        "--unickpt-missing-state fresh. Nothing is loaded."
    )


def _takes_all(options: argparse.Namespace, arguments: Mapping[str, Any]) -> bool:
    """Return whether the job must load every parameter of the checkpoint: neither its script nor the user say otherwise."""
    return bool(arguments["strict"]) and getattr(options, "dist_ckpt_strictness", "") == "assume_ok_unexpected"


def _listed(model: Any) -> list[Any]:
    return list(model) if isinstance(model, (list, tuple)) else [model]


def _arguments_for(options: argparse.Namespace, load_arg: str, offer: Offer) -> dict[str, Any]:
    """Return the arguments with which Megatron's function loads this checkpoint and searches for no other."""
    changes = {
        "ckpt_format": NATIVE_FORMAT,
        "ckpt_step": max(offer.step, 1),  # 0 would make Megatron read the tracker file
        "pretrained_checkpoint": None,
        "non_persistent_ckpt_type": None,
    }
    load_dir = str(getattr(options, load_arg))
    folder, name = split(offer.directory)
    if Path(folder) == Path(non_persistent.folder_of(options, load_dir) or load_dir) != Path(load_dir):
        changes[load_arg] = folder  # Megatron logs it
        if torch.distributed.get_rank() == 0:
            logger.info("unickpt: the newest checkpoint of %s is the non-persistent one %s in %s", load_dir, name, folder)
    return changes


def _take_part(runtime: Runtime, offer: Offer, error: Exception, begun: int) -> None:
    """Report a failure in Megatron's own part of the load to the other ranks, which wait at the first agreement.

    Args:
        runtime: state of the adapter.
        offer: checkpoint that is being loaded.
        error: this rank's error.
        begun: ``runtime.loads_begun`` before the load. If it has grown, the ranks have passed that agreement.
    """
    if runtime.loads_begun == begun:
        loading.begin_together(runtime, offer.directory).agree("open", error)


def _warn_of_function_changes(stored: Any, options: argparse.Namespace, checkpoint: Checkpoint) -> None:
    """Warn of arguments that change what the loaded tensors compute."""
    if stored is None:
        settings = Model.from_json(checkpoint.manifest.writer.model).settings
        changes = argument_changes.setting_changes(settings, vars(options))
    else:
        accepted, fields = accepted_changes(options), internals.config_fields()
        changes = argument_changes.function_changes(vars(stored), vars(options), fields, accepted=accepted)
    if changes and torch.distributed.get_rank() == 0:
        logger.warning(
            "unickpt: %s: %d arguments can change what the loaded tensors compute: %s. The load continues. Use the "
            "checkpoint's values unless the change is intended (--unickpt-accept-changed).",
            checkpoint.storage,
            len(changes),
            "; ".join(changes),
        )


def _same_positions(source: Mapping[str, Any]) -> bool:
    """Return whether every rank's generators are in the checkpoint: same pipeline, tensor and expert parallel sizes."""
    now = internals.topology()
    return all(int(source.get(key, 1)) == int(now.get(key, 1)) for key in ("pipeline", "tensor", "expert"))


def _data_ranks_changed(options: argparse.Namespace, source: Checkpoint) -> str:
    """Return what becomes of the generators under another data parallel size, for the report; '' under the same."""
    before, now = _data_parallel(source.manifest.writer.topology), _data_parallel(internals.topology())
    if before == now:
        return ""
    how = rng.kept(before, now)
    if now > before and not getattr(options, "data_parallel_random_init", False):  # with it, the object's entry says how
        how = f"{how}, and data parallel rank n has those of n modulo {before}"
    return rng.change(rng.counted(before, "data parallel"), str(now), how)


def _reseed(options: argparse.Namespace, iteration: int, source: Checkpoint) -> str:
    """Seed the generators and trackers as Megatron does when a job starts, with the seed plus the iteration.

    With the seed alone, dropout would repeat the masks of the first iterations.

    Returns:
        The reason, for the report.
    """
    seed = int(getattr(options, "seed", 1234)) + iteration
    internals.seed_scripts(options, seed)
    writer = source.manifest.writer
    how = f"seeded with {seed} (seed + iteration)"
    reason = rng.change(describe(writer.topology), describe(internals.topology()), how)
    if foreign_state.is_foreign(source):
        reason = f"generators of {writer.framework} are not Megatron's: {how}"
    if torch.distributed.get_rank() == 0:
        logger.info("unickpt: random number generators re-seeded, %s", reason)
    return reason
