"""Training of the model whose quantised exports ``benchmarks/quantised_export.py`` measures: a Llama on English bytes.

    python -m benchmarks.quantised_training out [--steps 700]

One process, DeepSpeed's ZeRO-1 with the key ``unickpt``. The text is Python's language reference (``examples/demo/data.py``).
Its last tenth is held out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "examples" / "demo"))

from data import batch, corpus  # noqa: E402

CONTEXT, BATCH, SEED = 256, 8, 11
HELD_OUT = 0.1  # share of the text, at its end
MODEL = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}


def parts() -> tuple[Tensor, Tensor]:
    """Return the text of the training and the held-out text, 1-D uint8 tensors."""
    text = corpus()
    at = int(len(text) * (1 - HELD_OUT))
    return text[:at], text[at:]


def train(folder: Path, steps: int) -> Path:
    """Train, and save checkpoint and configuration below ``folder``. Return the checkpoint's directory."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    config = {
        "train_batch_size": BATCH,
        "zero_optimization": {"stage": 1},
        "unickpt": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.99], "torch_adam": True}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": steps, "warmup_num_steps": steps // 20, "cos_min_ratio": 0.02},
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    text, _ = parts()
    begin = time.monotonic()
    for step in range(steps):
        inputs, targets = batch(text, step, BATCH, CONTEXT, rank=0, ranks=1)
        loss = torch.nn.functional.cross_entropy(engine(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: {loss.item():.4f} nats per byte, {time.monotonic() - begin:.0f} s", flush=True)
    engine.save_checkpoint(str(folder), tag="trained")
    model.config.save_pretrained(str(folder))
    return folder / "trained"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=700, help="optimizer steps (default: %(default)s)")
    args = parser.parse_args()
    print(train(args.folder, args.steps))


if __name__ == "__main__":
    main()
