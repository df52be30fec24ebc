"""TRL: its trainers with a DeepSpeed JSON that does not name unickpt, saved and resumed by ``resume_from_checkpoint``.

python -m evidence.libraries.trl [--page docs/evidence/libraries.md]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evidence.libraries.trials import Task

DPO, GRPO, LORA = "DPO", "GRPO", "LoRA"
SOURCE, SAVED_AT, STEPS, BATCH, WORDS = "ZeRO-2 on 2", 3, 5, 8, 24
STOCK = "used a DP world size of 2 but the current world size is 1"
TEXT = """\
DPO has a policy and a reference model, each an engine. GRPO has generation by transformers, a reward function and a reference
model. Another number of processes draws other completions, so the losses of GRPO are not compared: 0 stands for them. fp32.

With LoRA the checkpoint has the adapters and their moments. The base model, which is not in it, is that of the first job.

Not tested: vLLM, the other trainers. All of them save and resume by Trainer's functions."""


def _base(folder: str) -> Any:
    """Write a small model and its tokenizer, the same in every rank and job, and return the tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    wrapped.save_pretrained(folder)
    return wrapped


def _text(at: int, step: int = 1) -> str:
    return " ".join(f"w{(at * 7 + step * i) % WORDS}" for i in range(8))


def _config(stage: int) -> dict[str, Any]:
    optimizer = {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    }
    sizes = {key: "auto" for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
    return {**sizes, "optimizer": optimizer, "zero_optimization": {"stage": stage}}


def _trainer(task: Task, callback: Any) -> Any:
    import deepspeed
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

    folder = f"{task.result}.{os.environ['RANK']}.model"
    tokenizer, world = _base(folder), int(os.environ["WORLD_SIZE"])
    deepspeed.init_distributed("gloo")  # Trainer does it where it finds a GPU
    stage = int(task.layout.split()[0].removeprefix("ZeRO-"))
    config: dict[str, Any] = {
        "output_dir": task.folder, "deepspeed": _config(stage), "use_cpu": True, "bf16": False, "report_to": "none",
        "max_steps": STEPS, "save_steps": SAVED_AT, "logging_steps": 1, "learning_rate": 1e-2, "gradient_checkpointing": False,
        "per_device_train_batch_size": BATCH // world, "disable_tqdm": True, "data_seed": 5,
        "seed": 7 if LORA in task.options and task.loads else 5,  # of the adapters
    }  # fmt: skip
    more = {"processing_class": tokenizer, "callbacks": [callback]}
    model: Any = None
    if DPO in task.options or LORA in task.options:
        rows = range(40)
        data = {"prompt": map(_text, rows), "chosen": [_text(at, 2) for at in rows], "rejected": [_text(at, 3) for at in rows]}
        data = Dataset.from_dict({key: list(values) for key, values in data.items()})
        args = DPOConfig(**config)
        model, reference = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
        if LORA in task.options:
            adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
            return DPOTrainer(model=model, args=args, train_dataset=data, peft_config=adapters, **more)
        _move(model, task)
        return DPOTrainer(model=model, ref_model=reference, args=args, train_dataset=data, **more)
    args = GRPOConfig(**config, num_generations=2, max_completion_length=8, beta=0.1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    _move(model, task)
    rewarded = lambda completions, **_: [float(len(set(each.split()))) for each in completions]  # noqa: E731
    data = Dataset.from_dict({"prompt": [_text(at) for at in range(40)]})
    torch.manual_seed(3)
    return GRPOTrainer(model=model, reward_funcs=rewarded, args=args, train_dataset=data, **more)


def _move(model: Any, task: Task) -> None:
    """Let the job that loads begin with other weights."""
    import deepspeed
    import torch

    parameters = list(model.parameters()) if task.loads else []
    torch.manual_seed(7)
    with torch.no_grad(), deepspeed.zero.GatheredParameters(parameters, modifier_rank=0, enabled=bool(parameters)):
        for each in parameters:
            each.normal_()


def _run(task: Task) -> None:
    """Do a task in this rank of a job of torchrun, and end the process."""
    import torch
    import torch.distributed as dist
    from transformers import TrainerCallback

    from evidence.libraries.deepspeed_job import gathered
    from evidence.libraries.trials import Result, noted
    from tests.jobs.deepspeed.truth import differences
    from unickpt.testing.launch import leave

    notes, problems, rank = Path(task.notes) / "state.pt", [], int(os.environ["RANK"])

    trainer: Any = None

    class Noting(TrainerCallback):  # type: ignore[misc]
        def on_save(self, *_: Any, **__: Any) -> None:
            state = gathered(trainer.model_wrapped)
            if rank == 0 and not task.loads and trainer.state.global_step == SAVED_AT:
                torch.save(state, notes)

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if task.loads:
                problems.extend(differences(torch.load(notes, weights_only=False), gathered(trainer.model_wrapped)))

    def work() -> Result:
        nonlocal trainer
        trainer = _trainer(task, Noting())
        trainer.train(resume_from_checkpoint=str(Path(task.folder) / f"checkpoint-{SAVED_AT}") if task.loads else None)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][SAVED_AT:]
        return Result([0.0] if GRPO in task.options else losses, problems)

    noted(task, work)
    dist.barrier()
    leave()


def main() -> int:
    from evidence.libraries import trials
    from evidence.libraries.trials import Trial

    def trial(target: str, kind: str, *, source: str = SOURCE, **more: Any) -> Trial:
        return Trial(source, target, (int(source[-1]), int(target[-1])), options=(kind,), **more)

    rows = [
        trial("ZeRO-2 on 1", DPO, switch="", expected=STOCK),
        trial("ZeRO-2 on 1", DPO),
        trial("ZeRO-3 on 1", DPO),
        trial("ZeRO-3 on 2", DPO),
        trial("ZeRO-2 on 1", DPO, source="ZeRO-3 on 2"),
        trial("ZeRO-3 on 1", DPO, source="ZeRO-3 on 2"),
        trial("ZeRO-3 on 1", GRPO),
        trial("ZeRO-2 on 1", LORA),
        trial("ZeRO-3 on 2", LORA),
    ]
    return trials.main("trl", "TRL 1.16.0", rows, TEXT)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith(".task.json"):
        from evidence.libraries.trials import Task as Given

        _run(Given.read(sys.argv[1]))
    sys.exit(main())
