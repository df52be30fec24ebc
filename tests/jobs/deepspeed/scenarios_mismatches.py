"""Jobs, options and tools that a checkpoint does not fit, with the message that a user gets."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from tests.jobs.deepspeed.damaged_checkpoints import TAG, damaged, untouched
from tests.jobs.deepspeed.jobs import build, train
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.model import Model
from tests.jobs.deepspeed.resumes import here
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import consolidated, differences
from unickpt.base.errors import UnickptError
from unickpt.cli.main import main

STATES = ("exp_avg", "exp_avg_sq")


@scenario(2)
def switched_off_the_error_of_a_load_names_the_format_and_the_remedy(folder: Path) -> None:
    place = damaged(folder, untouched)
    remedy = r'is a unickpt checkpoint, and this job switches unickpt off.*Set "unickpt": \{"enabled": true\}'
    for stage, section in ((1, {"enabled": False}), (3, None)):
        engine = build(here(stage), seed=2, unickpt=section)
        os.environ["UNICKPT"] = "off" if section is None else ""
        with pytest.raises(UnickptError, match=remedy):
            engine.load_checkpoint(str(place))
        del os.environ["UNICKPT"]
        assert engine.load_checkpoint(str(folder / "nowhere")) == (None, None)
        with pytest.raises(AssertionError):  # DeepSpeed's own errors do not change
            engine.load_checkpoint(str(folder), tag="nothing")


@scenario(2)
def deepspeed_alone_does_not_load_what_it_had_saved_under_the_tag_of_a_later_checkpoint(folder: Path) -> None:
    place, files = folder / "run", "*_states.pt"
    stock = build(here(2), seed=1, unickpt={})
    train(stock, 1)
    stock.save_checkpoint(str(place), tag="step1")
    assert list((place / "step1").glob(files))
    dist.barrier()
    engine = build(here(2), seed=2)
    train(engine, 2)
    assert engine.save_checkpoint(str(place), tag="step1")
    assert not list((place / "step1").glob(files))
    again = build(here(2), seed=3)
    assert again.load_checkpoint(str(place))[0] is not None
    assert again.global_steps == 2


@scenario(2)
def the_refusal_of_a_stock_checkpoint_has_the_command_that_helps(folder: Path) -> None:
    """With and without the key. The error keeps DeepSpeed's class. What the command makes is what DeepSpeed saved."""
    stock, place = build(here(2), seed=1, unickpt={}), folder / "stock"
    train(stock, 2)
    stock.save_checkpoint(str(place))
    saved = consolidated(stock, STATES)
    commands = set()
    for stage, error in ((3, AssertionError), (0, AttributeError)):
        for section in ({}, {"enabled": True}):
            with pytest.raises(error) as caught:
                build(here(stage), seed=2, unickpt=section).load_checkpoint(str(place))
            commands |= set(re.findall(r"^    unickpt (convert .*)$", str(caught.value), re.MULTILINE))
            assert ('with "unickpt": {"enabled": true}' in str(caught.value)) == (not section)
    (command,) = commands
    if dist.get_rank() == 0:
        assert main(shlex.split(command)) == 0
    dist.barrier()
    engine = build(here(3), seed=2)
    assert engine.load_checkpoint(shlex.split(command)[-1])[0] is not None
    assert not differences(saved, consolidated(engine, STATES))


@scenario(2)
def options_without_enabled_are_a_warning(folder: Path) -> None:
    for section, warned in (
        ({"keep_last": 2, "async_save": True}, True),
        ({"enabled": False, "keep_last": 2}, False),
        ({}, False),
    ):
        with Log() as log:
            engine = build(here(1), seed=2, unickpt=section)
        assert ('sets keep_last, async_save, but not "enabled": true' in "".join(log.lines)) == (
            warned and dist.get_rank() == 0
        )
        assert bool(log.lines) == (warned and dist.get_rank() == 0), log.lines
        assert type(engine.checkpoint_engine).__module__.startswith("deepspeed.")


