"""Save and load strategies for callers of ``dist_checkpointing`` and for its registry.

megatron-core up to 0.16 calls strategy objects, and finds the one for a directory in a registry (``strategies/base.py``). The
development branch has neither. The hooks on ``dist_checkpointing`` recognise these objects, also inside of the fully parallel
wrappers, and call ``saving``, ``loading`` and ``metadata``. A direct call of a strategy does the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_unickpt.dist_checkpointing import loading, metadata, saving
from megatron_unickpt.edge import RUNTIME
from megatron_unickpt.framework.errors import MegatronCheckpointError
from megatron_unickpt.framework.marks import BACKEND, VERSION
from megatron_unickpt.runtime import Runtime

try:
    from megatron.core.dist_checkpointing.strategies.base import (
        AsyncSaveShardedStrategy,
        LoadCommonStrategy,
        LoadShardedStrategy,
        StrategyAction,
        register_default_strategy,
    )

    HAS_REGISTRY = True
except ImportError:  # the development branch
    AsyncSaveShardedStrategy = LoadShardedStrategy = LoadCommonStrategy = object
    HAS_REGISTRY = False


class UnickptSaveStrategy(AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Saves in unickpt's format."""

    def __init__(self, *, share: bool = True, runtime: Runtime = RUNTIME) -> None:
        """Create a strategy.

        Args:
            share: divide weights that several data parallel ranks hold among them. False: the first rank writes them.
            runtime: state of the adapter.
        """
        self.backend, self.version = BACKEND, VERSION
        self.share = share
        self._runtime = runtime

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path, *_: Any) -> Any:
        return saving.save(self._runtime, sharded_state_dict, checkpoint_dir, asynchronous=True, share=self.share)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        saving.save(self._runtime, sharded_state_dict, checkpoint_dir, share=self.share)

    def __str__(self) -> str:
        return f"{type(self).__name__}({BACKEND}, {VERSION})"


class _UnickptStrategy:
    """Checks that Megatron runs on a load strategy before it uses it."""

    def __init__(self, *, runtime: Runtime = RUNTIME) -> None:
        self._runtime = runtime

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != BACKEND:
            raise MegatronCheckpointError(f"this strategy reads {BACKEND!r} checkpoints, found {loaded_backend!r}")

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version > VERSION:
            raise MegatronCheckpointError(
                f"the checkpoint has version {loaded_version}; this release reads {VERSION}. Upgrade unickpt."
            )

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True


class UnickptLoadStrategy(_UnickptStrategy, LoadShardedStrategy):  # type: ignore[misc]
    """Loads tensors and sharded objects of a unickpt checkpoint."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path, *_: Any) -> Any:
        return loading.load_sharded(self._runtime, sharded_state_dict, checkpoint_dir)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> Any:
        return metadata.load_tensors_metadata(self._runtime, checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        return metadata.load_sharded_metadata(self._runtime, checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        metadata.remove_sharded_tensors(checkpoint_dir, key_prefix)


class UnickptLoadCommonStrategy(_UnickptStrategy, LoadCommonStrategy):  # type: ignore[misc]
    """Loads Megatron's common state."""

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        return metadata.load_common_state_dict(self._runtime, checkpoint_dir)

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        return loading.load_sharded(self._runtime, sharded_objects_state_dict, checkpoint_dir)


def unwrap(strategy: Any) -> Any:
    """Return the strategy inside Megatron's fully parallel wrappers."""
    while hasattr(strategy, "base_strategy"):
        strategy = strategy.base_strategy
    return strategy


def register() -> None:
    """Register the strategies in megatron-core's registry, if this version has one."""
    if HAS_REGISTRY:
        register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, UnickptSaveStrategy())
        register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, UnickptLoadStrategy())
        register_default_strategy(StrategyAction.LOAD_COMMON, BACKEND, VERSION, UnickptLoadCommonStrategy())
