"""Under torchrun: jobs that DeepSpeed saves itself, with their state from its own accessors.

native_worker DIR JOB ...        jobs one after the other: KIND:WORLD:NAME[:key=value ...]

plain, pipe, moe, tensor         DIR/NAME/<tag>, DIR/NAME.truth or DIR/NAME.rank<n>
load:WORLD:NAME:target=LAYOUT    a converted checkpoint DIR/NAME/converted into an engine of a layout
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist

from tests.jobs.deepspeed.jobs import build, in_a_group, scramble, train
from tests.jobs.deepspeed.truth import consolidated, differences, optimizer_of
from tests.jobs.deepspeed.zero_names import Layout, layouts
from tests.support import deepspeed_imports  # noqa: F401
from tests.support.turns import in_turn
from unickpt.testing.launch import leave

STATES = ("exp_avg", "exp_avg_sq")
VOCABULARY = 11
HALVES = {  # of the pipeline's layers; all others are cut along their first dimension
    "universal_checkpoint_version": 0.2, "parameter_with_row_parallelism_patterns": [r"4.weight"],
    "tp_replicated_parameter_patterns": [r"3.weight", r"3.bias", r"4.bias"],
}  # fmt: skip


def plain(folder: Path, name: str, **_options: str) -> None:
    """Jobs of every stage and precision at this world size."""
    losses: dict[str, list[float]] = {}
    for layout in layouts(dist.get_world_size()):
        engine = build(layout, seed=1, unickpt={"enabled": False})
        before = train(engine, 3)
        assert engine.save_checkpoint(str(folder / f"{name}-{layout.name}"), client_state={"note": layout.name}) is True
        truth = consolidated(engine, STATES)
        losses[layout.name] = before + train(engine, 3)
        if dist.get_rank() == 0:
            torch.save(truth, folder / f"{name}-{layout.name}.truth")
        engine.destroy()
    if dist.get_rank() == 0:
        (folder / f"{name}.losses").write_text(json.dumps(losses))


def pipe(folder: Path, name: str, **options: str) -> None:
    """Two stages, with a layer that is on both; with ``slices=2``, of two tensor parallel ranks each.

    These have halves as Megatron's have, but compute nothing together: each trains what it has. Which files that is written
    to, and how it is named there, is DeepSpeed's own doing.
    """
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    embed = torch.nn.Embedding
    layers = [
        TiedLayerSpec("embed", embed, VOCABULARY, 9), LayerSpec(torch.nn.Linear, 9, 9), torch.relu,
        LayerSpec(torch.nn.LayerNorm, 9), LayerSpec(torch.nn.Linear, 9, 9),
        TiedLayerSpec("embed", embed, VOCABULARY, 9, forward_fn=lambda module, x: x @ module.weight.T),
    ]  # fmt: skip

    def loss(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(out.float().view(-1, VOCABULARY), targets.view(-1))

    slices = int(options.get("slices", "1"))
    topology = PipeModelDataParallelTopology(2, slices, dist.get_world_size() // (2 * slices))
    net = PipelineModule(layers=layers, topology=topology, loss_fn=loss, partition_method="uniform")
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.01 * topology.get_coord(dist.get_rank()).model)
    engine = _engine(net, [p for p in net.parameters() if p.requires_grad], options)
    g = torch.Generator().manual_seed(0)
    rows = [tuple(torch.randint(0, VOCABULARY, (1, 4), generator=g) for _ in range(2)) for _ in range(64)]
    for _ in range(2):
        engine.train_batch(iter(rows))
    _save(engine, folder, name, more_state={"universal_checkpoint_info": HALVES} if slices > 1 else {})


def moe(folder: Path, name: str, **options: str) -> None:
    """Two layers of four experts on two expert parallel ranks."""
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = torch.nn.Linear(8, 8)
            expert = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.GELU(), torch.nn.Linear(12, 8))
            self.blocks = torch.nn.ModuleList(
                MoE(hidden_size=8, expert=expert, num_experts=4, ep_size=2, k=1) for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.enter(x)
            for block in self.blocks:
                x = x + block(x)[0]
            return (x.float() ** 2).mean()

    net = Net()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(net.parameters()), "name": "all"})
    engine = _engine(net, groups, options)
    for step in range(2 * engine.gradient_accumulation_steps()):
        g = torch.Generator().manual_seed(100 * step + dist.get_rank())
        engine.backward(engine(torch.randn(6, 8, generator=g).to(next(net.parameters()).dtype)))
        engine.step()
    from deepspeed.utils import groups as ds_groups

    rank = ds_groups._get_expert_parallel_rank("ep_size_2")
    experts = ".deepspeed_moe.experts.deepspeed_experts."

    def among_all(local: str) -> str:
        layer, is_expert, rest = local.partition(experts)
        number, _, inner = rest.partition(".")
        return f"{layer}{experts}{rank * 2 + int(number)}.{inner}" if is_expert else local

    _save(engine, folder, name, among_all)


def tensor(folder: Path, name: str, **options: str) -> None:
    """AutoTP over two ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    net = LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, tie_word_embeddings=False,
    ))  # fmt: skip
    engine = _engine(net, list(net.parameters()), options, tensor_parallel={"autotp_size": 2}, train_batch_size=None,
                     gradient_accumulation_steps=2)  # fmt: skip
    for step in range(4):
        g = torch.Generator().manual_seed(100 * step + dist.get_rank() // 2)
        tokens = torch.randint(0, 96, (1, 8), generator=g)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    _save(engine, folder, name)


def _engine(net: torch.nn.Module, parameters: Any, options: dict[str, str], **extra: Any) -> Any:
    config: dict[str, Any] = {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": int(options["stage"])},
        "bf16": {"enabled": options.get("bf16") == "1"}, **extra,
    }  # fmt: skip
    config = {key: value for key, value in config.items() if value is not None}
    engine, *_ = deepspeed.initialize(model=net, model_parameters=parameters, config=config)
    return engine


def _save(engine: Any, folder: Path, name: str, named: Any = str, more_state: Any = None) -> None:
    """DeepSpeed's save, and what this rank holds, by DeepSpeed's own mapping.

    ``{(name, state): (first element in the rank's parameter, elements, the parameter's shape)}``
    """
    assert engine.save_checkpoint(str(folder / name), client_state={"note": name, **(more_state or {})}) is True
    held: dict[Any, Any] = {}
    base = optimizer_of(engine)
    states = {master.untyped_storage().data_ptr(): state for master, state in base.state.items()}
    for local, p in engine.module.named_parameters():
        full = named(local)
        held[full, "weight"] = (0, p.detach().clone().reshape(-1), tuple(p.shape))
        mapping = getattr(p, "_hp_mapping", None)
        if mapping is not None:
            at = mapping.lp_fragment_address.start
            held[full, "master"] = (at, mapping.hp_fragment.clone(), tuple(p.shape))
            for key in STATES:
                address = mapping.get_hp_fragment_address()
                flat = states[mapping.hp_fragment.untyped_storage().data_ptr()][key]
                held[full, key] = (at, flat.detach()[address.start : address.start + address.numel].clone(), tuple(p.shape))
        elif p in base.state:
            for key in STATES:
                held[full, key] = (0, base.state[p][key].clone().reshape(-1), tuple(p.shape))
    torch.save(held, folder / f"{name}.rank{dist.get_rank()}")


def load(folder: Path, name: str, target: str, **_options: str) -> None:
    """Load a converted checkpoint into an engine. Returns the differences to the truth, and the next losses."""
    stage, precision = target.split("-")
    layout = Layout(int(stage), dist.get_world_size(), precision)
    engine = build(layout, seed=7)
    scramble(engine)
    where, client = engine.load_checkpoint(str(folder / name), tag="converted")
    truth = torch.load(folder / f"{name}.truth", weights_only=False)
    problems = differences(truth, consolidated(engine, STATES), ignore=("weight/",) if precision == "fp32" else ())
    losses, moved = train(engine, 3), []
    for seed in range(2):
        engine.load_checkpoint(str(folder / name), tag="converted")
        moved.append(train(engine, 3, moved=seed))
    if dist.get_rank() == 0:
        found = {"where": where, "note": client["note"], "problems": problems, "losses": losses, "moved": moved}
        (folder / f"{name}.loaded").write_text(json.dumps(found))


def run(kind: str, folder: Path, name: str, options: dict[str, str]) -> None:
    torch.manual_seed(1)
    {"plain": plain, "pipe": pipe, "moe": moe, "tensor": tensor, "load": load}[kind](folder, name, **options)


def main() -> None:
    folder, jobs = Path(sys.argv[1]), [job.split(":") for job in sys.argv[2:]]
    in_turn(
        (int(world), partial(in_a_group, partial(run, kind, folder, name, dict(option.split("=") for option in options))))
        for kind, world, name, *options in jobs
    )
    leave()


if __name__ == "__main__":
    main()
