"""The training scripts of Megatron-LM: ``--ckpt-format unickpt``, resume from whatever is in ``--load``.

``megatron.training.checkpointing`` branches on the literal ``torch_dist`` in a dozen places. So the
arguments say ``torch_dist`` (and ``unickpt``, which we look at) once they are parsed, and
whatever strategy those branches choose stands for ours while they save.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_unickpt import arguments, crossing, internals, job, loading, metadata, non_persistent, optimizer_hooks, saving
from megatron_unickpt.job import BACKEND, MegatronCheckpointError, SaveFailedError, in_megatrons_terms
from megatron_unickpt.optimizer import METADATA
from unickpt import interruption
from unickpt.errors import ConfigError, StorageError
from unickpt.language.facts import Model
from unickpt.load.resume import AgreedFailureError, Offer, Together, resume
from unickpt.loading import Checkpoint
from unickpt.manifest import MANIFEST_FILE
from unickpt.reading import VERIFY
from unickpt.resuming import TRACKER
from unickpt.retention import Retention
from unickpt.saves import ON_BUSY, SaveOptions
from unickpt.storage import is_url, open_storage, split, usable
from unickpt.timing.options import TimingOptions
from unickpt.topology import describe

logger = logging.getLogger("unickpt")

NATIVE_FORMAT = "torch_dist"
RNG = "rng_state"
ASKED_ASYNC = "unickpt_async_save"  # what --async-save said before Megatron checked the arguments


class _Mode:
    """What the hooked functions are being called for. ``source``: the checkpoint being loaded, if it is ours."""

    def __init__(self) -> None:
        self.saving = False
        self.loading = False
        self.source: Checkpoint | None = None


_mode = _Mode()


def active() -> bool:
    """Whether this job asked for ``--ckpt-format unickpt``."""
    return bool(getattr(internals.global_arguments(), BACKEND, False))


def _arguments() -> argparse.Namespace:
    """The arguments, from where the hooked functions themselves take them."""
    from megatron.training import checkpointing as native

    found: argparse.Namespace = native.get_args()
    return found


# ---------------------------------------------------------------- arguments


def add_arguments(wrapped: Callable[..., Any], parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """``add_megatron_arguments``: ``--ckpt-format`` takes one more value."""
    result: argparse.ArgumentParser = wrapped(parser)
    for action in result._actions:
        if "--ckpt-format" in action.option_strings and action.choices is not None and BACKEND not in action.choices:
            action.choices = [*action.choices, BACKEND]
            action.help = f"{action.help or ''} {BACKEND}: universal checkpoints, loadable under any parallel shape."
    add = result.add_argument_group(BACKEND, "with --ckpt-format unickpt").add_argument
    add("--unickpt-sync-save", action="store_true", help="wait until a checkpoint is durable, even with --async-save")
    add("--unickpt-on-busy", choices=ON_BUSY, default="wait", help="a save that begins while one is still being written")
    add("--unickpt-staging-gigabytes", type=float, help="host memory for a save's copy, per rank (default: no limit)")
    add("--unickpt-write-megabytes-per-second", type=float, help="bandwidth of writing, per rank (default: no limit)")
    add("--unickpt-no-direct-io", action="store_true", help="write data through the page cache")
    add("--unickpt-keep-last", type=int, default=0, help="after a save, remove all but so many of the newest; 0 keeps all")
    add("--unickpt-keep-every", type=int, default=0, help="of these, keep those whose iteration is a multiple of this")
    add("--unickpt-upload-to", default="", metavar="URL", help="copy every checkpoint there too, behind training")
    add("--unickpt-grace-seconds", type=float, default=25.0, help="how long SIGTERM waits for a save that was begun")
    add("--unickpt-load-dialect", help="of a checkpoint of another framework, if it does not tell: family, or a dialect's file")
    add("--unickpt-verify", choices=VERIFY, default="always", help="check what is read against its checksum")
    add(
        "--unickpt-no-read-once", action="store_true", help="every rank reads all that it needs, also what its host's others do"
    )
    for option in fields(TimingOptions):  # whatever the format of checkpoints is
        name = "--" + _timing_argument(option.name).replace("_", "-")
        kind: dict[str, Any] = {"action": "store_true"} if option.name == "enabled" else {"type": type(option.default)}
        add(name, default=option.default, help=option.metadata["doc"], **kind)
    return result


def _timing_argument(option: str) -> str:
    return "unickpt_timing" if option == "enabled" else f"unickpt_timing_{option}"


def _save_options(options: argparse.Namespace) -> SaveOptions:
    staging, bandwidth = options.unickpt_staging_gigabytes, options.unickpt_write_megabytes_per_second
    return SaveOptions(
        asynchronous=_wants_asynchronous(options),
        on_busy=options.unickpt_on_busy,
        staging_bytes=None if staging is None else int(staging * 1e9),
        bandwidth_bytes_per_s=None if bandwidth is None else bandwidth * 1e6,
        direct_io=not options.unickpt_no_direct_io,
        grace_s=options.unickpt_grace_seconds,
        retention=Retention(options.unickpt_keep_last, options.unickpt_keep_every),
        upload_to=options.unickpt_upload_to,
    )


def _wants_asynchronous(options: argparse.Namespace) -> bool:
    """Whether the user has given ``--async-save``.

    Megatron's checks of the arguments turn it off where its own worker process is not asked for, which we do not use;
    so what counts is what was parsed. Megatron's local checkpoints keep its own way.
    """
    if getattr(options, "non_persistent_ckpt_type", None) == "local":
        return bool(getattr(options, "async_save", False))
    return bool(getattr(options, ASKED_ASYNC, False)) and not options.unickpt_sync_save


def _set_asynchronous(options: argparse.Namespace) -> None:
    """Megatron's own flag decides how it finalizes a save; set at the first one, after the checks of the arguments."""
    options.async_save = _wants_asynchronous(options)
    if options.async_save and hasattr(options, "async_strategy"):
        options.async_strategy = "mcore"


