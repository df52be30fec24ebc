"""Read requests that fill a state dict from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from unickpt.api.group import Group
from unickpt.api.state import MASTER, WEIGHT, Key, LocalShard, Value, as_shard, key_of
from unickpt.base.errors import MismatchError
from unickpt.checkpoint.coordination.rendezvous import Rendezvous
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.objects import Decoded
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.fragments import Request
from unickpt.checkpoint.load.report import LoadReport

_SHOWN = 8  # names in a message


@dataclass(frozen=True, slots=True)
class _PendingCopy:
    """A temporary that is copied to its place after all reads."""

    source: torch.Tensor
    target: torch.Tensor


@dataclass
class Wanted:
    """Read requests of one rank.

    Attributes:
        checkpoint: the opened checkpoint.
        requests: reads into the tensors of the state dict or into temporaries.
        served: (name, state) of the state dict, stored tensor, dtype in the state dict.
    """

    checkpoint: Checkpoint
    requests: list[Request] = field(default_factory=list)
    served: list[tuple[tuple[str, str], TensorInfo, torch.dtype]] = field(default_factory=list)
    _copies: list[_PendingCopy] = field(default_factory=list)

    @classmethod
    def of(cls, checkpoint: Checkpoint, state: Mapping[Key, Value], group: Group) -> Wanted:
        """Match a state dict with the tensors of a checkpoint.

        Raises:
            MismatchError: tensors are missing in the checkpoint, or have another shape.
            ConfigError: a key or value of the state dict has the wrong type.
        """
        wanted = cls(checkpoint)
        missing = list[str]()
        for key, value in state.items():
            name_state, shard = key_of(key), as_shard(key, value, group)
            if shard is None:
                continue
            info = _source(checkpoint, *name_state)
            if info is None:
                missing.append("{} ({})".format(*name_state))
                continue
            if info.shape != shard.global_shape:
                raise MismatchError(
                    f"{checkpoint.storage}: {info.name} ({info.state}) has shape {list(info.shape)} in the checkpoint and "
                    f"{list(shard.global_shape)} in the state dict"
                )
            wanted._add(info, shard)
            wanted.served.append((name_state, info, shard.data.dtype))
        if missing:
            shown = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
            raise MismatchError(f"{checkpoint.storage}: the checkpoint has no {shown}")
        return wanted

    def _add(self, info: TensorInfo, shard: LocalShard) -> None:
        box, out = shard.box, shard.data.detach()
        if not box.numel:
            return
        ids = self.checkpoint.ids
        if info.derived_from is None:
            self.requests.append(Request(ids[info.key], box, out))
            return
        dtype = torch_dtype(info.dtype)
        rounded = out if out.dtype == dtype else torch.empty(out.shape, dtype=dtype)
        self.requests.append(Request(ids[info.name, info.derived_from], box, rounded))
        if rounded is not out:
            self._copies.append(_PendingCopy(rounded, out))
        for stored in self.checkpoint.override_boxes(ids[info.key]):
            common = stored.intersect(box)
            if common is not None:
                values = torch.empty(common.shape, dtype=dtype)
                self.requests.append(Request(ids[info.key], common, values))
                self._copies.append(_PendingCopy(values, out[common.within(box).slices()]))

    def finish(self, *, allow_pickle: bool) -> Decoded:
        """Copy the temporaries to their places, and decode the objects of the job."""
        for copy in self._copies:
            copy.target.copy_(copy.source)
        return self.checkpoint.objects(allow_pickle=allow_pickle)

    def refuse_left_out(self, used: int) -> None:
        """Check that every parameter of the checkpoint is requested.

        Raises:
            MismatchError: names those that no rank requested.
        """
        left = self.left_out(used)
        if left:
            raise MismatchError(
                f"{self.checkpoint.storage} has {len(left)} parameters that no rank requested: {_some(left)}. Their values "
                "would be lost. strict=False loads the others. Nothing is loaded"
            )

    def left_out(self, used: int) -> list[str]:
        """Return the names of the parameters that no rank requested; none if no rank requested a parameter at all."""
        tensors = list(enumerate(self.checkpoint.index.tensors))
        loaded = {info.name for at, info in tensors if info.state in (WEIGHT, MASTER) and used >> at & 1}
        return sorted({info.name for _, info in tensors if info.kind == "parameter"} - loaded) if loaded else []

    def account(self, report: LoadReport, decoded: Decoded, used: int) -> None:
        """Add an entry for every tensor and object of the checkpoint to the report.

        Tensors that no rank requested are listed on every rank; tensors that only other ranks requested are not listed.
        """
        for (name, state), info, dtype in self.served:
            if info.state != state:
                report.add(name, state, "cast", f"from {info.state}")
            elif torch_dtype(info.dtype) != dtype:
                report.add(name, state, "cast", f"{info.dtype} to {str(dtype).removeprefix('torch.')}")
            else:
                report.add(name, state, "restored")
        for position, info in enumerate(self.checkpoint.index.tensors):
            if info.kind != "object" and not used >> position & 1:
                report.add(info.name, info.state, "left out", "no rank requested it")
        for name in self.checkpoint.manifest.objects:
            report.add(name, "object", "restored")
        for path in decoded.left_out:
            report.add(path, "object", "left out", "stored as a pickle; allow_pickle loads it")

    def used_by_any(self, meet: Rendezvous) -> int:
        """Return a bit mask over ``index.tensors`` of those that any rank requested."""
        mask = 0
        for _, info, _ in self.served:
            mask |= 1 << self.checkpoint.ids[info.key]
        gathered = meet.gather("requested", {"tensors": f"{mask:x}"})
        for message in gathered or ():
            mask |= int(message["tensors"], 16)
        return int(meet.broadcast("used", {"tensors": f"{mask:x}"} if gathered is not None else None)["tensors"], 16)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _source(checkpoint: Checkpoint, name: str, state: str) -> TensorInfo | None:
    """Return the tensor that serves a request. Weight and master are the same value in two precisions."""
    found = checkpoint.info(name, state)
    if found is None and state in (WEIGHT, MASTER):
        found = checkpoint.info(name, WEIGHT if state == MASTER else MASTER)
    return found
