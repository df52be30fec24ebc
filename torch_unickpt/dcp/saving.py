"""Saves a state dict of DCP as a checkpoint of unickpt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from torch_unickpt.dcp.contents import Contents
from torch_unickpt.dcp.errors import DcpSaveError, by_rank
from torch_unickpt.dcp.tree import Tree
from torch_unickpt.dcp.values import Bytes, check
from torch_unickpt.held_state import describe
from torch_unickpt.runtime import Runtime
from unickpt import __version__
from unickpt.api.dtensors import is_dtensor
from unickpt.api.group import Group, exchange_of
from unickpt.api.holders import Holders, Keys, agreed_holders, mesh_digests
from unickpt.api.state import LocalShard, Value
from unickpt.base.errors import ConfigError
from unickpt.base.logs import make_visible
from unickpt.checkpoint.checkpoint_folder import step_named
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.format.manifest import Writer
from unickpt.checkpoint.save.dcp_mark import mark_for_dcp
from unickpt.checkpoint.save.replaced import remove_replaced
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions, SaveRequest
from unickpt.checkpoint.save.shards import Contribution
from unickpt.checkpoint.storage.base import absolute, split
from unickpt.transform.dialects.translated_checkpoint import HUGGINGFACE

TIMEOUT_S = 1800.0
TORCHTITAN, _OF_TORCHTITAN = (
    "torchtitan",
    "tok_embeddings.weight",
)  # dialect, and a name that models of transformers do not have
_TREE, _ROUNDS = "tree ", 4


@dataclass
class Parts:
    """What a planner gives this rank to save.

    Attributes:
        tensors: keys, and tensors or parts of them.
        others: other values by key.
        paths: paths by key; empty if the state dict was not flattened.
        deduplicated: the planner has taken out what several ranks hold.
    """

    tensors: list[tuple[str, Value]] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)
    paths: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    deduplicated: bool = False


def is_default(planner: SavePlanner | None) -> bool:
    """Whether a planner plans as DCP does by default, so that ranks can describe their parts without its messages.

    A class that only sets other arguments, such as the name of a cache of plans, does.
    """
    kind, names = type(planner), [name for name in dir(DefaultSavePlanner) if callable(getattr(DefaultSavePlanner, name))]
    return planner is None or (
        isinstance(planner, DefaultSavePlanner)
        and all(getattr(kind, name) is getattr(DefaultSavePlanner, name) for name in names if not name.startswith("__"))
    )


def parts_of(state_dict: Mapping[str, Any], planner: DefaultSavePlanner) -> Parts | None:
    """Return the parts of a state dict under a default planner; None if only its messages tell which rank saves what."""
    planner.set_up_planner(dict(state_dict), is_coordinator=False)
    found = Parts(paths=planner.mappings)
    for key, value in planner.state_dict.items():
        if is_dtensor(value):
            if not _tiled_by_placements(value):
                return None
            found.tensors.append((key, value))
        elif hasattr(value, "local_shards") or hasattr(value, "__create_write_items__"):  # such as FSDP1's ShardedTensor
            return None
        elif isinstance(value, torch.Tensor):
            found.tensors.append((key, value))
        else:
            found.others[key] = value
    return found


def _tiled_by_placements(value: Any) -> bool:
    """Whether the placements of a DTensor say which box a rank has. Megatron-FSDP attaches functions that say otherwise."""
    return "__create_chunk_list__" not in vars(value._local_tensor) if hasattr(value, "_local_tensor") else False


def parts_of_plan(plan: SavePlan, planner: SavePlanner) -> Parts:
    """Return what a planner gives this rank after it has agreed with the other ranks."""
    found = Parts(paths=getattr(planner, "mappings", {}), deduplicated=True)
    for item in plan.items:
        key = item.index.fqn
        if item.type is WriteItemType.BYTE_IO:
            plain = getattr(type(planner), "transform_object", None) is DefaultSavePlanner.transform_object
            found.others[key] = (
                planner.lookup_object(item.index)  # type: ignore[attr-defined]
                if plain
                else Bytes(planner.resolve_data(item).getvalue())  # type: ignore[union-attr]
            )
            continue
        data, info = planner.resolve_data(item), item.tensor_data
        assert isinstance(data, torch.Tensor)
        assert info is not None
        found.tensors.append((key, LocalShard(data.detach(), tuple(info.chunk.offsets), tuple(info.size))))
    return found


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a save.

    Attributes:
        directory: of the checkpoint. A path or a URL.
        group: process group of the call. None: the default group.
        alone: the call is of this process alone (``no_dist``).
        options: of the save. ``asynchronous``: return after the copy.
        stands_in: the caller saves in another way if this save would fail again.
        allow_pickle: store values of types that unickpt does not know as pickles, in place of a failure.
    """

    directory: str
    group: dist.ProcessGroup | None
    alone: bool
    options: SaveOptions = field(default_factory=SaveOptions)
    stands_in: bool = False
    allow_pickle: bool = False


