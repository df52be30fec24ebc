"""Under torchrun: a DeepSpeed job that trains a small transformers Llama on the batches of Megatron's data loader.

deepspeed_leg BATCHES SOURCE FIRST LAST OUT

``BATCHES``: what ``tests.jobs.megatron.pretrain`` has recorded.
``SOURCE``: a folder to resume from (``-``: random weights).
``FIRST`` to ``LAST``: iterations, from 1. After each, ``OUT`` has a checkpoint; ``OUT/leg.json`` has losses and counters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

GLOBAL_BATCH, WARMUP, DECAY, RATE = 8, 4, 100, 1e-3
# The model of the arguments in tests.jobs.megatron.pretrain and MEGATRON.
LLAMA = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 4096,
    "intermediate_size": 128, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
MEGATRON = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --ffn-hidden-size 128 --norm-epsilon 1e-5 --weight-decay 0 "
    f"--lr-warmup-iters {WARMUP} --lr-decay-iters {DECAY} --lr-decay-style linear --min-lr 0"
)


def rate(step: int) -> float:
    """Return a linear warmup and decay, the default schedule of Trainer and the one of MEGATRON."""
    return step / WARMUP if step < WARMUP else (DECAY - step) / (DECAY - WARMUP)


def main() -> None:
    batches, source, first, last, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5])
    import deepspeed
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    from unickpt.testing.launch import leave

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7 if source == "-" else 8)
    config = AutoConfig.for_model("llama", **LLAMA)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    settings: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH, "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world,
        "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
        "unickpt": {"enabled": True},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=settings,
        lr_scheduler=lambda held: torch.optim.lr_scheduler.LambdaLR(held, rate),
    )
    found: dict[str, Any] = {}
    if source != "-":
        path, _ = engine.load_checkpoint(source)
        assert path is not None
        scheduler = engine.lr_scheduler.state_dict()
        found["resumed"] = {
            "steps": engine.global_steps, "samples": engine.global_samples, "rate": engine.get_lr()[0],
            "last_epoch": scheduler["last_epoch"], "report": engine.checkpoint_engine.last_report.lines(),
        }  # fmt: skip
    recorded = torch.load(batches)
    losses = {}
    for step in range(first, last + 1):
        begin = (step - 1) * GLOBAL_BATCH + rank * GLOBAL_BATCH // world
        rows = {key: value[begin : begin + GLOBAL_BATCH // world, 0] for key, value in recorded.items()}
        scores = engine(rows["tokens"]).logits.float()
        each = torch.nn.functional.cross_entropy(scores.transpose(1, 2), rows["labels"], reduction="none")
        loss = ((each * rows["loss_mask"]).sum(1) / rows["loss_mask"].sum(1)).mean()  # Megatron: of micro batches of one row
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses[step] = float(total) / world
        engine.save_checkpoint(str(out), tag=f"global_step{step}", save_latest=step == first + 2)
    if rank == 0:
        (out / "leg.json").write_text(json.dumps({**found, "losses": losses}))
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
