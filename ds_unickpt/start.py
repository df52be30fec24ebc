"""``resume_or_start``: the one call with which a training script begins, at its first start and at every later one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unickpt.base.logs import logger

if TYPE_CHECKING:
    from unickpt.training.data.resharding import ReshardableLoader


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Where a job begins.

    Attributes:
        path: what ``load_checkpoint`` returned as path; None if the job starts without a checkpoint.
        step: optimizer steps done; 0 without a checkpoint.
        samples: samples of the global order that these steps consumed, over all ranks.
        client_state: the ``client_state`` that was saved; empty without a checkpoint.
    """

    path: str | None = None
    step: int = 0
    samples: int = 0
    client_state: dict[str, Any] = field(default_factory=dict)

    @property
    def resumed(self) -> bool:
        """Whether a checkpoint was loaded."""
        return self.path is not None


def resume_or_start(
    engine: Any, folder: str | None = None, *, loader: ReshardableLoader | None = None, load_module_strict: bool = True
) -> StartingPoint:
    """Load the newest complete checkpoint of a folder, or start without one if there is none. Every rank calls it.

    The checkpoint may come from any number of ranks and any ZeRO stage. It is the one that the file ``latest`` names. If that
    one is damaged, or if there is no such file, it is the newest one that is complete. A save that did not finish is no
    checkpoint.

    Example:
        ```python
        engine, *_ = deepspeed.initialize(model=model, config="ds.json")
        start = ds_unickpt.resume_or_start(engine, "out")
        for step in range(start.step, steps):
            ...
            engine.save_checkpoint("out")
        ```

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.
        folder: the ``save_dir`` of ``engine.save_checkpoint``. A path or a URL. It need not exist. None: the option
            ``resume_from`` of the DeepSpeed JSON.
        loader: data loader of this rank, whose state was saved as ``client_state={"data_loader": loader.state_dict()}`` on
            every rank that has one. On the same number of ranks it gets its own state, on another its part of
            ``loader.reshard``. None: this rank has none.
        load_module_strict: as for ``engine.load_checkpoint``.

    Returns:
        The position from which training goes on.

    Raises:
        ConfigError: ``folder`` is not given, and neither is ``resume_from``, or it is no path.
        UnickptError: the folder has checkpoints, but none of them can be loaded, or the newest one does not fit. Training
            from the beginning would replace them. Raised on every rank.
    """
    from ds_unickpt.checkpoint_engine import ours_for
    from ds_unickpt.loading.sources import unnamed
    from unickpt.api.arguments import path_of
    from unickpt.base.errors import ConfigError, CorruptCheckpointError
    from unickpt.checkpoint.storage.base import is_url
    from unickpt.checkpoint.storage.open import open_storage

    ours = ours_for(engine)
    given = "" if folder is None else path_of(folder, order="engine, folder")
    folder = given or (ours.options.resume_from if ours is not None else "")
    if not folder:
        raise ConfigError('resume_or_start needs a folder: pass one, or set "resume_from" in "unickpt" of the DeepSpeed JSON')
    if ours is not None:
        path, client_state = engine.load_checkpoint(folder, load_module_strict=load_module_strict, newest=True)
    else:  # the key is off, or the hooks are not installed: DeepSpeed loads by its own rules
        path, client_state = engine.load_checkpoint(folder, load_module_strict=load_module_strict)
        reasons = [] if path is not None or is_url(folder) else unnamed(open_storage(folder))
        if reasons:
            raise CorruptCheckpointError(f"no complete checkpoint is left in {folder}: {'; '.join(reasons)}")
    if path is not None:
        from ds_unickpt.loading import loader_state

        loader_state.restore(engine, str(path), loader, client_state or {})
        return StartingPoint(str(path), int(engine.global_steps), int(engine.global_samples), dict(client_state or {}))
    if engine.global_rank == 0:
        logger.info("unickpt: %s has no checkpoint: training starts from the beginning", folder)
    return StartingPoint()
