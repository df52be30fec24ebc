"""Under torchrun on 4 ranks: Megatron-DeepSpeed's own models, of the tree ``$MEGATRON_DEEPSPEED``, trained and saved.

megatron_deepspeed_worker train DIR pipe|plain bf16|fp32 [unickpt]   DIR/job/<tag>, DIR/job.rank<n>, DIR/job.logits<tensor rank>
megatron_deepspeed_worker resume DIR TENSOR STAGES bf16|fp32         DIR/job under other degrees (0 stages: plain):
                                                                     DIR/resumed-<TENSOR>-<STAGES>.rank<n>
megatron_deepspeed_worker load DIR TAG                               DIR/TAG into a GPT-2 of transformers: DIR/loaded.truth

Arguments, tokenizer, process groups, model, optimizer, the engine and what is saved are made by the tree's own code. Its
training loop is not used: megatron/training.py imports torchvision, and pretrain_gpt.py a data set that it compiles.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist

from tests.jobs.deepspeed.truth import consolidated, optimizer_of
from unickpt.testing.launch import leave

LENGTH, VOCABULARY, STEPS = 16, 91, 2  # the tokenizer of 90 numbers has one more token
STATES = ("exp_avg", "exp_avg_sq")
ARGUMENTS = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --vocab-size 90 "
    "--tokenizer-type NullTokenizer --make-vocab-size-divisible-by 64 --micro-batch-size 1 --global-batch-size 2 "
    "--train-iters 4 --lr 0.01 --lr-decay-style constant --clip-grad 1.0 --weight-decay 0.1 --hidden-dropout 0 "
    "--attention-dropout 0 --no-query-key-layer-scaling --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion --no-gradient-accumulation-fusion --no-async-tensor-model-parallel-allreduce "
    "--use-cpu-initialization --distributed-backend gloo --save-interval 100 --eval-iters 0 --deepspeed --zero-stage 1"
)


def rows(count: int) -> torch.Tensor:
    """The same sequences for every job."""
    return torch.randint(0, VOCABULARY - 1, (count, LENGTH + 1), generator=torch.Generator().manual_seed(3))


def started(folder: Path, tensor: int, stages: int, precision: str, seed: int, *more: str, **keys: Any) -> Any:
    """Return an engine with the tree's own model.

    Args:
        folder: folder of the job.
        tensor, stages: degrees. 0 stages: without a pipeline.
        precision: bf16 or fp32.
        seed: the values of the model depend on it.
        more: further arguments of the scripts.
        keys: further keys of the DeepSpeed JSON.
    """
    sys.path.insert(0, os.environ["MEGATRON_DEEPSPEED"])
    degrees = f"--tensor-model-parallel-size {tensor} "
    degrees += f"--pipeline-model-parallel-size {stages}" if stages else "--no-pipeline-parallel"
    config = folder / f"config.{os.environ['RANK']}.json"
    batch = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    config.write_text(json.dumps({
        **batch, "steps_per_print": 10**9, "bf16": {"enabled": precision == "bf16"}, "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True, **keys,
    }))  # fmt: skip
    sys.argv = ["pretrain_gpt.py", *ARGUMENTS.split(), *degrees.split(), "--save", str(folder / "job"),
                "--deepspeed_config", str(config), *(["--bf16"] if precision == "bf16" else []), *more]  # fmt: skip
    from megatron import initialize
    from megatron.arguments import core_transformer_config_from_args, parse_args, validate_args
    from megatron.core import mpu
    from megatron.core.enums import ModelType
    from megatron.global_vars import set_global_variables
    from megatron.model import GPTModel, GPTModelPipe
    from megatron.optimizer import get_megatron_optimizer

    args = parse_args()
    validate_args(args, {})
    set_global_variables(args)
    initialize._initialize_distributed()
    initialize._set_random_seed(seed, False)
    initialize._initialize_mem_buffs()
    args.model_type = ModelType.encoder_or_decoder  # as pretrain_gpt.py and training.py set these two
    args.attn_mask = torch.tril(torch.ones(1, 1, LENGTH, LENGTH)) < 0.5
    args.deepspeed_config_dict = json.loads(config.read_text())
    net = (GPTModelPipe if stages else GPTModel)(core_transformer_config_from_args(args))
    with torch.no_grad():
        for p in net.parameters():  # biases begin as zeros, norms as ones
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed * p.numel())))
    optimizer = get_megatron_optimizer([net])
    return deepspeed.initialize(model=net, optimizer=optimizer, args=args, mpu=None if stages else mpu)[0]


def train(folder: Path, mode: str, precision: str, *unickpt: str) -> None:
    pipe = mode == "pipe"
    keys: dict[str, Any] = {"unickpt": {"enabled": True, "async_save": False}} if unickpt else {}
    engine = started(folder, 2, 2 if pipe else 0, precision, 1, **keys)
    from megatron.checkpointing import save_checkpoint
    from megatron.core import mpu
    from megatron.utils import get_ltor_masks_and_position_ids

    def batch_of(row: torch.Tensor) -> Any:
        tokens, labels = row[None, :-1], row[None, 1:]
        mask, loss_mask, positions = get_ltor_masks_and_position_ids(tokens, 0, False, False, False, False)
        return (tokens, positions, mask), (labels, loss_mask)

    batches = [batch_of(row) for row in rows(2 * STEPS + 1)]
    if pipe:
        for _ in range(STEPS):
            engine.train_batch(iter(batches))
    else:
        for inputs, (labels, _) in batches[:STEPS]:
            engine.backward(engine(*inputs, labels=labels)[0].float().mean())
            engine.step()
    save_checkpoint(STEPS, [engine], None, None)
    torch.save(held(engine), folder / f"job.rank{dist.get_rank()}")
    logits = None
    if pipe:
        _, logits = engine.eval_batch(iter(batches[:1]), return_logits=True, num_micro_batches=1)
        logits = logits if engine.is_last_stage() else None
        logits = None if logits is None else logits.transpose(0, 1)
    elif mpu.get_data_parallel_rank() == 0:
        engine.eval()
        with torch.no_grad():
            logits = engine.module(*batches[0][0])[0]
    if logits is not None:
        torch.save(logits.detach().float(), folder / f"job.logits{mpu.get_tensor_model_parallel_rank()}")


def held(engine: Any) -> dict[tuple[str, str], tuple[int, torch.Tensor, tuple[int, ...], int]]:
    """What this rank has, by DeepSpeed's own mapping: first element, elements, shape, and the dimension that Megatron cuts."""
    found: dict[Any, Any] = {}
    base = optimizer_of(engine)
    states = {master.untyped_storage().data_ptr(): state for master, state in base.state.items()}
    for name, p in engine.module.named_parameters():
        dim = p.partition_dim if getattr(p, "tensor_model_parallel", False) else -1
        found[name, "weight"] = (0, p.detach().clone().reshape(-1), tuple(p.shape), dim)
        mapping = getattr(p, "_hp_mapping", None)
        if mapping is not None:
            at, address = mapping.lp_fragment_address.start, mapping.get_hp_fragment_address()
            found[name, "master"] = (at, mapping.hp_fragment.clone(), tuple(p.shape), dim)
            for key in STATES:
                flat = states[mapping.hp_fragment.untyped_storage().data_ptr()][key]
                part = flat.detach()[address.start : address.start + address.numel].clone()
                found[name, key] = (at, part, tuple(p.shape), dim)
    return found


