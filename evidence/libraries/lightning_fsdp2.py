"""Lightning: ``ModelParallelStrategy``, FSDP2 alone and over tensor parallelism, saved by ``Trainer.save_checkpoint``.

python -m evidence.libraries.lightning_fsdp2 [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evidence.libraries.torch_job import Trained
    from evidence.libraries.trials import Result, Task, Trials

NAME = "epoch=3.ckpt"
TENSOR = "TP2, FSDP2 on 2"
TEXT = """The strategy saves model and optimizer in one call of `torch.distributed.checkpoint`, loads each of them by a call of
its own, and adds `meta.pt` to the folder, by which it knows the checkpoint later. It has no replicas of shards. Not tested:
`save_distributed_checkpoint=False`, which is one file of `torch.save`, Fabric, which calls the same functions, and
`FSDPStrategy`, which is FSDP 1."""


def _trainer(task: Task, callbacks: list[Any]) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    from evidence.libraries.torch_job import STEPS, sizes

    tensor = 2 if task.layout == TENSOR else 1
    shards = sizes(task.layout.removeprefix("TP2, "))["shards"]
    return Trainer(
        accelerator="cpu", devices=shards * tensor, max_epochs=sum(STEPS), callbacks=callbacks, logger=False,
        strategy=ModelParallelStrategy(data_parallel_size=shards, tensor_parallel_size=tensor), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip


def _module(task: Task, losses: list[float]) -> Any:
    """Return the module that Lightning trains. ``losses`` gets the loss of each step over all ranks."""
    import torch
    import torch.distributed as dist
    from lightning.pytorch import LightningModule
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.utils.data import DataLoader

    from evidence.libraries.torch_job import llama, rows_of, seed_of

    class Module(LightningModule):  # type: ignore[misc]
        def configure_model(self) -> None:
            if hasattr(self, "model"):
                return
            self.model = llama(seed_of(task))
            tensor, data = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
            into = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"))
            plan = {name: ColwiseParallel() for name in into} | {
                name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")
            }
            for layer in self.model.model.layers:
                if tensor.size() > 1:
                    parallelize_module(layer, tensor, plan)
                fully_shard(layer, mesh=data)
            fully_shard(self.model, mesh=data)

        def training_step(self, _: Any) -> Any:
            data = self.device_mesh["data_parallel"]
            words = rows_of(self.global_step).chunk(data.size())[data.get_local_rank()]
            loss = self.model(input_ids=words, labels=words).loss
            total = loss.detach().double()
            dist.all_reduce(total)
            losses.append(float(total) / dist.get_world_size())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))]

        def train_dataloader(self) -> Any:
            return DataLoader(torch.zeros(1, 1))  # one step in each epoch, which makes its rows itself

    return Module()


def _train(task: Task) -> Result:
    """Train by Lightning, which saves or loads."""
    from lightning.pytorch.callbacks import Callback

    from evidence.libraries.torch_job import STEPS, Trained, compared, note
    from evidence.libraries.trials import Result

    problems: list[str] = []
    losses: list[float] = []
    files: list[str] = []

    def trained() -> Trained:
        (optimizer,), (schedule,) = trainer.strategy.optimizers, trainer.lr_scheduler_configs
        values = lambda: {"schedule": schedule.scheduler.state_dict(), "step": trainer.global_step}  # noqa: E731
        return Trained(module, [optimizer], lambda _: 0.0, values=values)

    class Noting(Callback):  # type: ignore[misc]
        def on_train_epoch_start(self, *_: Any) -> None:
            if not task.loads and trainer.global_step == STEPS[0]:
                path = Path(task.folder) / NAME
                trainer.save_checkpoint(path)
                files.extend(sorted(each.name for each in path.iterdir()))
                note(trained(), task)

        def on_train_start(self, *_: Any) -> None:
            if task.loads:
                problems.extend(compared(trained(), task))

    module = _module(task, losses)
    trainer = _trainer(task, [Noting()])
    trainer.fit(module, ckpt_path=str(Path(task.folder) / NAME) if task.loads else None, weights_only=False)
    return Result(losses[-STEPS[1] :], problems, seen={"files": files})


def _more(run: Trials) -> Iterator[tuple[str, bool]]:
    """Compare the files of saves without the switch, and let Lightning's tool read what was saved with it."""
    import torch

    from evidence.libraries.trials import ABSENT, Trial, as_without_unickpt

    yield as_without_unickpt("Lightning", [run.saved(Trial("FSDP2 on 2", switch=value))[0] for value in (ABSENT, "", "off")])
    place, _ = run.saved(Trial("FSDP2 on 2"))
    tool, out = "lightning.fabric.utilities.consolidate_checkpoint", place / "whole.ckpt"
    out.unlink(missing_ok=True)
    made = run.tool(tool, str(place / "ck" / NAME), "--output_file", str(out))
    state = torch.load(place / "notes" / "state.pt", weights_only=False)
    found = torch.load(out, weights_only=False)["state_dict"] if made else {}
    equal = bool(found) and all(torch.equal(value, state[f"weight/{name}"]) for name, value in found.items())
    yield f"`python -m {tool}` writes the {len(found)} weights of the live model, bit for bit", equal


def main() -> int:
    from evidence.libraries import trials
    from evidence.libraries.trials import Trial, of_torch

    tensor = [Trial("FSDP2 on 2", TENSOR, (2, 4)), Trial(TENSOR, "FSDP2 on 2", (4, 2))]
    rows = [*of_torch(switch="")[:3], Trial("FSDP2 on 2", TENSOR, (2, 4), ""), *of_torch()[:3], *tensor]
    return trials.main("lightning_fsdp2", "Lightning 2.6.6", rows, TEXT, _more, together=True)


if __name__ == "__main__":
    from evidence.libraries.trials import tasks_of

    if tasks := tasks_of(sys.argv):
        from evidence.libraries import torch_job

        torch_job.run_all(tasks, _train)
    sys.exit(main())
