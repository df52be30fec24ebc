"""A checkpoint as Megatron's ``torch_dist``, which a job without this package resumes from under any parallel shape.

    iter_0001000/__0_0.distcp, ...       tensors and objects by position
    iter_0001000/.metadata               what is where
    iter_0001000/common.pt               the rest (``megatron_common.py``)
    iter_0001000/metadata.json           the mark of such a checkpoint
    latest_checkpointed_iteration.txt    the iteration

What reads them: megatron/core/dist_checkpointing/serialization.py and strategies/torch.py; the inverse of
``foreign/megatron_dist.py``. The optimizer is in the form ``fully_reshardable`` (optimizer/distrib_optimizer.py).
"""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unickpt.errors import MismatchError
from unickpt.exporting.distcp import Writer, write_tensor
from unickpt.exporting.megatron_common import common_of, is_translated
from unickpt.foreign.megatron_dist import BACKEND, COMMON, CONFIG
from unickpt.foreign.megatron_state import DIALECT
from unickpt.index import TensorInfo
from unickpt.language.facts import Model
from unickpt.language.shipped import choose
from unickpt.language.translation import listed
from unickpt.loading import Checkpoint
from unickpt.megatron_keys import BYTES_IO, MASTER, WEIGHT, keys_of
from unickpt.spellings import in_memory
from unickpt.translated import HUGGINGFACE, shapes_of, translated

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
_POSITION = re.compile(r"^rng_state/shard_(\d+)\.(\d+)\.0_(\d+)\.(\d+)\.\d+$")
_LINEAR = re.compile(r"^(.*\.layers\.\d+\..*)\.(linear_\w+)(?=\.weight$)")
# The adapter's own generators; and a state that is nothing without its part in the common one, of Megatron's own classes.
_NOT_MEGATRONS = ("unickpt_rng/", "rerun_state_machine_state/")
_EXPERT = "expert"  # hole of names in dialects: Megatron stacks the experts of a layer
_ELSEWHERE = "Megatron itself loads it with --ckpt-format unickpt"

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        directory: of the iteration.
        files: with tensors.
        tensors: how many.
        size_bytes: of them.
        notes: what is not in it, or otherwise than in the checkpoint, each a sentence.
    """

    directory: Path
    files: tuple[str, ...]
    tensors: int
    size_bytes: int
    notes: tuple[str, ...]


def as_megatron(checkpoint: Checkpoint, *, chosen: str = "", config: Mapping[str, Any] | None = None) -> Checkpoint:
    """A checkpoint under the names of megatron-core: layers by number, experts stacked.

    Args:
        checkpoint: of Megatron, or under the names of transformers.
        chosen, config: as of ``huggingface.as_huggingface``.

    Raises:
        LanguageError: no dialect is known, or it does not fit.
        MismatchError: the configuration is of another model, or a tensor has no counterpart.
    """
    stored, where = checkpoint.manifest.writer, str(checkpoint.storage)
    if stored.dialect == DIALECT:
        return checkpoint
    if stored.dialect != HUGGINGFACE:
        raise MismatchError(f"{where}: has names of {stored.dialect or 'no dialect'}; those of {HUGGINGFACE} become Megatron's")
    checkpoint = in_memory(checkpoint)
    model = Model.of_config(config or {}).with_more(Model.from_json(stored.model), where)
    rules = choose(DIALECT, HUGGINGFACE, chosen, model.family, where=where, option="--dialect").of_model(model.facts)
    sizes = rules.sizes_of(model.facts)
    given, _ = shapes_of(checkpoint)
    own = {name: shape for name, shape in given.items() if name not in checkpoint.manifest.aliases}
    wanted = [rule for rule in rules.rules if all(hole.name != _EXPERT for hole in rule.here.name.holes)]
    view = translated(checkpoint, wanted, listed(wanted, own, sizes), sizes)
    if view.untranslated:
        raise MismatchError(f"{where}: Megatron has no counterpart of {', '.join(view.untranslated[:8])}; {_ELSEWHERE}")
    return view


def size_bytes(checkpoint: Checkpoint) -> int:
    """Of the tensors that ``export`` writes, at most."""
    return sum(info.size_bytes for info in checkpoint.index.tensors if info.kind != "object")


def export(
    checkpoint: Checkpoint, folder: Path, *, apart: bool | None = None, shard_bytes: int = 5 << 30, verify: str = "off",
    progress: Progress = lambda _: None,
) -> Exported:  # fmt: skip
    """Write a folder that Megatron's ``--load`` takes with ``--ckpt-format torch_dist``.

    A checkpoint of step 0 is written as a ``release``, as Megatron calls it: a job begins with its weights at iteration 0.

    Args:
        checkpoint: under Megatron's names (``as_megatron``).
        folder: that is made; the iteration is not in it yet. Its tracker file will name this one.
        apart: as of ``common_of``.
        shard_bytes: of a file, at most, but for a single block.
        verify, progress: as of ``exporting.export``.

    Raises:
        MismatchError: the iteration is there, or the checkpoint cannot be told in Megatron's terms.
        CorruptCheckpointError, StorageError: damaged or unreadable.
        OSError: it cannot be written.
    """
    step = checkpoint.manifest.step
    name = f"iter_{step:07d}" if step else RELEASE
    target, fresh = folder / name, folder / f"{name}.part"
    if target.exists():
        raise MismatchError(f"{target}: is there already; name another folder")
    if checkpoint.manifest.excluded:
        some = ", ".join(checkpoint.manifest.excluded[:8])
        raise MismatchError(f"{checkpoint.storage}: was saved without {some}: no whole model can be made of it")
    tensors = _by_name(checkpoint)
    if not tensors:
        raise MismatchError(f"{checkpoint.storage}: has no weights")
    notes: list[str] = []
    trained = {of: next(iter(held.values())).shape for of, held in tensors.items() if held.keys() - {WEIGHT, MASTER}}
    common = common_of(checkpoint, trained, apart=apart, told=notes.append)
    if not step:
        notes.append("it is of step 0: a release, of which Megatron loads weights alone")
    elif not trained:
        notes.append("it has no states of an optimizer: Megatron loads its weights with --no-load-optim or --finetune")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        with Writer(fresh, shard_bytes) as out:
            count = size = 0
            for of, held in tensors.items():
                written = _write(out, checkpoint, of, held, bool(trained), verify, progress)
                count, size = count + len(written), size + sum(info.size_bytes for info in written)
            for key, value in _objects(checkpoint, notes.append):
                out.object((key,), [value])  # of a list: strategies/torch.py, ``_mcore_to_torch_sharded_object``
            out.commit()
        torch.save(common, fresh / COMMON)
        versions = {"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
        (fresh / CONFIG).write_text(json.dumps({"sharded_backend": BACKEND, **versions}))
        fresh.rename(target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    tracker = folder / f"{TRACKER}.part"
    tracker.write_text(str(step) if step else RELEASE)
    tracker.replace(folder / TRACKER)
    return Exported(target, tuple(out.names), count, size, tuple(notes))


def _by_name(checkpoint: Checkpoint) -> dict[str, dict[str, TensorInfo]]:
    """Tensors by name and state, in the order of the index."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for info in checkpoint.index.tensors:
        if info.kind != "object":
            found.setdefault(info.name, {})[info.state] = info
    return found


