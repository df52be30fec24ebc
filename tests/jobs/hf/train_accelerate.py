"""An ordinary Accelerate script: its own loop, ``save_state`` and ``load_state``.

Everything about DeepSpeed and checkpoints is in the JSON, as in any user's script; the one addition
are the lines that write down what the tests compare.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.utils import DataLoaderConfiguration, DummyOptim, DummyScheduler, set_seed
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.jobs.hf.recorder import record
from tests.jobs.hf.train_trainer import MODELS, VOCABULARY, Counting


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--record", required=True)
    parser.add_argument("--resume")
    parser.add_argument("--per_device_train_batch_size", type=int, required=True)
    parser.add_argument("--max_steps", type=int, required=True)
    parser.add_argument("--save_steps", type=int, required=True)
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    args = parser.parse_args()

    PartialState(cpu=True)  # Accelerate has no other way to DeepSpeed without a GPU; it is what Trainer's --use_cpu does
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=args.deepspeed),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=42),
    )
    set_seed(42)
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=VOCABULARY, **MODELS["llama"]))
    data = torch.utils.data.DataLoader(Counting(60), batch_size=args.per_device_train_batch_size, shuffle=True)
    optimizer = DummyOptim(model.parameters(), lr=args.learning_rate)
    # Accelerate divides by the number of processes, unless split_batches is set
    steps = args.max_steps * accelerator.num_processes
    scheduler = DummyScheduler(optimizer, total_num_steps=steps, warmup_num_steps=2)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)

    def write_down(event: str, **facts: object) -> None:
        engine = accelerator.deepspeed_engine_wrapped.engine
        record(args.record, event, engine.module, step=step, lr=optimizer.param_groups[0]["lr"], config=engine.config, **facts)

    step, losses = 0, {}
    if args.resume:
        accelerator.load_state(args.resume)
        step = model.global_steps
        write_down("begin")
    while step < args.max_steps:
        epoch, done = divmod(step, len(data))
        batches = accelerator.skip_first_batches(data, done) if done else data
        batches.set_epoch(epoch)
        for batch in batches:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            losses[step] = accelerator.reduce(loss.detach(), reduction="mean").item()
            if step % args.save_steps == 0:
                accelerator.save_state(f"{args.output_dir}/step-{step}")
                write_down(f"save-{step}")
            if step == args.max_steps:
                break
    write_down("end", losses=losses)
    accelerator.end_training()


if __name__ == "__main__":
    main()
