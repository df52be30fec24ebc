"""What fills a state dict from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from unickpt.api.group import Group
from unickpt.api.state import Key, LocalShard, Value, as_shards, key_of
from unickpt.base.errors import MismatchError
from unickpt.base.listing import some
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.format.dtypes import name_of, torch_dtype
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.objects import Decoded
from unickpt.checkpoint.load.checkpoint import TWINS
from unickpt.checkpoint.state.filling import MASTER, WEIGHT, Filling, lost_parameters, mask_of, union_of, unrequested


@dataclass
class Wanted:
    """Read requests of one rank.

    Attributes:
        filling: reads into the tensors of the state dict, or into temporaries.
        infos: the stored tensors that serve the state dict.
        left: the stored tensors that no rank requests, neither as weight nor as master; known after ``agree``.
        unread: ``left``, and those of which a rank requests the other one of weight and master.
    """

    filling: Filling
    infos: list[TensorInfo] = field(default_factory=list)
    left: list[TensorInfo] = field(default_factory=list)
    unread: list[TensorInfo] = field(default_factory=list)

    @classmethod
    def of(cls, filling: Filling, state: Iterable[tuple[Key, Value]], group: Group, *, fresh: bool) -> Wanted:
        """Match the items of a state dict with the tensors of a checkpoint. ``fresh``: it may lack states of an optimizer.

        Raises:
            MismatchError: tensors are missing in the checkpoint, or have another shape.
            ConfigError: a key or value of the state dict has the wrong type.
        """
        wanted, storage = cls(filling), filling.checkpoint.storage
        missing, states = list[str](), False
        for key, value in state:
            (name, part), shards = key_of(key), as_shards(key, value, group)
            if not shards:
                continue
            info = filling.source(name, part)
            if info is None and fresh and part not in (WEIGHT, MASTER):
                filling.report.add(name, part, "re-seeded", "the checkpoint lacks it (missing_state is fresh): keeps its value")
            elif info is None:
                missing.append(f"{name} ({part})")
                states = states or part not in (WEIGHT, MASTER)
            elif info.shape != shards[0].global_shape:
                raise MismatchError(
                    f"{storage}: {info.name} ({info.state}) has shape {list(info.shape)} in the checkpoint and "
                    f"{list(shards[0].global_shape)} in the state dict"
                )
            else:
                wanted._add(info, shards)
                filling.account(name, part, info, name_of(shards[0].data.dtype))
        if missing:
            advice = '. missing_state="fresh" keeps the values of states of an optimizer that it lacks' if states else ""
            raise MismatchError(f"{storage}: the checkpoint has no {some(missing)}{advice}")
        return wanted

    def _add(self, info: TensorInfo, shards: Iterable[LocalShard]) -> None:
        """Request the values that the saving job had: a derived tensor is rounded before it is cast to another dtype."""
        self.infos.append(info)
        dtype = torch_dtype(info.dtype)
        for shard in shards:
            if not shard.box.numel:
                continue
            out = shard.data.detach()
            rounded = (
                out if info.derived_from is None or out.dtype == dtype else torch.empty(out.shape, dtype=dtype, device="cpu")
            )
            self.filling.request(info, shard.box, rounded)
            if rounded is not out:
                self.filling.copy_later(out, rounded)

    def agree(self, exchange: MessageExchange) -> None:
        """Find out with the other ranks which tensors no rank requests."""
        checkpoint = self.filling.checkpoint
        own = {"tensors": mask_of(checkpoint, self.infos)}
        every = exchange.combined(
            "requested", own, lambda messages: {"tensors": union_of(each["tensors"] for each in messages)}
        )
        self.left = unrequested(checkpoint, [every["tensors"]])
        self.unread = unrequested(checkpoint, [every["tensors"]], twins=False)

    @property
    def lost(self) -> list[str]:
        """Names of the parameters that no rank requests."""
        return lost_parameters(self.filling.checkpoint, self.left)

    def refuse_lost(self) -> None:
        """Check that every parameter of the checkpoint is requested.

        Raises:
            MismatchError: names those that no rank requests.
        """
        if self.lost:
            raise MismatchError(
                f"{self.filling.checkpoint.storage} has {len(self.lost)} parameters that no rank requested: {some(self.lost)}. "
                "Their values would be lost. strict=False loads the others. Nothing is loaded"
            )

    def account(self, decoded: Decoded) -> None:
        """Report the tensors that no rank requests, and the objects. Tensors that only other ranks request are not listed."""
        report, checkpoint = self.filling.report, self.filling.checkpoint
        requested = {info.key for info in self.infos}
        for info in self.unread:
            twin = checkpoint.info(info.name, TWINS.get(info.state, ""))
            if twin is not None and twin.key in requested and (info.derived_from == twin.state or info.dtype == twin.dtype):
                continue  # nothing of it is lost
            report.add(info.name, info.state, "left out", "no rank requested it")
        for name in checkpoint.manifest.objects:
            report.add(name, "object", "restored")
        for each in decoded.left_out:
            report.add(each.path, "object", "left out", each.reason)
