"""Loads a checkpoint of unickpt into a state dict of DCP, as its planner asks."""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from torch_unickpt.dcp.contents import Stored
from torch_unickpt.dcp.errors import DcpLoadError, by_rank
from torch_unickpt.dcp.saving import TIMEOUT_S, metadata, tensor_metadata
from torch_unickpt.dcp.tree import Tree
from torch_unickpt.dcp.values import Bytes
from unickpt.api.group import Group, exchange_of
from unickpt.api.loading import Found, HowToLoad, load
from unickpt.api.state import Key, LocalShard, Value
from unickpt.base.errors import MismatchError
from unickpt.base.logs import make_visible
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.report import LoadReport
from unickpt.checkpoint.load.resume import AgreedFailureError
from unickpt.checkpoint.state.filling import WEIGHT, Filling, state_for
from unickpt.checkpoint.state.optimizer_record import formed

# States that every optimizer of torch begins with zeros, or at step 0
_FROM_ZERO = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"})


class Contained:
    """What a checkpoint has for a state dict.

    Args:
        stored: the opened checkpoint.
        template: values of the state dict to fill, by key; None: unknown, such as in a call of torch's reader.
    """

    def __init__(self, stored: Stored, template: Mapping[str, Any] | None = None) -> None:
        self.stored = stored
        tensors = [key for key, value in (template or {}).items() if isinstance(value, torch.Tensor)]
        self._wanted = None if template is None else Tree.of(tensors, template)
        self._template = template or {}

    def tensor(self, key: str) -> tuple[str, str] | None:
        """Return the stored name and state of the tensor with a key, or None."""
        for tree in (self.stored.tree, self._wanted):
            if tree is None or tree.key_of(*tree.name_of(key)) != key:  # such as a value with the name of a parameter
                continue
            name, state = tree.name_of(key)
            name = self.stored.checkpoint.manifest.aliases.get(name, name)
            if self.stored.checkpoint.serving(name, state) is not None:
                like = self._template.get(key)
                if state == WEIGHT and isinstance(like, torch.Tensor):
                    state = state_for(self.stored.checkpoint, name, like.dtype)
                return name, state
        return None

    def value(self, key: str) -> tuple[bool, Any]:
        """Return whether the checkpoint has a value with a key that is no tensor of its index, and the value."""
        if key in self.stored.values:
            return True, self.stored.values[key]
        for tree in (self.stored.tree, self._wanted):
            if tree is None:
                continue
            found: Mapping[str, Any] = {}
            part, setting = "", tree.setting_of(key)
            if tree.is_state(key):
                name, part = tree.name_of(key)
                found = self.stored.scalars.get(name, {})
            elif setting is not None:
                part = setting[1]
                found = self.stored.settings.get(self._named(tree, setting[0]), {})
            if part in found:
                value = found[part]
                return True, value.clone() if isinstance(value, torch.Tensor) else value
            if tree is self._wanted and found and setting is not None and key in self._template:
                return True, self._template[key]  # another framework has no such setting: this job keeps its own
        return False, None

    def _named(self, tree: Tree, name: str) -> str:
        """Return the first parameter of a group if ``name`` is the number of one in the state dict to fill."""
        if tree.flat:
            return name
        listed = self._template.get(f"{tree.optimizer}param_groups.{name}.params")
        return str(listed[0]) if isinstance(listed, (list, tuple)) and listed else name

    def begins(self, key: str) -> bool:
        """Whether a key is a state of a parameter that was trained and had no gradient yet, and so had no state.

        Before a load, DCP lets the optimizer make the states of all parameters (``_init_optim_state``).
        """
        tree = self._wanted
        if tree is None or not tree.is_state(key):
            return False
        name, state = tree.name_of(key)
        return state in _FROM_ZERO and name in self.stored.settings and name not in self.stored.stepped

    def keys(self) -> Iterable[str]:
        """Return the keys of the checkpoint, and those of the state dict to fill that it can serve."""
        tree = self.stored.tree
        infos = [info for info in self.stored.checkpoint.index.tensors if info.kind != "object"]
        yield from (tree.key_of(info.name, info.state) for info in infos)
        yield from self.stored.values
        where = tree.optimizer
        if where is not None:
            yield from (f"{where}state.{name}.{key}" for name, held in self.stored.scalars.items() for key in held)
        if where is not None and tree.flat:
            yield from (f"{where}param_groups.{name}.{key}" for name, held in self.stored.settings.items() for key in held)
        yield from self._template

    def metadata(self) -> Metadata:
        """Return what DCP's planners need to know, with each tensor as one chunk."""
        found: dict[str, Any] = {}
        paths: dict[str, Any] = {}
        for key in dict.fromkeys(self.keys()):
            at = self.tensor(key)
            if at is not None:
                info = self.stored.checkpoint.serving(*at)
                assert info is not None
                found[key] = tensor_metadata(info.shape, torch_dtype(info.dtype))
            else:
                has, value = self.value(key)
                if not has and not self.begins(key):
                    continue
                like = self._template.get(key, value)
                is_tensor = isinstance(like, torch.Tensor)
                found[key] = tensor_metadata(tuple(like.shape), like.dtype) if is_tensor else BytesStorageMetadata()
            paths[key] = self.stored.paths[key] if key in self.stored.paths else self.stored.tree.path_of_key(key)
        return metadata(found, paths)

    def requests(self, plan: LoadPlan, planner: LoadPlanner) -> tuple[list[tuple[Key, Value]], list[tuple[ReadItem, Any]]]:
        """Return the tensors to fill, and the tensors and values that ``give`` hands to the planner after that."""
        wanted: list[tuple[Key, Value]] = []
        later: list[tuple[ReadItem, Any]] = []
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                value = self.value(key)[1]
                if isinstance(value, Bytes) and not self.stored.allow_pickle:
                    raise MismatchError(
                        f"{self.stored.checkpoint.storage}: {key} was serialised by the planner of the job that saved, and "
                        "torch unpickles it. That can run code. If you trust the checkpoint, pass "
                        "storage_reader=torch_unickpt.UnickptReader(path, allow_pickle=True)"
                    )
                later.append((item, value))
                continue
            target = planner.resolve_tensor(item).detach()
            at = self.tensor(key)
            if at is None:
                has, value = self.value(key)
                target.copy_(formed(torch.empty_like(target), value)) if has else target.zero_()
            else:
                info = self.stored.checkpoint.serving(*at)
                assert info is not None
                wanted.append((at, LocalShard(target, tuple(item.storage_offsets), info.shape)))
            later.append((item, target))
        return [*wanted, *self._empty({item.storage_index.fqn for item in plan.items})], later

    def _empty(self, asked: Collection[str]) -> Iterator[tuple[Key, Value]]:
        """Yield the tensors without elements, of which a planner asks for no part."""
        for key, value in self._template.items():
            if key in asked or not isinstance(value, torch.Tensor) or 0 not in value.size():
                continue
            at = self.tensor(key)
            info = None if at is None else self.stored.checkpoint.serving(*at)
            if at is not None and info is not None and 0 in info.shape:
                yield (
                    at,
                    LocalShard(torch.empty(info.shape, dtype=value.dtype, device="cpu"), (0,) * len(info.shape), info.shape),
                )


