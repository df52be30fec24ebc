"""The witness of an engine names bits that flip in the memory of one rank, and not what DeepSpeed and the program write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

import ds_unickpt
from tests.jobs.deepspeed.jobs import build, train
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.resumes import here
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.scenarios_memory import memory
from tests.support.extent import some
from unickpt.checkpoint.checkpoint_folder import manifests_in
from unickpt.checkpoint.format.witnessed import Passed, WitnessFault
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.witness_faults import add_fault
from unickpt.training.witness.nonfinite import Cause, NonFinite
from unickpt.training.witness.vote import Kind, Verdict

ON = {"enabled": True, "async_save": False, "witness": {"every": 1}}
NAME = "blocks.0.mlp.0.weight"


def _flip(tensor: torch.Tensor) -> None:
    tensor.data.view({4: torch.int32, 2: torch.int16}[tensor.element_size()]).view(-1)[1] ^= 1 << 3


def _own(parameter: Any) -> torch.Tensor:
    """Return this rank's weights of a parameter, without the padding of ZeRO-3, whose values are those of old memory."""
    if not hasattr(parameter, "ds_tensor"):
        whole: torch.Tensor = parameter.detach()
        return whole
    part: torch.Tensor = parameter.ds_tensor.detach()
    return part[: max(parameter.ds_numel - dist.get_rank() * part.numel(), 0)]


def _told(engine: Any, since: int = 0) -> list[tuple[Kind, str, tuple[int, ...]]]:
    own = [(v.kind, v.subject.what, v.ranks) for v in ds_unickpt.witness_of(engine).verdicts if isinstance(v, Verdict)]
    every: list[Any] = [None] * dist.get_world_size()
    torch.distributed.all_gather_object(every, own)
    assert every == [own] * len(every)
    return own[since:]


@scenario(2)
def a_bit_that_flips_in_a_master_is_named(folder: Path) -> None:
    for layout in some((here(1, "bf16"), here(3, "bf16"), here(2), here(1, "bf16o")), 2):
        engine = build(layout, seed=1, unickpt=ON)
        train(engine, 2)
        parameter = dict(engine.module.named_parameters())[NAME]
        if layout.stage == 3:
            group, at, size = engine.optimizer.grad_position[engine.optimizer.get_param_id(parameter)]
            master = engine.optimizer.fp32_partitioned_groups_flat[group].narrow(0, at, size)
            holder = 1
        else:
            fragment = getattr(parameter, "_hp_mapping", None)
            master = None if fragment is None else fragment.hp_fragment
            holders: list[Any] = [None] * 2
            torch.distributed.all_gather_object(holders, master is not None)
            holder = holders.index(True)
        if dist.get_rank() == holder:
            _flip(master)
        train(engine, 1)
        assert _told(engine) == [(Kind.NO_MAJORITY, f"master of {NAME}", (holder,))], layout


@scenario(2)
def a_bit_that_flips_in_a_copy_is_named(folder: Path) -> None:
    engine = build(here(0), seed=1, unickpt=ON)
    train(engine, 2)
    if dist.get_rank() == 1:
        _flip(dict(engine.module.named_parameters())[NAME])
    train(engine, 1)
    assert _told(engine) == [(Kind.NO_MAJORITY, NAME, (1,)), (Kind.NO_MAJORITY, NAME, (0, 1))]


@scenario(2)
def what_the_program_and_deepspeed_write_has_no_verdict_and_weights_stay_equal(folder: Path) -> None:
    for layout in some((here(1, "bf16"), here(3), here(0), here(2, "bf16"), here(0, "bf16"), here(1, "bf16o")), 2):
        ends = []
        checks = ["rest", "replicas", "nonfinite", "buddy"]
        for witness in ({"every": 1, "checks": checks}, {"every": 0}):
            engine = build(layout, seed=1, unickpt={**ON, "witness": witness})
            train(engine, 2)
            engine.save_checkpoint(str(folder / layout.name / str(witness["every"])))
            train(engine, 1)
            parameter = dict(engine.module.named_parameters())[NAME]
            value = safe_get_full_fp32_param(parameter)
            if value is not None:  # DeepSpeed knows none without ZeRO in fp32
                safe_set_full_fp32_param(parameter, value * 2)
            train(engine, 1)
            engine.load_checkpoint(str(folder / layout.name / str(witness["every"])))
            train(engine, 2)
            if witness["every"]:
                assert _told(engine) == []
                assert ds_unickpt.witness_of(engine).passed.passed_until == 3, layout  # rest of the fourth step is not yet seen
            ends.append([_own(each).clone() for each in engine.module.parameters()])
        assert all(map(torch.equal, *ends)), layout
        assert ds_unickpt.witness_of(engine).passed == Passed(0, ())