def save(
    runtime: Runtime, parts: Parts | None, call: Call, *, failed: BaseException | None = None,
    on_end: Callable[[PendingSave], None] | None = None,
) -> PendingSave:  # fmt: skip
    """Save the parts of all ranks. Every rank calls it.

    Args:
        runtime: state of the adapter.
        parts: of this rank; None if ``failed``.
        call: arguments.
        failed: why this rank has no parts.
        on_end: called when the save has ended.

    Returns:
        The save, which has ended unless it is asynchronous.

    Raises:
        DcpSaveError: no checkpoint will be written. Raised on every rank.
    """
    make_visible()
    directory = call.directory
    ranks = Group() if call.alone else Group.of(call.group)
    exchange = exchange_of(call.group, timeout_s=TIMEOUT_S, purpose="dcp-save", place=directory, alone=call.alone)
    contents, holders, failed = _agreed(exchange, parts, failed, call)

    def contribute(_: Message) -> Contribution:
        assert contents is not None
        step = step_named(directory) or contents.steps
        dialect = TORCHTITAN if contents.has(_OF_TORCHTITAN) else HUGGINGFACE
        held = describe.description(contents.items, holders, ranks)
        first = ranks.rank == 0
        own = [key for key in contents.kept if holders.first(_kept_key(key)) == ranks.rank]
        topology = {"world_size": len(ranks.ranks)}
        return Contribution(
            held.shards(), step, Writer("torch", torch.__version__, __version__, torch.__version__, dialect, topology),
            tensors=held.tensors, optimizer=contents.record if first else None,
            optimizer_part=None if first or holders.others is None else contents.record,
            objects=contents.objects(own) if first else {},
            shared_objects={} if first else contents.shared_objects(ranks.rank, own),
        )  # fmt: skip

    save_dir, tag = split(absolute(directory))
    request = SaveRequest(
        contribute, save_dir, tag, framework_stands_in=call.stands_in, failed=failed,
        on_commit=_committed, on_end=on_end,
    )  # fmt: skip
    pending = runtime.saver(call.options, "dcp").save(request, exchange)
    if pending.done and not pending.committed and not (pending.result is not None and pending.result.skipped):
        raise failure_of(pending)
    return pending


def failure_of(pending: PendingSave) -> DcpSaveError:
    """Return the error of a save that has ended without a checkpoint."""
    found = pending.result
    failures = by_rank(() if found is None else found.failures, pending.directory, "could not save it")
    text = f"{pending.directory}: {pending.cause()}. Earlier checkpoints are intact."
    return DcpSaveError(text, failures, framework_saves=found is not None and found.framework_saves)


def _agreed(
    exchange: MessageExchange, parts: Parts | None, failed: BaseException | None, call: Call
) -> tuple[Contents | None, Holders, BaseException | None]:
    """Agree on where model and optimizer lie, and on which ranks hold the same. Every rank calls it.

    A rank whose planner has left it no settings does not see that its tensors are states of an optimizer.

    Returns:
        The contents of this rank, None if it failed; which ranks hold the same; why this rank failed.
    """
    tree: Tree | None = None
    for _ in range(_ROUNDS):
        contents, keys, meshes = None, None, None
        if failed is None and parts is not None:
            try:
                contents = Contents.of(parts.tensors, parts.others, parts.paths, tree)
                if not call.allow_pickle:
                    check(contents.values, pickled=not call.stands_in)
                keys = [*(item.text for item in contents.items if item.plain), *map(_kept_key, contents.kept)]
                keys.append(_TREE + json.dumps(contents.tree.as_json()))
                meshes = mesh_digests((item.key, item.value) for item in contents.items if is_dtensor(item.value))
            except Exception as err:  # the other ranks learn it in the save
                failed = err
        holders = agreed_holders(exchange, None if keys is None else Keys.of(keys), meshes)
        trees = [key.removeprefix(_TREE) for key in holders.others or () if key.startswith(_TREE)]
        if len(trees) < 2:
            return contents, holders, failed
        tree = Tree.joined(Tree.from_json(json.loads(each)) for each in trees)
    return contents, holders, ConfigError(f"the ranks do not agree on where the model lies in the state dict: {trees[:4]}")


def _kept_key(key: str) -> str:
    return f"kept {key}"


def _committed(directory: str) -> None:
    remove_replaced(directory, "torch", ("*.distcp",))
    mark_for_dcp(directory)


def metadata_of(parts: Parts) -> Metadata:
    """Return the metadata of the parts of a rank, with each tensor as one chunk."""
    found: dict[str, Any] = {key: BytesStorageMetadata() for key in parts.others}
    for key, value in parts.tensors:
        shape, dtype = (value.global_shape, value.data.dtype) if isinstance(value, LocalShard) else (value.shape, value.dtype)
        found[key] = tensor_metadata(tuple(shape), dtype)
    return metadata(found, dict(parts.paths))


def metadata(found: dict[str, Any], paths: dict[str, Any]) -> Metadata:
    """Return metadata of DCP. ``found``: metadata by key."""
    made = Metadata(found, planner_data=paths)
    made.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # older releases have none
    return made


def tensor_metadata(shape: tuple[int, ...], dtype: torch.dtype) -> TensorStorageMetadata:
    """Return the metadata of a tensor as one chunk, so that each box of a load is one request."""
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), [chunk])