def _write(
    out: Writer, checkpoint: Checkpoint, name: str, held: Mapping[str, TensorInfo], trained: bool, verify: str,
    progress: Progress,
) -> list[TensorInfo]:  # fmt: skip
    """A parameter's weight, master and states; what is the same is written once. Returns what was written."""
    weight, master = held.get(WEIGHT), held.get(MASTER)
    states = {state: (info, keys_of(name, state)) for state, info in held.items()}
    one = weight is None or master is None or (
        weight.derived_from == MASTER and weight.dtype == master.dtype
        and not checkpoint.override_boxes(checkpoint.ids[weight.key])
    )  # fmt: skip
    if one:  # an optimizer that steps on the weights themselves has no masters, and a master alone is a weight as well
        either = states.pop(MASTER, None) or states[WEIGHT]
        is_trained = master is not None or bool(held.keys() - {WEIGHT})
        states[WEIGHT] = either[0], (*keys_of(name, WEIGHT), *(keys_of(name, MASTER) if is_trained and trained else ()))
    for info, (key, *others) in states.values():
        write_tensor(out, (key,), checkpoint, info, verify=verify, progress=progress)
        for other in others:
            out.alias((other,), key)
    return [info for info, _ in states.values()]


def _extra_states(checkpoint: Checkpoint) -> Iterator[str]:
    """Keys of the states that TransformerEngine's modules have beside tensors; without fp8 there is nothing in them.

    Megatron's own modules have the same ones, so that a job looks for them in any case. Those of experts are by expert.
    """
    for info in checkpoint.index.tensors:
        module = _LINEAR.match(info.name)
        if module is None or info.state != WEIGHT:
            continue
        count = info.shape[0] if ".experts." in info.name else 1
        yield from (f"{module[0]}._extra_state/shard_{at}_{count}" for at in range(count))
        if module[2] == "linear_proj":
            yield f"{module[1]}.core_attention._extra_state/shard_0_1"


def _objects(checkpoint: Checkpoint, told: Callable[[str], None]) -> Iterator[tuple[str, Any]]:
    """Objects by position, by Megatron's unique keys: extra states of modules, and generators.

    The adapter keeps generators by data parallel rank in every job. Megatron does so with expert parallelism, and else looks
    for one of each stage and tensor parallel rank.
    """
    if is_translated(checkpoint):
        yield from ((key, None) for key in _extra_states(checkpoint))
        return
    for name in checkpoint.shared_names():
        if name.startswith(_NOT_MEGATRONS):
            continue
        decoded = checkpoint.shared_object(name)
        if decoded.left_out:
            told(f"{name}: left out, for it has {decoded.left_out[0]}")
            continue
        value = decoded.value
        if isinstance(value, dict) and value.keys() == {BYTES_IO}:
            value = io.BytesIO(value[BYTES_IO])
        yield name, value
        position = _POSITION.match(name)
        if position is not None:
            yield "rng_state/shard_{}.{}_{}.{}".format(*position.groups()), value
