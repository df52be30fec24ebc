"""``dist_checkpointing.load`` from unickpt directories.

Same arguments and results as megatron-core's own function (``dist_checkpointing/serialization.py``),
which the hooks send here when the directory is ours.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import validation
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from megatron_unickpt import dialects, internals, job, mapping, metadata, restore
from megatron_unickpt.job import in_megatrons_terms
from megatron_unickpt.optimizer import OptimizerPart
from unickpt import interruption
from unickpt.index import TensorInfo
from unickpt.load.resume import Together
from unickpt.loading import Checkpoint, Planned
from unickpt.logs import make_visible
from unickpt.neighbours import Neighbours
from unickpt.report import LoadReport
from unickpt.topology import describe
from unickpt.translated import TranslatedCheckpoint

logger = logging.getLogger("unickpt")

# Objects of a rank's own position that a job under another parallel shape does not ask for.
BY_POSITION = {"rng_state", "unickpt_rng", "rerun_state_machine_state"}

last_report: LoadReport | None = None
agreements_begun = 0  # how many loads this process has begun to agree on


def load(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | Path,
    *,
    validate_access_integrity: bool = True,
    strict: Any = validation.StrictHandling.ASSUME_OK_UNEXPECTED,
    allow_pickle: bool = False,
    verify: str | None = None,
    read_once_per_host: bool | None = None,
) -> Any:
    """Load into a sharded state dict, written under any parallel shape and optimizer.

    Args:
        sharded_state_dict: what this rank wants; tensors that it brings are filled in place.
        checkpoint_dir: of a unickpt checkpoint.
        validate_access_integrity: the ranks also agree before they read, and find out what nobody asked
            for. (Megatron's check that shards do not overlap is made when saving.) All ranks call this
            together in any case, as with Megatron's own strategies, and leave it together.
        strict: Megatron's ``StrictHandling`` or its value.
        allow_pickle: unpickle what the checkpoint holds as opaque blobs. Only for one you wrote yourself.
        verify: ``always``, ``sampled`` or ``off``: what is read against its checksum. None: ``--unickpt-verify``, or always.
        read_once_per_host: what several ranks of a host want is read by one, and handed over in shared memory.
            None: unless ``--unickpt-no-read-once`` was given.

    Returns:
        The state dict; with ``return_all`` and ``return_unexpected`` also missing and unexpected keys.

    Raises:
        MegatronCheckpointError: the checkpoint is damaged or does not fit; which tensor, what was found.
    """
    make_visible()
    begin = time.monotonic()
    handling = validation.parse_strict_flag(strict)
    arguments = internals.global_arguments()
    verify = verify or str(getattr(arguments, "unickpt_verify", "always"))
    if read_once_per_host is None:
        read_once_per_host = not getattr(arguments, "unickpt_no_read_once", False)
    interruption.finish_all()
    together = begin_together(checkpoint_dir)

    def opened() -> tuple[Checkpoint, _Request]:
        return Checkpoint.open(str(checkpoint_dir)), _Request.of(sharded_state_dict)

    with in_megatrons_terms():
        source, request = together.step("open", opened)
        with_others = together.meet if validate_access_integrity else None
        checkpoint = together.step("named", lambda: dialects.as_named_here(source, request.items(), with_others))
        wanted, missing, unexpected = request.wanted, set[str](), set[str]()
        if handling != validation.StrictHandling.ASSUME_OK_UNEXPECTED:  # may raise on some ranks only
            wanted, missing, unexpected = together.step(
                "strictly", lambda: _strictly(checkpoint, wanted, handling, validate_access_integrity)
            )
        filling: _Filling | None = None
        state: Any = None

        def planned() -> Planned:
            nonlocal filling, state
            filling = _Filling(restore.Restore(checkpoint, verify=verify, allow_pickle=allow_pickle), wanted)
            state = filling.work.common()
            return filling.planned

        _, opener = together.plan(planned, identity=lambda: checkpoint.identity, share=read_once_per_host)
        assert filling is not None
        together.read(filling.read, opener)
        together.step("finish", partial(_finish, filling, request, state))
        _account(filling.work, wanted, validate_access_integrity, time.monotonic() - begin, with_optimizer=bool(request.parts))
    merge(state, request.local)
    state = apply_factory_merges(state, request.factories)
    if validation.StrictHandling.requires_returning_mismatch_keys(handling):
        return state, missing, unexpected
    return state


def begin_together(checkpoint_dir: str | Path) -> Together:
    """The agreements of a load from a directory. All ranks call this together."""
    global agreements_begun
    agreements_begun += 1
    meet = job.rendezvous()
    meet.begin("load")
    return Together(meet, str(checkpoint_dir))


@dataclass(frozen=True, slots=True)
class _Request:
    """What this rank's sharded state dict asks for.

    Attributes:
        wanted: sharded tensors and objects, to be filled.
        local: the rest, which stays as it is.
        factories: of megatron-core, to be applied to what was loaded.
        parts: optimizers that have to be told what was loaded.
    """

    wanted: Any
    local: Any
    factories: Any
    parts: list[OptimizerPart]

    @classmethod
    def of(cls, sharded_state_dict: dict[str, Any]) -> _Request:
        _dequantize(sharded_state_dict)
        wanted, local, factories = load_preprocess(sharded_state_dict)
        parts = [leaf for leaf in mapping.walk(local) if isinstance(leaf, OptimizerPart)]
        return cls(extract_sharded_base(wanted)[0], local, factories, parts)

    def items(self) -> list[ShardedTensor]:
        return [leaf for leaf in mapping.walk(self.wanted) if isinstance(leaf, ShardedTensor)]


def _finish(filling: _Filling, request: _Request, state: Any) -> None:
    """Complete the state dict with what was read, and tell the optimizers."""
    merge(state, filling.tree())
    filling.work.optimizers(request.parts)


def load_sharded(wanted: Any, checkpoint_dir: str | Path) -> Any:
    """Fill a tree of sharded tensors and objects, without any communication: what a load strategy does."""
    with in_megatrons_terms():
        items = [leaf for leaf in mapping.walk(wanted) if isinstance(leaf, ShardedTensor)]
        checkpoint = dialects.as_named_here(Checkpoint.open(str(checkpoint_dir)), items, None)
        filling = _Filling(restore.Restore(checkpoint), wanted)
        filling.read()
        return filling.tree()


def _dequantize(state: Any) -> None:
    for leaf in mapping.walk(state):
        if isinstance(leaf, ShardedTensor) and leaf.data is not None:
            leaf.data = internals.dequantized(leaf.data)


class _Filling:
    """A tree of sharded tensors and objects on its way; nothing is read but objects before ``read``."""

    def __init__(self, work: restore.Restore, wanted: Any) -> None:
        leaves = list(mapping.walk(wanted))
        self.work, self._wanted = work, wanted
        # names and shapes first: of another model, the objects do not fit either, which says less
        self.planned = work.plan([leaf for leaf in leaves if isinstance(leaf, ShardedTensor)])
        self._objects = work.objects(leaf for leaf in leaves if isinstance(leaf, ShardedObject))

    def read(self, neighbours: Neighbours | None = None) -> None:
        """The tensors, in place."""
        self.work.read(self.planned, neighbours)

    def tree(self) -> Any:
        """What was wanted, with data and objects in the places of sharded ones."""
        return _mapped(
            self._wanted, lambda item: self._objects[item.unique_key] if isinstance(item, ShardedObject) else item.data
        )


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_mapped(value, function) for value in tree]
    return function(tree)


def _strictly(checkpoint: Checkpoint, wanted: Any, handling: Any, together: bool) -> tuple[Any, set[str], set[str]]:
    """Megatron's own handling of keys that only one side has, on keys that mean the same here and there."""
    local, everyone = None, None
    if together or validation.StrictHandling.requires_global_app_metadata(handling):
        local, everyone = validation.determine_global_metadata(wanted)
    requested = {item.key for rank in everyone for item in rank} if everyone else {i.key for i in mapping.walk(wanted)}
    known = {item.key: item for item in metadata.of_checkpoint(checkpoint).values()}
    for key in BY_POSITION - requested:  # another parallel shape has other positions: the job begins these anew, and says so
        known.pop(key, None)
    for key in requested - known.keys():
        name, state = mapping.tensor_of(key)
        info = restore.source_of(checkpoint, name, state)
        if info is not None:  # the same value under another key
            known[key] = metadata.without_data(key, info)
            known.pop(mapping.key_of(*info.key), None) if mapping.key_of(*info.key) not in requested else None
    for key in list(known):
        name, state = mapping.tensor_of(key)
        twin = mapping.WEIGHT if state == mapping.MASTER else mapping.MASTER
        if state in (mapping.WEIGHT, mapping.MASTER) and key not in requested and mapping.key_of(name, twin) in requested:
            known.pop(key)
    result: tuple[Any, set[str], set[str]] = validation.validate_integrity_and_strict_load(
        wanted, handling, False, local, everyone, known
    )
    return result


def _warn_of_lost_states(left: list[TensorInfo], with_optimizer: bool) -> None:
    lost = sorted({info.state for info in left if info.kind == "optimizer"})
    if lost and with_optimizer:
        logger.warning(
            "unickpt: the checkpoint has %s, which this job's optimizer does not keep, or had not allocated when it was "
            "asked: they are left out, and begin anew", ", ".join(lost),
        )  # fmt: skip


def _warn_of_untrained(names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        logger.warning(
            "unickpt: %s: frozen when the checkpoint was saved, so its optimizer has no state for them. Their states begin at "
            "zero. An optimizer that counts its steps per group does not correct their bias.", shown,
        )  # fmt: skip


def _account(work: restore.Restore, wanted: Any, together: bool, seconds: float, *, with_optimizer: bool) -> None:
    """What no rank asked for goes into the report; the first rank prints it."""
    global last_report
    checkpoint, report = work.checkpoint, work.report
    report.target = describe(internals.topology())
    report.seconds = seconds
    used = set()
    for leaf in mapping.walk(wanted):
        if isinstance(leaf, ShardedTensor):
            info = restore.source_of(checkpoint, *mapping.tensor_of(leaf.key))
            if info is not None:
                used.add(checkpoint.ids[info.key])
    if together:
        meet = job.rendezvous()
        mask = sum(1 << position for position in used)
        masks = meet.gather("requested", {"tensors": f"{mask:x}", "began": sorted(work.began)})
        if masks is not None:
            everything = 0
            for message in masks:
                everything |= int(message["tensors"], 16)
            used = {position for position in range(len(checkpoint.index.tensors)) if everything >> position & 1}
        if meet.rank == 0:
            left = restore.unloaded(checkpoint, used)
            for info in left:
                report.add(info.name, info.state, "left out", "no rank of this job asked for it")
            _warn_of_lost_states(left, with_optimizer)
            _warn_of_untrained({name for message in masks or () for name in message["began"]})
            if work.vocabulary.change and not isinstance(checkpoint, TranslatedCheckpoint):
                logger.warning("unickpt: %s", work.vocabulary.change)
            for line in report.lines():
                logger.info("unickpt: %s", line)
    last_report = report