@scenario(2)
def errors_of_deepspeeds_converters_name_the_format_and_the_command(folder: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    place = damaged(folder, untouched)
    with pytest.raises(
        FileNotFoundError, match=r"is a unickpt checkpoint, .* For weights use: unickpt export .*bad/global_step1"
    ):
        get_fp32_state_dict_from_zero_checkpoint(str(place))
    with pytest.raises(FileNotFoundError, match=r"unickpt export .* --to deepspeed-universal"):
        ds_to_universal._get_optim_files(str(place / TAG))
    assert "unickpt export THIS_FOLDER OUT" in (place / TAG / "README-unickpt.txt").read_text()
    (folder / "empty").mkdir(exist_ok=True)
    with pytest.raises(FileNotFoundError, match=r"empty'$"):
        ds_to_universal._get_optim_files(str(folder / "empty"))


@scenario(2)
def a_changed_global_batch_logs_the_setting_that_keeps_it(folder: Path) -> None:
    place = damaged(folder, untouched)
    with Log() as log:
        build(here(2), seed=2).load_checkpoint(str(place))
        assert not [line for line in log.lines if "the global batch changes" in line]
        build(here(2), seed=2, train_batch_size=24).load_checkpoint(str(place))
    warned = [line for line in log.lines if "the global batch changes" in line]
    assert len(warned) == (dist.get_rank() == 0), warned
    if warned:
        assert (
            "changes from 12 (6 per device x 1 accumulated x 2 ranks) to 24 (12 per device x 1 accumulated x 2 ranks)"
            in warned[0]
        ), warned
        assert '"train_micro_batch_size_per_gpu": 6, and "train_batch_size": 12' in warned[0], warned


def _other(change: Callable[[Model], None]) -> Any:
    torch.manual_seed(3)
    model = Model()
    change(model)
    return build(here(1), seed=3, model=model)


def _mismatch(folder: Path, pattern: str, change: Callable[[Model], None]) -> Any:
    place = damaged(folder, untouched)
    engine = _other(change)
    before = [p.detach().clone() for p in engine.module.parameters()]
    with pytest.raises(UnickptError, match=pattern):
        engine.load_checkpoint(str(place))
    assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True)), "something was loaded"
    return engine


@scenario(2)
def a_parameter_that_the_checkpoint_lacks(folder: Path) -> None:
    def change(model: Model) -> None:
        model.extra = torch.nn.Parameter(torch.ones(4))

    engine = _mismatch(folder, r"in this job but not in the checkpoint \(1\): extra\..*Nothing is loaded", change)
    path, _ = engine.load_checkpoint(str(folder / "bad"), load_module_strict=False, load_optimizer_states=False)
    assert path is not None
    assert [e.outcome for e in engine.checkpoint_engine.last_report.entries if e.name == "extra"] == ["left out"]


@scenario(2)
def a_parameter_that_the_job_lacks(folder: Path) -> None:
    def change(model: Model) -> None:
        model.blocks[0].mlp[2].bias = None

    _mismatch(folder, r"in the checkpoint but not in this job \(1\): blocks.0.mlp.2.bias", change)


@scenario(2)
def a_parameter_of_another_shape(folder: Path) -> None:
    def change(model: Model) -> None:
        model.positions = torch.nn.Embedding(40, 15)

    _mismatch(folder, r"of another shape \(1\): positions.weight: \(12, 15\) in the checkpoint, \(40, 15\) in this job", change)


@scenario(2)
def another_optimizer(folder: Path) -> None:
    place = damaged(folder, untouched)
    torch.manual_seed(3)
    model = Model()
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    engine = build(here(1), seed=3, model=model, client_optimizer=sgd, scheduler={})
    pattern = r"trained with AdamW \(states exp_avg, exp_avg_sq\), this job uses SGD.*load_optimizer_states=False"
    with pytest.raises(UnickptError, match=pattern):
        engine.load_checkpoint(str(place))
    assert engine.load_checkpoint(str(place), load_optimizer_states=False)[0] is not None


@scenario(2)
def parameters_that_were_frozen_when_saved(folder: Path) -> None:
    place = damaged(folder, untouched)
    torch.manual_seed(3)
    engine = build(here(2), seed=3, model=Model(frozen=False))
    with pytest.raises(UnickptError, match=r"no optimizer state for 1 parameters that this job trains.*positions.weight"):
        engine.load_checkpoint(str(place))


@scenario(2)
def a_wrong_option(folder: Path) -> None:
    for section, pattern in (
        ({"enabeld": True}, 'unickpt.enabeld" is not an option; did you mean "unickpt.enabled"'),
        ({"enabled": "yes"}, 'unickpt.enabled" must be true or false'),
        ({"enabled": True, "verify": "alway"}, 'did you mean "always"'),
        ({"enabled": True, "timeout_seconds": -1}, "must be a positive number"),
        (True, "must be an object such as"),
    ):
        with pytest.raises(UnickptError, match=pattern):
            build(here(1), seed=1, unickpt=section)
