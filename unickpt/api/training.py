"""Save and load a state dict, in one process or on all ranks of a process group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

import torch
import torch.distributed as dist

from unickpt import __version__
from unickpt.api.arguments import check_kind, path_of
from unickpt.api.dtensors import is_dtensor
from unickpt.api.group import Group, exchange_of
from unickpt.api.holders import agreed_holders, mesh_digests
from unickpt.api.loading import Found, HowToLoad, Loaded, load
from unickpt.api.state import Key, Models, Value, describe, fingerprint_of_replicated
from unickpt.base.errors import ConfigError, NotACheckpointError, SaveFailedError
from unickpt.base.launcher_watch import end_with_launcher
from unickpt.base.listing import some
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.coordination.owners import Origin, Owner
from unickpt.checkpoint.format.manifest import Writer
from unickpt.checkpoint.load.candidates import Candidates
from unickpt.checkpoint.load.folders import newest
from unickpt.checkpoint.load.resume import Offer, resume
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.save.requests import SaveOptions, SaveRequest, SaveResult
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.save.shards import Contribution
from unickpt.checkpoint.storage.base import absolute, split

_MODELS = Models()  # of the state dicts of this process; a function has no other place for them


def save_checkpoint(
    state: Mapping[Key, Value],
    directory: str | os.PathLike[str],
    *,
    step: int = 0,
    objects: Mapping[str, Any] | None = None,
    rank_objects: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    options: SaveOptions | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 1800.0,
) -> SaveResult:
    """Save a state dict. Every rank of the group calls this function.

    A tensor has a name and a state. The key ``"layer.weight"`` means state ``weight``; the key
    ``("layer.weight", "exp_avg")`` names an optimizer state.

    Example:
        One process::

            unickpt.save_checkpoint(model.state_dict(), "out/step100", step=100)

        Two ranks, each with half of the rows of an 8 x 4 weight::

            shard = unickpt.LocalShard(rows, start=(4 * rank, 0), global_shape=(8, 4))
            unickpt.save_checkpoint({"layer.weight": shard}, "out/step100", step=100)

        A model of ``fully_shard`` (FSDP2, HSDP), whose DTensors say which rank has what::

            unickpt.save_checkpoint(model.state_dict(), "out/step100", step=100)

    Args:
        state: tensors to save, by name or by (name, state). A plain ``torch.Tensor`` is the same on all ranks, and each rank
            writes an equal part of it. A ``LocalShard`` is written by the rank that passes it, or in equal parts by the ranks
            in its ``copies``; together the shards of all ranks cover each tensor exactly once, apart from copies. A DTensor is
            a shard with its copies: any mesh, uneven shards, FSDP over tensor parallelism. Any device.
            Dtypes: float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, bool, complex64, and signed and unsigned
            integers.
        directory: checkpoint directory, ``<save_dir>/<tag>``. A path or a URL. The parts above it are created.
        step: training step. The same on all ranks.
        objects: non-tensor state of the job, by name: numbers, strings, containers, tensors, arrays, dates, generators,
            dataclasses ([types](../format.md#8-objects)). The objects of rank 0 are saved. A value of another type is stored as
            a pickle, with a warning. A load leaves its entry out, unless ``allow_pickle`` is set.
        rank_objects: non-tensor state of this rank, such as random generators.
        save_latest: write the tag to ``<save_dir>/latest``. Under torchrun, ``save_dir`` then belongs to one copy of a job:
            if the job is started again while this one still runs, saves of this one are refused.
        options: retention, bandwidth limit and upload. ``asynchronous`` is not supported here.
        group: process group. None: the default group, or this process alone if ``torch.distributed`` is not initialised.
        timeout_s: seconds to wait for the other ranks.

    Returns:
        Size in bytes and wall time in seconds. The checkpoint is on durable storage.

    Raises:
        ConfigError: ``state``, ``directory`` or ``options`` is something else, ``options`` asks for an asynchronous save, or
            this process is not in the group.
        SaveFailedError: no checkpoint was written. It is raised on every rank and names rank and cause. Earlier
            checkpoints, also in the same directory, are intact. A directory with the checkpoint of another model, with tensors
            of other names or shapes, which this process still holds or another job has just written, is such a cause.
        CoordinationError: a rank did not make the call within ``timeout_s``.
    """
    place = path_of(directory, order="state, directory")
    check_kind("state", state, Mapping)
    options = SaveOptions() if options is None else options
    check_kind("options", options, SaveOptions)
    if options.asynchronous:
        raise ConfigError("save_checkpoint does not support SaveOptions(asynchronous=True): it returns a durable checkpoint")
    exchange = exchange_of(group, timeout_s=timeout_s, place=place)
    failed: Exception | None = None
    must_match: Message = {"step": step}
    meshes: dict[tuple[int, ...], str] = {}
    try:
        must_match["replicated_tensors"] = fingerprint_of_replicated(state)
        meshes = mesh_digests((key, value) for key, value in state.items() if is_dtensor(value))
    except Exception as err:  # the other ranks learn it in the save
        failed = err
    holders = agreed_holders(exchange, None, meshes)

    def contribute(_: Message) -> Contribution:
        found = describe(state, Group.of(group), holders)
        return Contribution(
            found.shards(), step, _writer(exchange, owner), tensors=found.tensors, objects=dict(objects or {}),
            rank_objects=dict(rank_objects or {}),
        )  # fmt: skip

    save_dir, tag = split(absolute(place))
    owner = _MODELS.of(state)
    request = SaveRequest(
        contribute, save_dir, tag, save_latest=save_latest, one_writer=save_latest, must_match=must_match,
        framework_stands_in=False, failed=failed,
        claim=None if owner is None else _MODELS.owners.claim(owner, any_structure=True),
    )  # fmt: skip
    pending = Saver(options).save(request, exchange, asynchronous=False)
    if pending.result is None or not pending.result.complete:
        raise SaveFailedError(f"{pending.directory}: {pending.cause()}. Earlier checkpoints are intact.")
    return pending.result


def _writer(exchange: MessageExchange, owner: Owner | None) -> Writer:
    origin = {} if owner is None else asdict(_MODELS.owners.origin(owner))
    topology = {"world_size": exchange.world}
    return Writer("torch", torch.__version__, __version__, torch.__version__, "torch", topology, origin=origin)


def load_checkpoint(
    directory: str | os.PathLike[str],
    state: Mapping[Key, Value],
    *,
    fall_back: bool = True,
    strict: bool = False,
    missing_state: Literal["error", "fresh"] = "error",
    verify: str = "always",
    allow_pickle: bool = False,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 1800.0,
) -> Loaded:
    """Load a checkpoint into the tensors of a state dict. Every rank of the group calls this function.

    The number of ranks and the boxes can differ from those of the saving job. Each rank reads only the fragments that
    overlap its own boxes.

    Example:
        Load the second column block of a weight, in bfloat16::

            shard = unickpt.LocalShard(torch.empty(8, 2, dtype=torch.bfloat16), start=(0, 2), global_shape=(8, 4))
            loaded = unickpt.load_checkpoint("out", {"layer.weight": shard})
            print(loaded.step, loaded.objects)

    Args:
        directory: checkpoint directory, or a save directory. In a save directory the checkpoint that ``latest`` names is
            loaded. A path or a URL.
        state: tensors to fill, by name or by (name, state), as in ``save_checkpoint``. Tensors are filled in place. Any
            device and strides. If the dtype differs from the stored one, the values are cast. ``weight`` and ``master`` stand
            in for each other if the checkpoint has only one of them.
        fall_back: load the newest complete older checkpoint of a save directory if a checkpoint is damaged. All ranks load the
            same one.
        strict: raise an error if the checkpoint has parameters that no rank requests. False: one warning names them.
        missing_state: what to do about states of an optimizer that the checkpoint lacks, such as those of a parameter that was
            frozen when it was saved. ``error``: nothing is loaded. ``fresh``: they keep the values that they have in ``state``.
        verify: checksums to check. ``always``: of every fragment that is read. ``sampled``: of a sample of the fragments
            that are needed in part, and of all others. ``off``: only manifest, index and headers.
        allow_pickle: unpickle values that are stored as pickles. This can run code: only for checkpoints that you trust.
        group: process group. None: the default group, or this process alone if ``torch.distributed`` is not initialised.
        timeout_s: seconds to wait for the other ranks.

    Returns:
        The opened checkpoint, its objects, and the report.

    Raises:
        NotACheckpointError: the directory holds no checkpoint, or no ``latest`` file names one.
        MismatchError: the checkpoint lacks a tensor of ``state`` (see ``missing_state``), or the shapes differ, or with
            ``strict`` no rank requests a parameter. Raised before data is read.
        CorruptCheckpointError, FormatError: the checkpoint is damaged and no other one can be used. The contents of the
            tensors of ``state`` are then undefined.
        ConfigError: a key or value of ``state`` has the wrong type, ``missing_state`` or ``verify`` is another word than these,
            or this process is not in the group.
        CoordinationError: a rank did not make the call within ``timeout_s``.
        StorageError: the storage cannot be read. This is never a reason to fall back.
    """
    how = HowToLoad(strict=strict, missing_state=missing_state, verify=verify, allow_pickle=allow_pickle)
    folder = absolute(path_of(directory, order="directory, state"))
    check_kind("state", state, Mapping)
    end_with_launcher()
    shutdown.finish_all(ending=False)
    exchange = exchange_of(group, timeout_s=timeout_s, place=folder)
    candidates = Candidates(folder)

    def attempt(offer: Offer, skipped: tuple[str, ...]) -> Loaded:
        loaded = load(exchange, offer.directory, lambda found: Found(found, state.items()), Group.of(group), how, skipped)
        owner = _MODELS.of(state)
        if owner is not None:
            _MODELS.owners.adopt(owner, Origin.of(loaded.checkpoint.manifest))
        return loaded

    def nothing(offer: Offer) -> Loaded:
        present = some(offer.present)
        raise NotACheckpointError(
            f"{folder}: no manifest.json and no 'latest' file"
            + (f"; pass one of its checkpoints: {present}" if present else ", so this is not a checkpoint and contains none")
        )

    loaded = resume(exchange, candidates.offer, attempt, nothing, where=folder, fall_back=fall_back)
    exchange.leave()
    return loaded


def latest_checkpoint(directory: str | os.PathLike[str], *, witnessed: bool = False) -> str | None:
    """Return the path of the newest complete checkpoint in a save directory.

    Whole means: manifest and index are valid, and all files exist with the expected sizes. ``verify_checkpoint`` also reads
    the data. The file ``latest`` is not consulted.

    Example:
        Resume if there is something to resume from::

            found = unickpt.latest_checkpoint("out")
            if found is not None:
                unickpt.load_checkpoint(found, state)

    Args:
        directory: save directory, output directory of a Hugging Face Trainer run, or a checkpoint. A path or a URL.
        witnessed: of the checkpoints that are not newer than the last step that the [witness](../../guides/witness.md) has
            passed.

    Returns:
        Path or URL of the checkpoint; in a Trainer run, of the ``checkpoint-N`` folder. None if none is complete.

    Raises:
        StorageError: the storage cannot be read.
    """
    found = newest(absolute(os.fspath(directory)), witnessed=witnessed)
    return None if found is None else found.path