def give(planner: LoadPlanner, later: Iterable[tuple[ReadItem, Any]]) -> None:
    """Hand to a planner what it has asked for, after the read."""
    for item, found in later:
        if item.type is not LoadItemType.BYTE_IO:
            planner.commit_tensor(item, found)
            continue
        data = io.BytesIO()
        if isinstance(found, Bytes):
            data.write(found.data)
        else:
            torch.save(found, data)
        data.seek(0)
        planner.load_bytes(item, data)


def plans_alone(planner: LoadPlanner | None) -> bool:
    """Whether a planner plans each rank by itself, so that no messages are needed."""
    return planner is None or (
        isinstance(planner, DefaultLoadPlanner) and type(planner).create_global_plan is DefaultLoadPlanner.create_global_plan
    )


def load_into(
    state_dict: dict[str, Any], directory: str | os.PathLike[str], planner: LoadPlanner | None, *,
    group: dist.ProcessGroup | None, alone: bool, allow_pickle: bool = False,
) -> LoadReport:  # fmt: skip
    """Load a checkpoint into a state dict. Every rank calls it.

    Args:
        state_dict: tensors are filled in place, other values are replaced.
        directory: the checkpoint.
        planner: one that ``plans_alone``.
        group: process group of the call. None: the default group.
        alone: the call is of this process alone (``no_dist``).
        allow_pickle: unpickle values that are stored as pickles.

    Raises:
        DcpLoadError: the state dict has tensors that the checkpoint lacks, or of other shapes, or the checkpoint is damaged.
            Raised on every rank.
    """
    make_visible()
    own = planner or DefaultLoadPlanner()
    ranks = Group() if alone else Group.of(group)
    exchange = exchange_of(group, timeout_s=TIMEOUT_S, purpose="dcp-load", place=str(directory), alone=alone)
    later: list[tuple[ReadItem, Any]] = []

    def find(opened: Checkpoint) -> Found:
        flat = getattr(own, "flatten_state_dict", True)
        template = flatten_state_dict(state_dict)[0] if flat else state_dict
        contained = Contained(Stored.of(opened, allow_pickle=allow_pickle), template)
        try:
            own.set_up_planner(state_dict, contained.metadata(), ranks.rank == 0)
            wanted, after = contained.requests(own.finish_plan(own.create_local_plan()), own)
        except (RuntimeError, ValueError) as err:  # a key or a shape that the checkpoint does not have
            left_out = "".join(f". Not read: {each}" for each in contained.stored.left_out[:8])
            raise MismatchError(f"{opened.storage}: {err}{left_out}") from err
        later[:] = after
        return Found(opened, wanted)

    try:
        loaded = load(exchange, str(directory), find, ranks, HowToLoad(allow_pickle=allow_pickle))
    except AgreedFailureError as agreed:
        failures = by_rank(agreed.failures, str(directory), "could not load it")
        raise DcpLoadError(str(agreed.error), failures) from agreed.error
    give(own, later)
    exchange.leave()
    if ranks.rank == 0:
        loaded.report.log()
    return loaded.report


def read_plan(contained: Contained, plan: LoadPlan, planner: LoadPlanner) -> None:
    """Read what a planner asks for, on this rank alone."""
    wanted, later = contained.requests(plan, planner)
    filling = Filling(contained.stored.checkpoint)
    for key, value in wanted:
        assert isinstance(value, LocalShard)
        info = filling.source(*key) if isinstance(key, tuple) else filling.source(key, WEIGHT)
        assert info is not None
        filling.request(info, value.box, value.data)
    filling.read(filling.plan(), verify="always", host_peers=None)
    give(planner, later)
