"""Saves of libraries that name a strategy of Megatron, while the switch ``UNICKPT`` of the environment asks for unickpt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_unickpt.framework.errors import MegatronSaveError
from megatron_unickpt.runtime import Runtime
from unickpt.base.errors import UnsupportedFrameworkError
from unickpt.base.logs import logger, make_visible
from unickpt.base.switch import REASON
from unickpt.checkpoint.coordination.failure import FailureKind
from unickpt.checkpoint.format.manifest import MANIFEST_FILE
from unickpt.checkpoint.storage.open import open_storage


def save(
    runtime: Runtime, ours: Callable[[], Any], natively: Callable[[], Any], *, strategy: str, directory: str | Path
) -> Any:
    """Save as unickpt. Megatron saves instead if another attempt would fail in the same way.

    Args:
        runtime: state of the adapter.
        ours: saves as unickpt.
        natively: saves with the strategy of the call.
        strategy: name of its class.
        directory: of the checkpoint.

    Raises:
        MegatronSaveError: neither of the two would give a checkpoint.
    """
    make_visible()
    first = torch.distributed.get_rank() == 0
    if first and runtime.is_news(f"{REASON}: save"):
        logger.info(
            "unickpt: %s: dist_checkpointing.save writes unickpt checkpoints, in place of those of %s.", REASON, strategy
        )
    try:
        return ours()
    except MegatronSaveError as err:
        if not (err.framework_saves or _in_folders_of_their_own(err)):
            raise
        failed: Exception = err
    except UnsupportedFrameworkError as err:
        failed = err
    if first:
        logger.warning("unickpt: %s %s saves this checkpoint in Megatron's own format instead.", failed, strategy)
    Path(directory).mkdir(parents=True, exist_ok=True)  # Megatron requires it, and the failed save has removed it
    torch.distributed.barrier()
    saved = natively()
    forget = partial(_forget, str(directory)) if first else None
    if forget is not None and saved is None:
        forget()
    elif forget is not None:
        saved.add_finalize_fn(forget)
    return saved


def _in_folders_of_their_own(err: MegatronSaveError) -> bool:
    """Whether nothing but the arguments of the ranks was wrong: a library gathers the folders of the ranks by itself.

    SkyRL saves from a temporary folder of each process to a cloud path. Its loads know the files of Megatron's format alone.
    """
    return {failure.kind for failure in err.failures} == {FailureKind.ARGUMENTS}


def _forget(directory: str) -> None:
    """Take the manifest of an earlier save of unickpt from a folder in which Megatron has saved: it would be loaded instead."""
    open_storage(directory).delete(MANIFEST_FILE)