def parse_arguments(wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``parse_args``: from here on, the scripts see the format whose branches they shall take."""
    parsed = wrapped(*args, **kwargs)
    told: dict[str, Any] = {
        option.name: getattr(parsed, _timing_argument(option.name), option.default) for option in fields(TimingOptions)
    }
    if told["enabled"]:  # jobs without it do not even import it
        from megatron_unickpt import timing

        timing.begin_with_groups(TimingOptions(**told))
    wanted = getattr(parsed, "ckpt_format", None) == BACKEND
    setattr(parsed, BACKEND, wanted)
    setattr(parsed, ASKED_ASYNC, bool(getattr(parsed, "async_save", False)))
    if wanted:
        _check_places(parsed)
        parsed.ckpt_format = NATIVE_FORMAT
    return parsed


def _check_places(parsed: argparse.Namespace) -> None:
    """The scripts make directories and open files where ``--save`` and ``--load`` say, in the local file system.

    Raises:
        ConfigError: one of them is a URL, or uploads cannot work.
    """
    for name in ("save", "load"):
        where = getattr(parsed, name, None)
        if where and is_url(where):
            raise ConfigError(
                f"--{name} {where}: Megatron's scripts need a directory there. Save into one, and let --unickpt-upload-to URL "
                "copy the checkpoints behind training; to resume from a copy, fetch it with the store's own tool."
            )
    upload_to = getattr(parsed, "unickpt_upload_to", "")
    reason = usable(upload_to) if upload_to else ""
    if reason:
        raise ConfigError(f"--unickpt-upload-to: {reason}")


# ---------------------------------------------------------------- saving


def sharding_metadata(wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``_build_sharded_state_dict_metadata``: optimizers in model space, without a gather."""
    native = wrapped(*args, **kwargs)
    return {**native, **METADATA} if active() and not _mode.loading else native


def in_a_save() -> bool:
    """Whether the scripts are just saving, and in our format: then every strategy that they choose stands for ours."""
    return _mode.saving


def track(directory: str) -> None:
    """On the coordinator, once a checkpoint of the scripts exists: Megatron's tracker file names it.

    Megatron writes it too, when it finalizes the save; a job that is preempted before that shall not
    lose a checkpoint that is whole.
    """
    folder, name = split(directory)
    if name.startswith("iter_") and name[5:].isdigit():
        open_storage(folder).write_atomic(TRACKER, str(int(name[5:])).encode())


def save_checkpoint(wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``save_checkpoint``: a checkpoint that cannot be written is a warning, and the tracker keeps naming the last good one.

    Where the job's state cannot be described on some rank, Megatron saves it itself, in its own format, in the same call.
    """
    if not active():
        return wrapped(*args, **kwargs)
    options = _arguments()
    if non_persistent.is_local_save(options, kwargs):
        return _native(wrapped, args, kwargs)
    _set_asynchronous(options)
    job.saver(_save_options(options))
    before = saving.begun
    _mode.saving = True
    try:
        with _optimizers_asked():
            return wrapped(*args, **kwargs)
    except SaveFailedError as err:
        failed = err
    except Exception as err:
        if saving.begun != before:
            raise
        failed = saving.refuse(err)  # the other ranks wait for this one
    finally:
        _mode.saving = False
    first = torch.distributed.get_rank() == 0
    if not failed.framework_saves:
        if first:
            logger.warning("unickpt: %s Training goes on; the next save tries again.", failed)
        torch.distributed.barrier()
        return None
    if first:
        logger.warning("unickpt: %s Megatron saves this checkpoint in its own format instead (torch_dist).", failed)
    with _changed(options, {BACKEND: False, "async_save": False}):
        result = wrapped(*args, **kwargs)
    if first and failed.directory:
        open_storage(failed.directory).delete(MANIFEST_FILE)  # of an earlier save of ours under this iteration
    return result


@contextmanager
def _optimizers_asked() -> Iterator[None]:
    before = optimizer_hooks.asked_for_by_scripts
    optimizer_hooks.asked_for_by_scripts = True
    try:
        yield
    finally:
        optimizer_hooks.asked_for_by_scripts = before


def get_rng_state(wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``get_rng_state``: one object per (pipeline, tensor, data parallel) position, whatever the expert parallel size.

    Megatron keeps one per (pipeline, tensor) position, and with experts one per data parallel rank, so
    that turning expert parallelism on or off leaves it looking for objects that are not there.
    """
    state = wrapped(*args, **kwargs)
    ours = _mode.source is not None if _mode.loading else active()
    if not ours or not isinstance(state, ShardedObject):
        return state
    place, sizes = internals.coordinates(), internals.topology()
    count = sizes["world_size"] // (sizes.get("tensor", 1) * sizes.get("pipeline", 1))
    position = place["data"]
    if _mode.source is not None:
        stored = _data_parallel(_mode.source.manifest.writer.topology)
        count, position = stored, position % stored
    ours_state = ShardedObject(
        RNG, state.data, (sizes.get("pipeline", 1), sizes.get("tensor", 1), count),
        (place["pipeline"], place["tensor"], position), replica_id=0,
    )  # fmt: skip
    if _mode.source is not None and ours_state.unique_key not in _mode.source.shared_names():
        return state  # saved through the strategy alone, with Megatron's own positions
    return ours_state


def _data_parallel(layout: Mapping[str, Any]) -> int:
    return max(int(layout.get("world_size", 1)) // (int(layout.get("tensor", 1)) * int(layout.get("pipeline", 1))), 1)


# ---------------------------------------------------------------- loading


def load_checkpoint(wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``load_checkpoint``: recognises the format in the directory, and falls back to the newest whole checkpoint."""
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    options = _arguments()
    load_dir = getattr(options, bound.arguments["load_arg"], None)
    if load_dir is None:
        return _native(wrapped, args, kwargs)
    interruption.finish_all()  # what this process has just saved is there to be chosen
    meet = job.rendezvous()
    meet.begin("choose")
    choices = non_persistent.choices_of(options, str(load_dir), getattr(options, "ckpt_step", None))
    tried = False

    def attempt(offer: Offer, skipped: tuple[str, ...]) -> Any:
        nonlocal tried
        first, tried = not tried, True
        if first and _local_is_newer(options, bound, offer):
            return _native(wrapped, args, kwargs)
        return _ours(wrapped, bound, options, offer, skipped)

    with in_megatrons_terms():
        return resume(meet, lambda: _marked(choices()), attempt, lambda _: _native(wrapped, args, kwargs), where=str(load_dir))


def _local_is_newer(options: argparse.Namespace, bound: inspect.BoundArguments, offer: Offer) -> bool:
    """Whether Megatron has a local checkpoint that is to be loaded instead of this one."""
    local = non_persistent.newest_local(options, bound.arguments.get("checkpointing_context"))
    return local == offer.step if offer.explicit else local >= max(offer.step, 0)


def _native(wrapped: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Megatron's own load, or its save of a local checkpoint: nothing is described in our way."""
    _mode.loading, _mode.source = True, None
    try:
        return wrapped(*args, **kwargs)
    finally:
        _mode.loading = False


def _marked(offer: Offer) -> Offer:
    """On the coordinator: Megatron finds its own mark in what is loaded next."""
    if offer.name.startswith("iter_"):
        with contextlib.suppress(OSError, StorageError):  # a job that was killed right after the commit; a read-only directory
            job.mark(offer.directory)
    return offer


def checkpoint_name(wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``get_checkpoint_name``: the directory of the checkpoint that is being loaded, whatever it is called."""
    base = inspect.signature(wrapped).bind(*args, **kwargs).arguments.get("return_base_dir", False)
    return str(_mode.source.storage) if _mode.source is not None and base else wrapped(*args, **kwargs)


def first_file(wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``find_checkpoint_rank_0``: a distributed checkpoint is a directory."""
    return str(_mode.source.storage) if _mode.source is not None else wrapped(*args, **kwargs)


def checkpoint_format(wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``_get_checkpoint_format``: also of a directory that does not bear Megatron's mark, as other frameworks' do not."""
    return NATIVE_FORMAT if _mode.source is not None else wrapped(*args, **kwargs)


def _ours(
    wrapped: Callable[..., Any], bound: inspect.BoundArguments, options: argparse.Namespace, offer: Offer,
    skipped: tuple[str, ...],
) -> Any:  # fmt: skip
    """Load one of our checkpoints through Megatron's own function.

    Raises:
        AgreedFailureError: it failed, on all ranks.
    """
    finetune = bool(getattr(options, "finetune", False))

    def opened() -> tuple[Checkpoint, Any]:
        checkpoint = Checkpoint.open(offer.directory)
        foreign = crossing.is_foreign(checkpoint)
        stored = None if foreign else metadata.load_common_state_dict(offer.directory).get("args")
        if stored is not None and not finetune:
            arguments.compare(vars(stored), vars(options), where=offer.directory)
        return checkpoint, stored

    checkpoint, stored = Together(job.rendezvous(), offer.directory).step("compare", opened)
    _warn_of_function_changes(stored, options, checkpoint)
    kept = any(name.startswith(f"{RNG}/") for name in checkpoint.shared_names())
    same = kept and _same_positions(checkpoint.manifest.writer.topology)
    wanted = not (finetune or getattr(options, "no_load_rng", False) or getattr(stored, "no_save_rng", False))
    # a directory is chosen already; the step, which must not be 0 then, keeps Megatron from looking for one
    changes = {
        "ckpt_format": NATIVE_FORMAT,
        "ckpt_step": max(offer.step, 1),
        "pretrained_checkpoint": None,
        "non_persistent_ckpt_type": None,
    }
    load_dir = str(getattr(options, bound.arguments["load_arg"]))
    folder, name = split(offer.directory)
    if Path(folder) == Path(non_persistent.folder_of(options, load_dir) or load_dir) != Path(load_dir):
        changes[bound.arguments["load_arg"]] = folder  # Megatron's log says where it loads from
        if torch.distributed.get_rank() == 0:
            logger.info("unickpt: the newest checkpoint of %s is the non-persistent one %s in %s", load_dir, name, folder)
    if wanted and not same:
        changes["no_load_rng"] = True
    with_schedule = not (finetune or getattr(options, "no_load_optim", False))
    mine = crossing.Job(options, bound.arguments["opt_param_scheduler"] if with_schedule else None)
    _mode.loading, _mode.source = True, checkpoint
    begun = loading.agreements_begun
    try:
        with _changed(options, changes), _optimizers_asked(), crossing.into(mine):
            result = wrapped(*bound.args, **bound.kwargs)
    except MegatronCheckpointError as err:
        if err.failures:
            raise AgreedFailureError(err.failures, err) from None
        _take_part(offer, err, begun)
        raise
    except Exception as err:
        _take_part(offer, err, begun)
        raise
    finally:
        _mode.loading, _mode.source = False, None
    if wanted and not same:
        _reseed(options, offer.step, checkpoint)
    report = loading.last_report
    if report is not None:
        report.skipped = list(skipped)
    return result


def _take_part(offer: Offer, error: Exception, begun: int) -> None:
    """Tell the other ranks of a failure in Megatron's own part of the load. They wait for this rank at the first agreement.

    Args:
        offer: what is being loaded.
        error: this rank's.
        begun: ``loading.agreements_begun`` before. If it has grown, the other ranks have agreed without this failure.
    """
    if loading.agreements_begun == begun:
        loading.begin_together(offer.directory).agree("open", error)


@contextmanager
def _changed(options: argparse.Namespace, values: Mapping[str, Any]) -> Iterator[None]:
    """Arguments with other values for the time of a call."""
    before = {key: getattr(options, key, None) for key in values}
    vars(options).update(values)
    try:
        yield
    finally:
        vars(options).update(before)


def _warn_of_function_changes(stored: Any, options: argparse.Namespace, checkpoint: Checkpoint) -> None:
    """Arguments that change what the loaded tensors compute, with both values."""
    if stored is None:
        settings = Model.from_json(checkpoint.manifest.writer.model).settings
        changes = arguments.setting_changes(settings, vars(options))
    else:
        changes = arguments.function_changes(vars(stored), vars(options), internals.config_fields())
    if changes and torch.distributed.get_rank() == 0:
        logger.warning(
            "unickpt: %s: %d arguments change what the loaded tensors compute: %s. The load goes on. Give the checkpoint's "
            "values unless the change is meant.", checkpoint.storage, len(changes), "; ".join(changes),
        )  # fmt: skip


def _same_positions(source: Mapping[str, Any]) -> bool:
    """Whether every rank's generators have a counterpart: same pipeline, tensor and expert parallel sizes."""
    now = internals.topology()
    return all(int(source.get(key, 1)) == int(now.get(key, 1)) for key in ("pipeline", "tensor", "expert"))


def _reseed(options: argparse.Namespace, iteration: int, source: Checkpoint) -> None:
    """Seed the generators and trackers as Megatron does when a job starts, from the seed plus the iteration.

    With the seed alone, dropout would repeat the masks of the first iterations.
    """
    seed = int(getattr(options, "seed", 1234)) + iteration
    internals.seed_scripts(options, seed)
    writer, now = source.manifest.writer, describe(internals.topology())
    why = f"{describe(writer.topology)} became {now}"
    if crossing.is_foreign(source):
        why = f"generators of {writer.framework} are not Megatron's"
    reason = f"{why}: seeded with {seed} (seed + iteration)"
    if loading.last_report is not None:
        loading.last_report.add(RNG, "object", "re-seeded", reason)
    if torch.distributed.get_rank() == 0:
        logger.info("unickpt: random number generators re-seeded, %s", reason)


__all__ = ["active", "load_checkpoint", "save_checkpoint"]
