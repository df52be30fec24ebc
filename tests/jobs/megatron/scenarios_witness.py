"""The witness of a model names bits that flip in the memory of one rank. Sound training has no verdict and the same weights."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_unickpt
from megatron_unickpt.testing.jobs import Job
from megatron_unickpt.testing.layouts import Layout
from tests.jobs.megatron.scenarios import scenario
from tests.jobs.megatron.scenarios_memory import forget, memory
from tests.support.extent import some
from unickpt.checkpoint.checkpoint_folder import manifests_in
from unickpt.checkpoint.format.witnessed import Passed, WitnessFault
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.witness_faults import add_fault
from unickpt.training.witness.nonfinite import Cause, NonFinite
from unickpt.training.witness.vote import Kind, Verdict

NAME = "decoder.layers.0.mlp.linear_fc1.weight"


def _flip(tensor: torch.Tensor) -> None:
    tensor.data.view({4: torch.int32, 2: torch.int16}[tensor.element_size()]).view(-1)[1] ^= 1 << 3


def _told(witness: megatron_unickpt.Witness) -> list[tuple[Kind, str, tuple[int, ...]]]:
    own = [(v.kind, v.subject.what, v.ranks) for v in witness.verdicts if isinstance(v, Verdict)]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    assert every == [own] * len(every)
    return own


def _parameter(job: Job) -> torch.Tensor:
    return next(p for module in job.modules for name, p in module.named_parameters() if name == NAME)


@scenario(2)
def a_bit_that_flips_in_a_weight_or_a_moment_is_named(folder: Path) -> None:
    for layout in some((Layout(dp=2, optimizer="plain"), Layout(tp=2, optimizer="fp32")), 2):
        job = Job(layout, seed=1)
        witness = megatron_unickpt.witness(job.chunks, job.optimizer, {"every": 1})
        job.train(2)
        assert _told(witness) == []
        (optimizer,) = getattr(job.optimizer, "chained_optimizers", [job.optimizer])
        states = optimizer.optimizer.state
        stepped = getattr(_parameter(job), "main_param", _parameter(job))
        if dist.get_rank() == 1:
            _flip(_parameter(job))
            _flip(states[stepped]["exp_avg"])
        job.train(1)
        alone = [(Kind.NO_MAJORITY, NAME, (1,)), (Kind.NO_MAJORITY, f"exp_avg of {NAME}", (1,))]
        assert sorted(_told(witness))[: len(alone)] == sorted(alone), (layout, _told(witness))
        copies = [each for each in _told(witness) if each[2] == (0, 1)]
        assert bool(copies) == (layout.dp == 2), (layout, copies)
        witness.close()


@scenario(2)
def sound_training_has_no_verdict_and_the_same_weights(folder: Path) -> None:
    layouts = (
        Layout(dp=2), Layout(dp=2, optimizer="layers"), Layout(dp=2, moe=True, ep=2), Layout(dp=2, optimizer="fp32dist"),
        Layout(pp=2, optimizer="fp32"), Layout(dp=2, optimizer="offload"), Layout(dp=2, optimizer="aware"),
    )  # fmt: skip
    for layout in some(layouts, 4):
        ends = []
        for options in (None, {"every": 1, "checks": ["rest", "replicas", "nonfinite", "buddy"]}):
            overlap = 500 if layout.optimizer == "dist" and not layout.moe else None
            job = Job(layout, seed=1, recompute=layout.optimizer != "dist", bucket_size=overlap)
            witness = megatron_unickpt.witness(job.chunks, job.optimizer, options)
            job.train(3)
            assert _told(witness) == [], layout
            ends.append([p.detach().clone() for module in job.modules for p in module.parameters()])
            if options is not None:
                assert witness.passed.passed_until == 2, layout  # what is at rest after the third step is not yet seen
            witness.close()
        assert all(map(torch.equal, *ends)), layout


@scenario(2)
def a_repetition_before_a_step_leaves_the_gathering_after_it_alone(folder: Path) -> None:
    """``overlap_param_gather``: the next forward pass gathers what the step has changed."""
    losses = []
    for options in (None, {"every": 1, "checks": ["buddy"]}):
        job = Job(Layout(dp=2), seed=1, bucket_size=500, gathered_late=True)
        witness = megatron_unickpt.witness(job.chunks, job.optimizer, options)
        losses.append(job.train(4))
        assert _told(witness) == []
        witness.close()
    assert losses[0] == losses[1]


@scenario(2)
def checkpoints_say_what_has_passed_and_a_job_goes_back_behind_a_fault(folder: Path) -> None:
    """On disk, written behind training, and in memory."""
    place, checks, layout = folder / "c", ("replicas", "rest"), Layout(dp=2)
    options = memory(folder, dist.get_rank(), 2)

    def made() -> tuple[Job, int, megatron_unickpt.Witness]:
        job = Job(layout, seed=1)
        start = megatron_unickpt.resume_or_start(place, job.chunks, job.optimizer, memory=options)["iteration"]
        witness = megatron_unickpt.witness(job.chunks, job.optimizer, {"every": 1, "checks": [*checks]}, step=start)
        return job, start, witness

    def go_on(job: Job, start: int, steps: int) -> None:
        for step in range(start + 1, start + steps + 1):
            job.train(1)
            name = place / f"iter_{step:07d}"
            save = megatron_unickpt.save(
                name, job.chunks, job.optimizer, iteration=step, memory=options, asynchronous=True
            )  # fmt: skip
            if step % 2 == 0:
                save.conclude()
        shutdown.finish_all(ending=False)
        dist.barrier()

    job, start, witness = made()
    go_on(job, start, 4)
    witness.close()
    assert {manifest.step: manifest.witness for _, manifest in manifests_in(place)} == {
        2: Passed(1, checks),
        4: Passed(3, checks),
    }
    told = [json.loads(path.read_text()) for path in folder.glob("host*/**/manifest.json")]
    assert {each["step"]: each["witness"]["passed_until"] for each in told} == {1: 0, 3: 2}
    if dist.get_rank() == 0:
        add_fault(place, WitnessFault(2, 4, "SDC_REPLICA"))
    forget(folder)
    job, start, witness = made()
    assert start == 2, "step 3 in memory and step 4 on disk are suspect"
    go_on(job, start, 2)
    witness.close()
    newest = manifests_in(place)[0][1]
    assert (newest.step, newest.witness) == (4, Passed(3, checks, faults=1))


@scenario(2)
def a_layer_that_tensor_parallel_ranks_compute_together_is_named_and_not_computed_again_by_one(folder: Path) -> None:
    job = Job(Layout(tp=2), seed=1, batch=1, recompute=True)
    layers = job.modules[0].decoder.layers
    calls = {"mlp.linear_fc1": 0, "mlp.linear_fc2": 0}

    def fault(name: str, _module: Any, _args: Any, output: Any) -> None:
        calls[name] += 1
        if wrong == name and calls[name] == 2 and dist.get_rank() == 1:
            _flip(output[0])

    for name in calls:
        layers[1].get_submodule(name).register_forward_hook(partial(fault, name))
    witness = megatron_unickpt.witness(job.chunks, job.optimizer, {"every": 1, "checks": ["self"]})
    wrong = ""
    job.train(2)
    assert _told(witness) == []
    for wrong, ranks in (("mlp.linear_fc1", (1,)), ("mlp.linear_fc2", (0, 1))):  # the second one reduces its output
        calls |= dict.fromkeys(calls, 0)
        job.train(1)
        assert _told(witness)[-1] == (Kind.NO_MAJORITY, f"decoder.layers.1.{wrong}", ranks)
    assert len(_told(witness)) == 2
    witness.close()


@scenario(4)
def what_a_stage_or_tensor_parallel_ranks_compute_wrongly_is_named_and_a_repetition_leaves_no_trace(folder: Path) -> None:
    """With two replicas nobody knows who is right. A stage repeats its own part, so the next one is not named."""
    named = {
        Layout(tp=2, dp=2): (0, 1, 2, 3),
        Layout(pp=2, dp=2, optimizer="fp32"): (2, 3),
        Layout(dp=4, moe=True, ep=2): (0, 1, 2, 3),
    }
    for layout in some(tuple(named), 2):
        ends = []
        for options in (None, {"every": 1, "checks": ["buddy", "nonfinite"]}):
            job = Job(layout, seed=1, batch=2 * layout.dp)  # two micro-batches, which a pipeline interleaves
            witness = megatron_unickpt.witness(job.chunks, job.optimizer, options)
            job.train(3)
            assert _told(witness) == [], layout
            assert options is None or witness.passed == Passed(3, ("buddy",)), (layout, witness.passed)
            ends.append([p.detach().clone() for module in job.modules for p in module.parameters()])
            if options is not None:
                _wrong_once(job, rank=3)
                job.train(1)
                ((kind, what, ranks),) = _told(witness)
                assert (kind, ranks) == (Kind.NO_MAJORITY, named[layout]), what
                _wrong_once(job, rank=3, infinite=True)
                job.train(1)
                causes: list[Any] = [None] * dist.get_world_size()
                own = {(v.place.layer, v.cause) for v in witness.verdicts if isinstance(v, NonFinite) and v.step == 5}
                dist.all_gather_object(causes, own)
                assert causes[3] == {("decoder.layers.0.self_attention.linear_proj", Cause.HARDWARE)}, (layout, causes)
                assert not any(causes[:3]), "what a rank gets from another one is not finite either, and is not its own"
            witness.close()
        assert all(map(torch.equal, *ends)), layout


@scenario(2)
def a_wrong_step_of_an_optimizer_is_named_and_a_repetition_leaves_no_trace(folder: Path) -> None:
    """Chained optimizers too, of experts and of all other parameters, and ranks without data parallelism."""
    layouts = (
        Layout(dp=2, moe=True, ep=2), Layout(pp=2, optimizer="fp32"), Layout(dp=2), Layout(dp=2, optimizer="fp32dist"),
        Layout(tp=2, optimizer="plain"),
    )  # fmt: skip
    for layout in some(layouts, 3):
        ends = []
        for options in (None, {"every": 1, "checks": ["update"]}):
            job = Job(layout, seed=1, torch_adam=True)
            witness = megatron_unickpt.witness(job.chunks, job.optimizer, options)
            inner = [each.optimizer for each in getattr(job.optimizer, "chained_optimizers", [job.optimizer])]
            assert (len(inner) == 2) == layout.moe
            job.train(4)
            assert _told(witness) == [], layout
            assert options is None or witness.passed == Passed(4, ("update",)), (layout, witness.passed)
            ends.append([p.detach().clone() for module in job.modules for p in module.parameters()])
            if options is not None:
                for optimizer in inner:
                    _wrong_step(optimizer, rank=1)
                job.train(1)
                ((kind, what, ranks),) = _told(witness)
                names = {name for module in job.modules for name, _ in module.named_parameters()}
                assert (kind, ranks) == (Kind.NO_MAJORITY, (0, 1)), (layout, what)
                assert dist.get_rank() == 0 or what in names, (layout, what)
            witness.close()
        assert all(map(torch.equal, *ends)), layout


def _wrong_step(optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Let the steps of an optimizer be wrong on a rank."""

    def wrong(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups if dist.get_rank() == rank else ():
            for each in group["params"]:
                each.data.view(torch.int32).view(-1).bitwise_xor_(1 << 3)

    optimizer.register_step_post_hook(wrong)
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(next(reversed(hooks)), last=False)


def _wrong_once(job: Job, rank: int, *, infinite: bool = False) -> None:
    """Let a rank compute one activation wrongly."""
    calls = [0]

    def fault(_module: Any, _args: Any, output: Any) -> None:
        calls[0] += 1
        if calls[0] == 1 and dist.get_rank() == rank:
            found = output[0] if isinstance(output, tuple) else output
            if infinite:
                found.data.view(-1)[1] = float("inf")
            else:
                found.data.view({4: torch.int32, 2: torch.int16}[found.element_size()]).view(-1)[1] ^= 1 << 12

    job.modules[0].decoder.layers[0].self_attention.linear_proj.register_forward_hook(fault, prepend=True)