@scenario(2)
def the_first_layer_that_is_not_finite_is_named_and_a_step_left_out_is_not(folder: Path) -> None:
    for layout in (here(2), here(3)):
        engine = build(layout, seed=1, unickpt=ON)
        train(engine, 1)
        handle = engine.module.blocks[0].mlp[0].register_forward_hook(lambda _module, _args, output: output * float("nan"))
        train(engine, 1)
        handle.remove()
        own = [each for each in ds_unickpt.witness_of(engine).verdicts if isinstance(each, NonFinite)]
        named = [(each.place.layer, each.place.backward, each.step, each.cause) for each in own]
        assert named == [("blocks.0.mlp.1", False, 2, Cause.DATA_OR_MODEL)], layout


@scenario(2)
def checkpoints_say_what_has_passed_and_a_job_goes_back_behind_a_fault(folder: Path) -> None:
    """On disk, written behind training, and in memory."""
    place, checks = folder / "c", ("replicas", "rest")
    own = {**memory(folder, dist.get_rank(), to_disk_every=2, generations=3), "witness": {"every": 1, "checks": [*checks]}}
    own["async_save"] = True
    engine = build(here(1, "bf16"), seed=1, unickpt=own)
    for _ in range(4):
        train(engine, 1)
        assert engine.save_checkpoint(str(place)) is True
    shutdown.finish_all(ending=False)
    dist.barrier()
    assert {manifest.step: manifest.witness for _, manifest in manifests_in(place)} == {
        2: Passed(1, checks),
        4: Passed(3, checks),
    }
    told = [json.loads(path.read_text()) for path in folder.glob("host*/**/manifest.json")]
    assert {each["step"]: each["witness"]["passed_until"] for each in told} == {1: 0, 3: 2}
    if dist.get_rank() == 0:
        add_fault(place, WitnessFault(2, 4, "SDC_REPLICA"))
    dist.barrier()
    again = build(here(2, "bf16"), seed=2, unickpt=own)
    with Log() as log:
        again.load_checkpoint(str(place), tag="global_step4")
    assert any("It is loaded, because it was named" in line for line in log.lines) == (dist.get_rank() == 0), log.lines
    again = build(here(2, "bf16"), seed=2, unickpt=own)
    again.load_checkpoint(str(place))
    assert again.global_steps == 2, "step 3 in memory and step 4 on disk are suspect"
    for _ in range(2):
        train(again, 1)
        again.save_checkpoint(str(place))
    shutdown.finish_all(ending=False)
    dist.barrier()
    newest = manifests_in(place)[0][1]
    assert (newest.step, newest.witness) == (4, Passed(3, checks, faults=1))


@scenario(2)
def a_wrong_step_on_a_partition_is_named(folder: Path) -> None:
    for layout in some((here(1, "bf16"), here(3), here(2), here(1, "bf16o"), here(3, "bf16")), 2):
        engine = build(layout, seed=1, unickpt={**ON, "witness": {"every": 1, "checks": ["update"]}})
        steps = [0]

        def wrong(optimizer: Any, _args: Any, _kwargs: Any, steps: list[int] = steps) -> None:
            steps[0] += 1
            if steps[0] == 100 and dist.get_rank() == 1:
                for group in optimizer.param_groups:
                    for each in group["params"]:
                        each.data.view(torch.int32).view(-1).bitwise_xor_(1 << 3)

        base = engine.optimizer.optimizer
        base.register_step_post_hook(wrong)
        base._optimizer_step_post_hooks.move_to_end(next(reversed(base._optimizer_step_post_hooks)), last=False)
        train(engine, 2)
        assert _told(engine) == []
        assert ds_unickpt.witness_of(engine).passed == Passed(2, ("update",)), layout
        steps[0] = 99
        train(engine, 1)
        ((kind, what, ranks),) = _told(engine)
        assert (kind, ranks) == (Kind.NO_MAJORITY, (0, 1)), layout
        assert what in dict(engine.module.named_parameters())
