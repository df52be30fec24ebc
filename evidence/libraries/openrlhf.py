"""OpenRLHF: ``DeepspeedStrategy``, which saves actor and critic, each an engine, in a folder of its own.

python -m evidence.libraries.openrlhf [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evidence.libraries.deepspeed_job import Models, Trained
    from evidence.libraries.trials import Task, Trials

OFFLOAD = "adam_offload"
BATCH, MICRO, WORDS, VOCABULARY = 8, 2, 16, 64
SOURCE, TAG = "ZeRO-2 on 2", "global_step3"
STOCK = "used a DP world size of 2 but the current world size is 1"
TEXT = """\
Each job has an actor and a critic, made, prepared, trained, saved and loaded by the calls of
`openrlhf/trainer/ray/ppo_actor.py` and `ppo_critic.py`, in bf16. The switch is the only setting. Settings: options of OpenRLHF.

Stands in for what a CPU does not have: import-time names of flash-attn, `torch.cuda.set_device` and `torch.cuda.synchronize`
without effect, and a mesh of CPU devices.

Not tested: Ray actors and vLLM around the strategy, tensor parallelism, Muon, ring attention, `use_universal_ckpt`, and what
the strategy deletes by count and size. With and without the switch, OpenRLHF's checkpoints lack the averaged weights of
`enable_ema`. `save_model` writes Hugging Face files."""


def _stand_ins() -> None:
    """Let OpenRLHF be imported and set up without CUDA.

    The names of flash-attn are for packed sequences, which this job does not have. Nothing here saves or loads.
    """
    import importlib.machinery

    import torch
    import torch.distributed.device_mesh as meshes

    names = {
        "flash_attn": (),
        "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
        "flash_attn.utils": (),
        "flash_attn.utils.distributed": ("all_gather",),
    }
    import deepspeed  # noqa: F401 - before the stand-ins, with what it looks for in the environment
    import peft  # noqa: F401
    import transformers.trainer  # noqa: F401

    for name, functions in names.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__dict__.update(dict.fromkeys(functions))
        sys.modules[name] = module
    torch.cuda.set_device = lambda _: None  # type: ignore[assignment]
    torch.cuda.synchronize = lambda: None  # type: ignore[assignment]
    of_mesh = meshes.init_device_mesh
    meshes.init_device_mesh = lambda _, *args, **kwargs: of_mesh("cpu", *args, **kwargs)


def _arguments(stage: int, options: tuple[str, ...]) -> Namespace:
    """Return what ``openrlhf.cli.train_ppo_ray`` parses, as far as the strategy reads it."""
    ds = Namespace(
        zero_stage=stage, param_dtype="bf16", adam_offload=OFFLOAD in options,
        tensor_parallel_size=1, grad_accum_dtype="fp32",
    )  # fmt: skip
    return Namespace(
        local_rank=-1, ds=ds, train=Namespace(dynamic_batch_enable=False, batch_size=BATCH, micro_batch_size=MICRO)
    )


def _make(task: Task, seed: int) -> Models:
    """Return actor and critic, as ``PolicyModelActor`` and ``CriticModelActor`` of ``openrlhf/trainer/ray`` make them."""
    _stand_ins()
    import torch.distributed as dist
    from openrlhf.models import Actor, get_llm_for_sequence_regression
    from openrlhf.utils import get_strategy
    from transformers import LlamaConfig, LlamaForCausalLM

    args = _arguments(int(task.layout.split()[0].removeprefix("ZeRO-")), task.options)
    args.train.seed = seed
    strategy = get_strategy(args)
    strategy.setup_distributed()
    pretrained = f"{task.result}.model"
    if dist.get_rank() == 0:
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(pretrained)
    dist.barrier()
    more: dict[str, Any] = {"attn_implementation": "eager", "param_dtype": "bf16"}
    actor = Actor(pretrained, ds_config=strategy.get_ds_train_config(), **more)
    critic = get_llm_for_sequence_regression(
        pretrained, "critic", init_value_head=True, ds_config=strategy.get_ds_train_config(), **more
    )
    of_each = {
        "optim": "adam", "adam": {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
        "lr_scheduler": "cosine_with_min_lr", "lr_warmup_ratio": 0.3, "scheduler_steps": 20,
    }  # fmt: skip
    actor, *of_actor = strategy.prepare((actor, of_each))
    critic, *of_critic = strategy.prepare((critic, of_each))
    return {
        "_actor": _model(strategy, actor, actor.model, of_actor),
        "_critic": _model(strategy, critic, critic, of_critic),
    }


def _model(strategy: Any, model: Any, engine: Any, optimizer_and_schedule: Any) -> Trained:
    import torch
    import torch.distributed as dist

    from evidence.libraries.deepspeed_job import Trained

    model.train()

    def loss_of(words: torch.Tensor) -> torch.Tensor:
        seen = torch.ones_like(words)
        actions = torch.ones_like(words[:, 1:])
        if model is engine:
            return (model(words, action_mask=actions, attention_mask=seen) - 1).square().mean()
        return -model(words, action_mask=actions, attention_mask=seen).mean()

    def step(number: int) -> float:
        every = torch.randint(VOCABULARY, (BATCH, WORDS), generator=torch.Generator().manual_seed(number))
        losses = []
        for words in every.view(-1, dist.get_world_size(), MICRO, WORDS)[:, dist.get_rank()]:
            loss = loss_of(words)
            strategy.backward(loss, model, optimizer_and_schedule[0])
            strategy.optimizer_step(optimizer_and_schedule[0], model, optimizer_and_schedule[1])
            losses.append(float(loss.detach()))
        return sum(losses) / len(losses)

    step.strategy = strategy  # type: ignore[attr-defined]
    return Trained(engine, step)


def _save(models: Models, task: Task) -> Mapping[str, Any]:
    """Save four times, with the calls of ``save_checkpoint`` of both actors."""
    kept = {}
    for name, model in models.items():
        strategy, folder = model.step.strategy, Path(task.folder) / name  # type: ignore[attr-defined]
        for tag in ("global_step1", "global_step2", "best_global_step2", TAG):
            strategy.save_ckpt(
                model.engine, str(folder), tag, 3, 1000, {"consumed_samples": 24}, metric_value=0.5, metric_key="reward"
            )
        kept[name] = sorted(each.name for each in folder.iterdir())
    return kept


def _load(models: Models, task: Task) -> Mapping[str, Any]:
    states = {}
    for name, model in models.items():
        path, found = model.step.strategy.load_ckpt(model.engine, str(Path(task.folder) / name))  # type: ignore[attr-defined]
        assert path is not None, f"nothing is loaded from {name}"
        states[name] = found["consumed_samples"]
    return states


def _more(run: Trials) -> Iterator[tuple[str, bool]]:
    """Compare the files of saves without the switch."""
    from evidence.libraries.trials import ABSENT, Trial, as_without_unickpt

    yield as_without_unickpt("OpenRLHF", [run.saved(Trial(SOURCE, switch=value))[0] for value in ("", "off", ABSENT)])


def main() -> int:
    from evidence.libraries import trials
    from evidence.libraries.trials import Trial

    def trial(target: str, *, source: str = SOURCE, **more: Any) -> Trial:
        return Trial(source, target, (int(source[-1]), int(target[-1])), **more)

    rows = [
        trial(SOURCE, switch=""),
        trial("ZeRO-2 on 1", switch="", expected=STOCK),
        *(trial(target) for target in (SOURCE, "ZeRO-2 on 1", "ZeRO-3 on 2")),
        trial("ZeRO-2 on 1", source="ZeRO-3 on 2", options=(OFFLOAD,)),
    ]
    return trials.main("openrlhf", "OpenRLHF 0.11.2", rows, TEXT, _more)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith(".task.json"):
        from evidence.libraries import deepspeed_job, trials

        deepspeed_job.run(trials.Task.read(sys.argv[1]), _make, _save, _load)
    sys.exit(main())