def resume(folder: Path, tensor: str, stages: str, precision: str) -> None:
    """Resume by the tree's own ``load_checkpoint``, from values of another seed."""
    job = ("--load", str(folder / "job"), "--no-load-rng", "--universal-checkpoint")  # or the tree refuses other degrees
    universal = {"load_universal": True}  # which training.py sets for that argument
    engine = started(folder, int(tensor), int(stages), precision, 7, *job, unickpt={"enabled": True}, checkpoint=universal)
    from megatron.checkpointing import load_checkpoint

    assert load_checkpoint([engine], None, None) == STEPS
    torch.save(held(engine), folder / f"resumed-{tensor}-{stages}.rank{dist.get_rank()}")


def load(folder: Path, tag: str) -> None:
    """A checkpoint, as a GPT-2 of transformers under DeepSpeed has it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "config"))
    config = {
        "train_batch_size": 2, "train_micro_batch_size_per_gpu": 2 // dist.get_world_size(), "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}, "zero_optimization": {"stage": 2},
        "unickpt": {"enabled": True}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    where, _ = engine.load_checkpoint(str(folder), tag=tag)
    assert where is not None
    truth = consolidated(engine, STATES)
    if dist.get_rank() == 0:
        torch.save(truth, folder / "loaded.truth")


def main() -> None:
    warnings.filterwarnings("ignore")
    deepspeed.init_distributed("gloo", verbose=False)
    kind, folder, *rest = sys.argv[1:]
    {"train": train, "resume": resume, "load": load}[kind](Path(folder), *rest)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
