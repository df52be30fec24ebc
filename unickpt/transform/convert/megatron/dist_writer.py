"""Writer of Megatron's ``torch_dist`` checkpoints. A job without this package resumes from them under any parallel sizes.

    iter_0001000/__0_0.distcp, ...       tensors and objects by position
    iter_0001000/.metadata               table of the tensors and objects
    iter_0001000/common.pt               other state (``common_writer.py``)
    iter_0001000/metadata.json           format of the checkpoint
    latest_checkpointed_iteration.txt    the iteration

Megatron reads them in megatron/core/dist_checkpointing/serialization.py and strategies/torch.py. The optimizer has the form
``fully_reshardable`` (optimizer/distrib_optimizer.py). ``dist_reader.py`` is the inverse.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from unickpt.transform.convert.pipeline import OnBytes
from unickpt.base.errors import MismatchError
from unickpt.checkpoint.checkpoint_folder import RELEASE, TRACKER, iteration_name
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.transform.convert.exported import Exported, filled
from unickpt.transform.convert.megatron.common_state import Report
from unickpt.transform.convert.megatron.common_writer import common_of, is_translated
from unickpt.transform.convert.megatron.dist_reader import COMMON, CONFIG
from unickpt.transform.convert.megatron.keys import BACKEND, DIALECT, MASTER, WEIGHT, keys_of
from unickpt.transform.convert.pickles.pickle_records import BYTES_IO_KEY
from unickpt.transform.convert.torch_dcp.files_writer import DcpWriter, write_tensor
from unickpt.transform.dialects.hf_layouts import in_memory
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.registry import choose
from unickpt.transform.dialects.translated_checkpoint import HUGGINGFACE, shapes_of, translated
from unickpt.transform.dialects.translation import counterpart_shapes

_POSITION = re.compile(r"^rng_state/shard_(\d+)\.(\d+)\.0_(\d+)\.(\d+)\.\d+$")
_LINEAR = re.compile(r"^(.*\.layers\.\d+\..*)\.(linear_\w+)(?=\.weight$)")
# Generators of the adapter, and a state that needs its counterpart in the common state.
_NOT_MEGATRONS = ("unickpt_rng/", "rerun_state_machine_state/")
_EXPERT = "expert"  # placeholder of names in dialects; Megatron stacks the experts of a layer
_ELSEWHERE = "load the checkpoint in Megatron with --ckpt-format unickpt"

Tensors = Mapping[str, Mapping[str, TensorInfo]]  # by name and state


def as_megatron(checkpoint: Checkpoint, *, chosen: str = "", config: Mapping[str, Any] | None = None) -> Checkpoint:
    """Return a checkpoint under the names of megatron-core, with numbered layers and stacked experts.

    Args:
        checkpoint: checkpoint of Megatron, or under the names of transformers.
        chosen, config: as in ``as_huggingface`` (huggingface/writer.py).

    Raises:
        LanguageError: no dialect is known, or it does not fit.
        MismatchError: the configuration describes another model, or a tensor has no counterpart.
    """
    stored, where = checkpoint.manifest.writer, str(checkpoint.storage)
    if stored.dialect == DIALECT:
        return checkpoint
    if stored.dialect != HUGGINGFACE:
        raise MismatchError(f"{where}: has the dialect {stored.dialect or '(none)'}, expected {DIALECT} or {HUGGINGFACE}")
    checkpoint = in_memory(checkpoint)
    model = Model.of_config(config or {}).with_more(Model.from_json(stored.model), where)
    found = choose(DIALECT, HUGGINGFACE, chosen, model.family, where=where, option="--dialect", config="--config")
    rules = found.of_model(model.facts)
    sizes = rules.sizes_of(model.facts)
    given, _ = shapes_of(checkpoint)
    own = {name: shape for name, shape in given.items() if name not in checkpoint.manifest.aliases}
    wanted = [rule for rule in rules.rules if all(hole.name != _EXPERT for hole in rule.here.name.holes)]
    view = translated(checkpoint, wanted, counterpart_shapes(wanted, own, sizes), sizes)
    if view.untranslated:
        raise MismatchError(f"{where}: Megatron has no counterpart of {', '.join(view.untranslated[:8])}; {_ELSEWHERE}")
    return view


def size_bytes(checkpoint: Checkpoint) -> int:
    """Return an upper limit of the size of the tensors that ``export`` writes, in bytes."""
    return sum(info.size_bytes for info in checkpoint.index.tensors if info.kind != "object")


def export(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    separate_experts: bool | None = None,
    shard_bytes: int = 5 << 30,
    progress: OnBytes = lambda _: None,
) -> Exported:
    """Write a folder that Megatron's ``--load`` accepts with ``--ckpt-format torch_dist``.

    A checkpoint of step 0 is written as a ``release`` of Megatron: a job starts with its weights at iteration 0.

    Args:
        checkpoint: checkpoint under Megatron's names (``as_megatron``).
        folder: output directory. It must not contain the iteration. Its tracker file is set to this iteration.
        separate_experts: as in ``common_of``.
        shard_bytes: maximum size of a file, unless a single block is larger.
        progress: called with the number of bytes written.

    Raises:
        MismatchError: the iteration exists already, or Megatron's format cannot represent the checkpoint.
        CorruptCheckpointError, StorageError: the checkpoint is damaged or unreadable.
        OSError: a file cannot be written.
    """
    step = checkpoint.manifest.step
    target = target_of(folder, step)
    tensors = tensors_by_name(checkpoint)
    notes: list[str] = []
    trained = trained_of(tensors)
    common = common_of(checkpoint, trained, separate_experts=separate_experts, report=notes.append)
    notes += without_states(step, trained)
    with filled(target, *tracked(folder, step)) as fresh:
        with DcpWriter(fresh, shard_bytes) as out:
            count = size = 0
            for of, held in tensors.items():
                written = _write(out, checkpoint, of, held, bool(trained), progress)
                count, size = count + len(written), size + sum(info.size_bytes for info in written)
            for key, value in _objects(checkpoint, notes.append):
                out.object(
                    (key,), [value]
                )  # Megatron wraps objects in a list: strategies/torch.py, ``_mcore_to_torch_sharded_object``
            out.commit()
        torch.save(common, fresh / COMMON)
        versions = {"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
        (fresh / CONFIG).write_text(json.dumps({"sharded_backend": BACKEND, **versions}))
    return Exported(target, count, size, tuple(out.names), tuple(notes))


def target_of(folder: Path, step: int) -> Path:
    """Return the folder of an iteration (``iter_0001000``) below the one of ``--load``. Raises MismatchError if it exists."""
    target = folder / (iteration_name(step) if step else RELEASE)
    if target.exists():
        raise MismatchError(f"{target}: exists already; choose another folder")
    return target


def tracked(folder: Path, step: int) -> tuple[Path, str]:
    """Return the tracker file, and what it says of an iteration."""
    return folder / TRACKER, str(step) if step else RELEASE


def tensors_by_name(checkpoint: Checkpoint) -> Tensors:
    """Return the tensors by name and state, in the order of the index. Raises MismatchError for an incomplete model."""
    if checkpoint.manifest.excluded:
        some = ", ".join(checkpoint.manifest.excluded[:8])
        raise MismatchError(f"{checkpoint.storage}: was saved without {some}, so the model is incomplete")
    found: dict[str, dict[str, TensorInfo]] = {}
    for info in checkpoint.index.tensors:
        if info.kind != "object":
            found.setdefault(info.name, {})[info.state] = info
    if not found:
        raise MismatchError(f"{checkpoint.storage}: has no weights")
    return found


def trained_of(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters with optimizer states, by name."""
    return {of: next(iter(held.values())).shape for of, held in tensors.items() if held.keys() - {WEIGHT, MASTER}}


