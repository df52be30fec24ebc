"""SkyRL: ``MegatronStrategy``, which saves model, optimizer and generators in one checkpoint, on a cloud path from a temporary
folder of each process.

python -m evidence.libraries.skyrl [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from evidence.libraries import trials
from evidence.libraries.trials import ABSENT, Task, Trial, Trials

if TYPE_CHECKING:
    from megatron_unickpt.testing.jobs import Job

STEP = 3
GATHERED, ASYNCHRONOUS, CLOUD = "dist_ckpt_optim_fully_reshardable", "async_dist_ckpt_save", "cloud path"
TP2, PP2, DP2 = "gpt-tp2-dist", "gpt-pp2-dist", "gpt-dp2-dist"
_WRAPPER = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"

TEXT = f"""`MegatronStrategy` describes the load by its own settings, not by those of the checkpoint. On a cloud path each
process has a temporary folder, and its own load expects Megatron's files: with the switch one warning says so, and Megatron's
strategy saves (`{CLOUD}`; the bucket is a folder).

SkyRL asks for Python 3.12; it ran with 3.11. Empty modules stood in for `skyrl.backends`, which imports a server, and for the
wrapper of the model, which needs TransformerEngine and whose name is used for a type.

With `{ASYNCHRONOUS}` the queue is that of NVIDIA's resiliency extension 0.4.1. Without the switch it needs a later Megatron.

Not tested: LoRA, and Ray."""


def _strategy(options: tuple[str, ...]) -> Any:
    """Return SkyRL's strategy as ``workers/megatron/megatron_worker.py`` makes it."""
    import torch.distributed as dist
    from transformers import LlamaConfig

    _stand_in()
    from skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy import MegatronStrategy

    config = SimpleNamespace(
        dist_ckpt_optim_fully_reshardable=GATHERED in options,
        async_dist_ckpt_save=ASYNCHRONOUS in options,
        async_save_prestage_to_cpu=True,
    )
    strategy = MegatronStrategy(config, node_local_rank=dist.get_rank())
    strategy.hf_config = LlamaConfig()
    return strategy


def _stand_in() -> None:
    """Put empty modules in place of two that the strategy does not use.

    The package of its backends imports a server that needs Python 3.12. The wrapper of the model needs
    TransformerEngine, and is imported to name a type.
    """
    import skyrl

    assert skyrl
    trials.stand_in("skyrl.backends")
    wrapper = ModuleType(_WRAPPER)
    wrapper.MegatronModelWrapper = SimpleNamespace  # type: ignore[attr-defined]
    sys.modules.setdefault(_WRAPPER, wrapper)


def _folder(task: Task) -> str:
    if CLOUD not in task.options:
        return str(Path(task.folder) / f"global_step_{STEP}" / "policy")
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    class Bucket(LocalFileSystem):  # type: ignore[misc]
        """A bucket that is a folder."""

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(super()._strip_protocol(path.replace("gs://bucket", task.folder)))

    fsspec.register_implementation("gs", Bucket, clobber=True)
    return f"gs://bucket/global_step_{STEP}/policy"


def save(jobs: dict[str, Job], task: Task) -> None:
    import torch.distributed as dist

    (job,) = jobs.values()
    strategy = _strategy(task.options)
    strategy.save_checkpoint(SimpleNamespace(actor_module=job.chunks), _folder(task), dist.get_rank(), job.optimizer)
    strategy.finalize_pending_saves()


def load(jobs: dict[str, Job], task: Task) -> None:
    (job,) = jobs.values()
    _strategy(task.options).load_checkpoint(SimpleNamespace(actor_module=job.chunks), _folder(task), job.optimizer)


def switched_off(run: Trials) -> Iterator[tuple[str, bool]]:
    """Compare what SkyRL saves with the switch off, unset, and without unickpt."""
    yield trials.as_without_unickpt("SkyRL", [run.saved(Trial(TP2, switch=switch))[0] for switch in (ABSENT, "", "off")])


TRIALS = (
    Trial(TP2, TP2, switch=""),
    Trial(TP2, PP2, switch="", expected="Global shape mismatch"),
    Trial(TP2, PP2, switch="", options=(GATHERED,)),
    *(Trial(TP2, target) for target in (TP2, PP2, DP2)),
    Trial(PP2, TP2, options=(GATHERED,)),
    Trial(TP2, TP2, options=(CLOUD,)),
    Trial(TP2, PP2, options=(CLOUD,), expected="Global shape mismatch"),
    Trial(TP2, PP2, options=(ASYNCHRONOUS,)),
)

if __name__ == "__main__":
    tasks = trials.tasks_of(sys.argv)
    if tasks:
        from evidence.libraries import megatron_job

        megatron_job.run_all(tasks, save, load)
    sys.exit(trials.main("skyrl", "SkyRL 0.4.0", TRIALS, TEXT, switched_off, together=True))
