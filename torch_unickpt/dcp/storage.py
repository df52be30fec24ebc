"""Storage classes for ``torch.distributed.checkpoint``: whatever takes a storage writer or reader takes these."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from torch_unickpt.dcp import saving
from torch_unickpt.dcp.contents import Stored
from torch_unickpt.dcp.reading import Contained, read_plan
from torch_unickpt.edge import RUNTIME
from unickpt.base.errors import ConfigError
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.save.requests import SaveOptions


class UnickptWriter(StorageWriter):
    """Writes the state dict of ``torch.distributed.checkpoint.save`` as a checkpoint of unickpt.

    Example:
        ```python
        writer = torch_unickpt.UnickptWriter("out/step100")
        torch.distributed.checkpoint.save({"model": model.state_dict()}, storage_writer=writer)
        ```

    Args:
        path: checkpoint directory. A path or a URL.
        options: of the save.
        process_group: that of the call of ``save``. Only needed where the hooks on torch are not installed.
        allow_pickle: store values of types that unickpt does not know as pickles, for a reader with the same argument.
            Otherwise a state dict with such values is refused.
    """

    def __init__(
        self, path: str | os.PathLike[str] = "", *, options: SaveOptions | None = None,
        process_group: dist.ProcessGroup | None = None, allow_pickle: bool = False,
    ) -> None:  # fmt: skip
        self.call: saving.Call | None  # of the hooks on torch
        self.path, self.options, self.process_group = os.fspath(path), options or SaveOptions(), process_group
        self.allow_pickle, self.call = allow_pickle, None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "process_group": None, "call": None}  # torch's background process has a group of its own

    @property
    def checkpoint_id(self) -> str:
        """Directory of the checkpoint."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if kwargs.get("use_collectives") is False:
            raise ConfigError("UnickptWriter: use_collectives=False is not supported: the ranks save one checkpoint together")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        parts, failed = None, None
        try:
            parts = saving.parts_of_plan(plan, planner)
        except Exception as err:  # the other ranks learn it in the save
            failed = err
        saving.save(RUNTIME, parts, self.call or self._own_call(), failed=failed)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def _own_call(self) -> saving.Call:
        alone = not (dist.is_available() and dist.is_initialized())
        options = replace(self.options, asynchronous=False)
        return saving.Call(self.path, self.process_group, alone, options, allow_pickle=self.allow_pickle)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the checkpoint is committed when ``write_data`` returns."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.path)


class UnickptReader(StorageReader):
    """Reads a checkpoint of unickpt, of any framework and layout, for ``torch.distributed.checkpoint.load``.

    Args:
        path: checkpoint directory. A path or a URL.
        allow_pickle: unpickle values that are stored as pickles. This can run code: only for checkpoints that you trust.
    """

    def __init__(self, path: str | os.PathLike[str] = "", *, allow_pickle: bool = False) -> None:
        self.path, self.allow_pickle = os.fspath(path), allow_pickle
        self._contained: Contained | None = None

    @property
    def checkpoint_id(self) -> str:
        """Directory of the checkpoint."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.path, self._contained = os.fspath(checkpoint_id) if checkpoint_id else self.path, None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        return self._found().metadata()

    def _found(self) -> Contained:
        if self._contained is None:
            self._contained = Contained(Stored.of(Checkpoint.open(self.path), allow_pickle=self.allow_pickle))
        return self._contained

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the checkpoint is open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        read_plan(self._found(), plan, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_checkpoint(os.fspath(checkpoint_id))