def without_states(step: int, trained: Mapping[str, Any]) -> list[str]:
    """Return what to say of a checkpoint of which Megatron loads only weights."""
    if not step:
        return ["the checkpoint has step 0 and is written as a release, of which Megatron loads only the weights"]
    if not trained:
        return ["the checkpoint has no optimizer states: Megatron loads the weights with --no-load-optim or --finetune"]
    return []


def _write(
    out: DcpWriter,
    checkpoint: Checkpoint,
    name: str,
    held: Mapping[str, TensorInfo],
    trained: bool,
    progress: OnBytes,
) -> list[TensorInfo]:
    """Write weight, master and states of a parameter, and equal tensors only once. Return the written tensors."""
    weight, master = held.get(WEIGHT), held.get(MASTER)
    states = {state: (info, keys_of(name, state)) for state, info in held.items()}
    one = weight is None or master is None or (
        weight.derived_from == MASTER and weight.dtype == master.dtype
        and not checkpoint.override_boxes(checkpoint.ids[weight.key])
    )  # fmt: skip
    if one:  # weight and master are the same tensor, or only one of them exists
        either = states.pop(MASTER, None) or states[WEIGHT]
        is_trained = master is not None or bool(held.keys() - {WEIGHT})
        states[WEIGHT] = either[0], (*keys_of(name, WEIGHT), *(keys_of(name, MASTER) if is_trained and trained else ()))
    for info, (key, *others) in states.values():
        write_tensor(out, (key,), checkpoint, info, progress)
        for other in others:
            out.alias((other,), key)
    return [info for info, _ in states.values()]


def _extra_states(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the keys of the extra states of TransformerEngine's modules, which are empty without fp8.

    Megatron's own modules have the same keys, so every job requires them. Experts have one each.
    """
    for info in checkpoint.index.tensors:
        module = _LINEAR.match(info.name)
        if module is None or info.state != WEIGHT:
            continue
        count = info.shape[0] if ".experts." in info.name else 1
        yield from (f"{module[0]}._extra_state/shard_{at}_{count}" for at in range(count))
        if module[2] == "linear_proj":
            yield f"{module[1]}.core_attention._extra_state/shard_0_1"


def _objects(checkpoint: Checkpoint, report: Report) -> Iterator[tuple[str, Any]]:
    """Yield the objects by position under Megatron's unique keys: extra states of modules, and random generators.

    The adapter stores generators by data parallel rank. Megatron does so only with expert parallelism, and otherwise has one
    for each stage and tensor parallel rank.
    """
    if is_translated(checkpoint):
        yield from ((key, None) for key in _extra_states(checkpoint))
        return
    for name in checkpoint.shared_names():
        if name.startswith(_NOT_MEGATRONS):
            continue
        decoded = checkpoint.shared_object(name)
        if decoded.left_out:
            report(f"{name}: left out, because of {decoded.left_out[0]}")
            continue
        value = decoded.value
        if isinstance(value, dict) and value.keys() == {BYTES_IO_KEY}:
            value = io.BytesIO(value[BYTES_IO_KEY])
        yield name, value
        position = _POSITION.match(name)
        if position is not None:
            yield "rng_state/shard_{}.{}_{}.{}".format(*position.groups()), value
