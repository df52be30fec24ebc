"""Scenarios in plain torch. Each is a function ``name(folder)`` with assertions, marked with ``@scenario(worlds)``."""

from __future__ import annotations

import logging
import os
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import torch_unickpt
import unickpt
from tests.jobs.torch.layouts import Layout
from tests.jobs.torch.model import Job
from tests.jobs.torch.pairs_worker import differences
from unickpt.checkpoint.load.checkpoint import Checkpoint

REGISTRY: dict[str, tuple[tuple[int, ...], Callable[[Path], None]]] = {}
ADAMW = "fp32-adamw"


def scenario(*worlds: int) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Mark a function as a scenario for these world sizes."""

    def mark(function: Callable[[Path], None]) -> Callable[[Path], None]:
        REGISTRY[function.__name__] = (worlds, function)
        return function

    return mark


@contextmanager
def _switched(value: str = "1") -> Iterator[None]:
    before = os.environ.get("UNICKPT", "")
    os.environ["UNICKPT"] = value
    try:
        yield
    finally:
        os.environ["UNICKPT"] = before


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect the lines that unickpt logs on this rank."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collector()
    logging.getLogger("unickpt").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("unickpt").removeHandler(handler)


def _job(shape: str, seed: int, kind: str = ADAMW) -> Job:
    return Job(Layout.parse(f"{shape}-{kind}"), seed)


def _state_dict(job: Job, *, flat: bool = False) -> dict[str, Any]:
    model, optimizer = get_state_dict(job.module, job.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    return {"model": model, "optimizer": optimizer, "step": job.step, "extra": {"a": (1, 2), "t": torch.arange(3)}}


def _set(job: Job, state: dict[str, Any], *, flat: bool = False) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(
        job.module, job.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    job.step = state["step"]


def _apart(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return what differs, but the states that DCP makes for parameters without a gradient, and the schedule."""
    problems = differences({**expected, "scheduler": 0}, {**found, "scheduler": 0})
    return [each for each in problems if not each.startswith("unused.") or "only in" not in each]


# ---------------------------------------------------------------- torch.distributed.checkpoint


@scenario(2, 4)
def dcp_saves_and_loads_a_state_dict_of_any_form_under_the_switch(folder: Path) -> None:
    shapes = {2: ("fsdp2", "ddp2"), 4: ("fsdp2xtp2", "hsdp2x2")}[dist.get_world_size()]
    for flat in (False, True):
        job = _job(shapes[flat], 1)
        job.train(2)
        with _switched():
            state = {**_state_dict(job, flat=flat), f"dp_rank_{dist.get_rank()}": b"%d" % dist.get_rank()}
            dcp.save(state, checkpoint_id=folder / f"step-{flat + 1}")
        other = _job(shapes[not flat], 7)
        state = {**_state_dict(other, flat=flat), "step": 0, "extra": {"a": None, "t": torch.zeros(3, dtype=torch.int64)}}
        state["dp_rank_1"] = b""
        dcp.load(state, checkpoint_id=folder / f"step-{flat + 1}")  # without the switch
        _set(other, state, flat=flat)
        assert _apart(job.truth(), other.truth()) == []
        assert (other.step, state["extra"]["a"], state["extra"]["t"].tolist(), state["dp_rank_1"]) == (
            2,
            (1, 2),
            [0, 1, 2],
            b"1",
        )
        manifest = Checkpoint.open(folder / f"step-{flat + 1}").manifest
        assert manifest.step == flat + 1
        assert manifest.optimizer is not None
        assert {each.hyperparameters["step"] for each in manifest.optimizer.scalars} >= {2.0}


@scenario(2)
def without_the_switch_dcp_writes_its_own_files_and_reads_them(folder: Path) -> None:
    job = _job("fsdp2", 1)
    dcp.save({"model": job.module.state_dict()}, checkpoint_id=folder / "step-1")
    assert not (folder / "step-1" / "manifest.json").exists()
    with _switched():
        dcp.save({"other": torch.ones(3)}, checkpoint_id=folder / "step-2")
        other = _job("fsdp2", 5)
        dcp.load({"model": other.module.state_dict()}, checkpoint_id=folder / "step-1")  # torch's own, under the switch
    assert _apart(job.truth(), other.truth()) == []


@scenario(2)
def the_newest_of_two_formats_in_one_folder_is_loaded(folder: Path) -> None:
    place = folder / "last"

    def saved(value: float) -> None:
        dcp.save({"a": torch.full((4,), value)}, checkpoint_id=place)

    def loaded() -> float:
        state = {"a": torch.zeros(4)}
        dcp.load(state, checkpoint_id=place)
        return float(state["a"][0])

    saved(1.0)
    with _switched():
        saved(2.0)
    assert list(place.glob("*.distcp")) == []
    assert loaded() == 2.0
    dist.barrier()
    saved(3.0)
    assert loaded() == 3.0, "torch's own checkpoint is newer"
    dist.barrier()
    with _switched():
        saved(4.0)
    assert loaded() == 4.0


@scenario(2)
def what_reads_the_metadata_of_torch_gets_that_of_the_checkpoint(folder: Path) -> None:
    job = _job("fsdp2", 1)
    job.train(1)
    with _switched():
        data = {f"rank_{dist.get_rank()}": b"%d" % dist.get_rank(), "world": 2}  # as torchtitan has the position in its data
        dcp.save({**_state_dict(job), "data": data}, checkpoint_id=folder / "step-1")
    assert (folder / "step-1" / ".metadata").read_text().startswith("#")
    found = FileSystemReader(folder / "step-1").read_metadata()
    assert found.state_dict_metadata["model.wide.weight"].size == (11, 12)
    whole = _load_state_dict_from_keys({"model", "step", "data"}, checkpoint_id=folder / "step-1")
    assert whole["step"] == 1
    assert whole["data"] == {"rank_0": b"0", "rank_1": b"1", "world": 2}
    assert torch.equal(whole["model"]["wide.weight"], job.truth()["wide.weight"])


@scenario(2)
def a_reader_of_hugging_face_files_finds_a_checkpoint(folder: Path) -> None:
    """AutoModel takes a folder with any ``*.safetensors`` for one of Hugging Face's files, and so for its reader."""
    job = _job("fsdp2", 1)
    with _switched():
        dcp.save(job.module.state_dict(), checkpoint_id=folder / "step-1")
    other = _job("fsdp2", 5)
    reader = HuggingFaceStorageReader(str(folder / "step-1"))
    assert reader.read_metadata().state_dict_metadata["wide.weight"].size == (11, 12)
    dcp.load(other.module.state_dict(), storage_reader=reader)
    assert torch.equal(job.truth()["wide.weight"], other.truth()["wide.weight"])


@scenario(2)
def planners_of_their_own_kind_are_asked(folder: Path) -> None:
    class Renaming(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            super().set_up_planner({f"x.{key}": value for key, value in state_dict.items()}, storage_meta, is_coordinator)

    class Halving(DefaultLoadPlanner):
        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:  # noqa: ARG002
            tensor.mul_(0.5)

        def create_global_plan(self, global_plan: Any) -> Any:  # one that needs the messages of DCP
            return super().create_global_plan(global_plan)

    job = _job("fsdp2", 1)
    writer = torch_unickpt.UnickptWriter(folder / "step-1")
    dcp.save({**job.module.state_dict(), "epoch": 3}, storage_writer=writer, planner=Renaming())
    state = {f"x.{key}": torch.zeros_like(value) for key, value in job.module.state_dict().items()} | {"x.epoch": 0}
    dcp.load(state, storage_reader=torch_unickpt.UnickptReader(folder / "step-1"), planner=Halving())
    expected, found = job.truth()["wide.weight"], state["x.wide.weight"].full_tensor()
    assert torch.equal(expected * 0.5, found)
    assert state["x.epoch"] == 3


@scenario(2)
def what_a_planner_has_pickled_is_unpickled_only_if_the_caller_trusts_it(folder: Path) -> None:
    class Pickling(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return super().transform_object(write_item, object)

    writer = torch_unickpt.UnickptWriter(folder / "step-1")
    dcp.save({"a": torch.ones(2), "epoch": {"n": 3}}, storage_writer=writer, planner=Pickling())
    state = {"a": torch.zeros(2), "epoch": {"n": 0}}
    with pytest.raises(CheckpointException, match=r"epoch\.n .*allow_pickle=True"):
        dcp.load(state, checkpoint_id=folder / "step-1")
    assert state["a"].tolist() == [0, 0]
    dcp.load(state, storage_reader=torch_unickpt.UnickptReader(folder / "step-1", allow_pickle=True))
    assert (state["a"].tolist(), state["epoch"]) == ([1, 1], {"n": 3})


@scenario(2)
def planners_of_their_own_kind_save_an_optimizer(folder: Path) -> None:
    class Named(DefaultSavePlanner):  # plans as DCP does
        def __init__(self) -> None:
            super().__init__(enable_plan_caching=True)
            self._cached_plans_key = type(self).__name__

    class Finishing(Named):  # its plan gives values that all ranks have, such as settings, to the first one alone
        def finish_plan(self, new_plan: Any) -> Any:
            return super().finish_plan(new_plan)

    job = _job("fsdp2", 1)
    for planner in (Named, Finishing):
        for again in range(2):  # the second time with a plan from the cache
            job.train(1)
            place = folder / f"{planner.__name__}-{again}"
            with _switched():
                dcp.save(
                    {"optim": _state_dict(job, flat=True)["optimizer"], "sched": {"n": 1}},
                    checkpoint_id=place,
                    planner=planner(),
                )
            assert (place / "manifest.json").exists()
            other = _job("ddp2", 4)
            state = _state_dict(other, flat=True)
            found = {"optim": state["optimizer"], "sched": {"n": 0}}
            dcp.load(found, checkpoint_id=place)
            _set(other, {**state, "optimizer": found["optim"]}, flat=True)
            assert found["sched"] == {"n": 1}
            different = _apart(job.truth(), other.truth())
            assert [each for each in different if "exp_avg" in each or "lr" in each] == []


@scenario(2)
def a_writer_and_a_reader_are_passed_explicitly(folder: Path) -> None:
    job = _job("fsdp2", 1)
    options = unickpt.SaveOptions(retention=unickpt.Retention(keep_last=1))
    for step in (1, 2):
        dcp.save({"model": job.module}, storage_writer=torch_unickpt.UnickptWriter(folder / f"step-{step}", options=options))
    dist.barrier()  # rank 0 removes old checkpoints
    assert [each.name for each in sorted(folder.glob("step-*"))] == ["step-2"]
    other = _job("fsdp2", 9)
    dcp.load({"model": other.module}, storage_reader=torch_unickpt.UnickptReader(folder / "step-2"))
    assert torch.equal(job.truth()["wide.weight"], other.truth()["wide.weight"])


@scenario(2)
def asynchronous_saves_of_dcp_are_written_from_their_copy(folder: Path) -> None:
    job = _job("fsdp2", 1)
    job.train(1)
    with _switched():
        truth, saved = job.truth(), dcp.async_save(_state_dict(job), checkpoint_id=folder / "step-1")
        job.train(1)
        saved.result()
    other = _job("fsdp2", 4)
    state = _state_dict(other)
    dcp.load(state, checkpoint_id=folder / "step-1")
    _set(other, state)
    assert _apart(truth, other.truth()) == []


@scenario(2)
def a_load_that_does_not_fit_ends_on_every_rank_and_changes_nothing(folder: Path) -> None:
    job = _job("fsdp2", 1)
    with _switched():
        dcp.save({"model": job.module.state_dict()}, checkpoint_id=folder / "step-1")
    other = _job("fsdp2", 2)
    before = other.truth()
    for kind in (CheckpointException, unickpt.UnickptError):  # which callers of DCP catch, and those of unickpt
        with pytest.raises(kind, match=r"Missing key in checkpoint state_dict: model\.missing") as failed:
            dcp.load({"model": other.module.state_dict() | {"missing": torch.zeros(1)}}, checkpoint_id=folder / "step-1")
        assert isinstance(failed.value.__cause__, unickpt.MismatchError)
    wrong = torch.zeros(5) if dist.get_rank() else torch.zeros(3)
    with pytest.raises(CheckpointException) as failed:
        dcp.load({"model": {**other.module.state_dict(), "scale": wrong}}, checkpoint_id=folder / "step-1")
    assert {type(error) for error, _ in failed.value.failures.values()} == {unickpt.MismatchError}
    assert differences(before, other.truth()) == []


@scenario(2)
def a_save_that_fails_on_one_rank_fails_on_all_and_keeps_the_checkpoint(folder: Path) -> None:
    place = folder / "step-1"
    with _switched():
        dcp.save({"a": torch.ones(3)}, checkpoint_id=place)
        bad = torch.ones(3, device="meta") if dist.get_rank() else torch.ones(3)
        writer = torch_unickpt.UnickptWriter(place)
        with pytest.raises(CheckpointException, match="meta") as failed:
            dcp.save({"a": bad}, storage_writer=writer)
        assert isinstance(failed.value, unickpt.SaveFailedError)
        assert list(failed.value.failures) == [1]
    state = {"a": torch.zeros(3)}
    dcp.load(state, checkpoint_id=place)
    assert state["a"].tolist() == [1, 1, 1]


@scenario(2)
def a_writer_of_another_class_keeps_its_own_format(folder: Path) -> None:
    class Own(FileSystemWriter):
        pass

    with _switched():
        dcp.save({"a": torch.ones(3)}, storage_writer=Own(folder / "step-1"))
    assert not (folder / "step-1" / "manifest.json").exists()


@scenario(2)
def a_run_of_torchtitan_continues_as_a_model_of_transformers(folder: Path) -> None:
    try:
        import transformers
    except ImportError:
        raise unittest.SkipTest("transformers is not installed") from None
    config = transformers.AutoConfig.for_model(
        "llama", vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()

    def theirs(name: str, value: torch.Tensor) -> torch.Tensor:
        """Reverse the permutation of torchtitan's adapter (``_reverse_permute``)."""
        if not name.endswith(("q_proj.weight", "k_proj.weight")):
            return value
        heads = 4 if "q_proj" in name else 2
        return value.view(heads, 2, value.shape[0] // heads // 2, 16).transpose(1, 2).reshape(value.shape)

    names = {
        "model.embed_tokens": "tok_embeddings", "model.layers": "layers", "self_attn.q_proj": "attention.qkv_linear.wq",
        "self_attn.k_proj": "attention.qkv_linear.wk", "self_attn.v_proj": "attention.qkv_linear.wv",
        "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "model.norm": "norm",
    }  # fmt: skip
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        own = name
        for before, after in names.items():
            own = own.replace(before, after)
        state[own] = theirs(name, parameter.detach()).clone()
        for key, value in optimizer.state[parameter].items():
            state[f"optimizer.state.{own}.{key}"] = theirs(name, value).clone() if value.ndim else value
        for key, value in {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}.items():
            state[f"optimizer.param_groups.{own}.{key}"] = value
    with _switched():
        dcp.save(state, checkpoint_id=folder / "step-1")
    torch.manual_seed(2)
    other = transformers.AutoModelForCausalLM.from_config(config)
    again = torch.optim.AdamW(other.parameters(), lr=0.1)
    unickpt.load_training(other, again, folder / "step-1")
    assert again.param_groups[0]["lr"] == 0.01
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        for key, value in optimizer.state[one].items():
            assert torch.equal(value, again.state[two][key]), key


# ---------------------------------------------------------------- save_training and load_training


@scenario(2)
def a_state_dict_and_a_training_load_each_other(folder: Path) -> None:
    job = _job("fsdp2", 1)
    job.train(2)
    with _switched():
        dcp.save(_state_dict(job), checkpoint_id=folder / "last")
    unickpt.save_training(job.model, job.optimizer, folder / "step-2", step=2)
    other = _job("ddp2", 3)
    unickpt.load_training(other.model, other.optimizer, folder / "last")
    assert Checkpoint.open(folder / "last").manifest.step == 2, "as the optimizer counts"
    assert _apart(job.truth(), other.truth()) == []
    other = _job("fsdp2", 3)
    state = _state_dict(other) | {"step": 0}
    del state["extra"], state["step"]
    dcp.load(state, checkpoint_id=folder / "step-2")
    _set(other, {**state, "step": 2})
    assert _apart(job.truth(), other.truth()) == []


@scenario(2)
def a_job_starts_and_resumes_and_falls_back_from_a_damaged_checkpoint(folder: Path) -> None:
    job = _job("fsdp2", 1)
    start = torch_unickpt.resume_or_start(job.model, job.optimizer, folder / "out", scheduler=job.scheduler)
    assert (start.resumed, start.step) == (False, 0)
    truths = {}
    for step in (1, 2):
        job.train(1)
        result = unickpt.save_training(
            job.model, job.optimizer, folder / "out" / f"step{step}", step=step, samples=10 * step, scheduler=job.scheduler
        )
        assert isinstance(result, unickpt.SaveResult)
        assert result.complete
        truths[step] = job.truth()
    other = _job("ddp2", 8)
    start = torch_unickpt.resume_or_start(other.model, other.optimizer, folder / "out", scheduler=other.scheduler)
    assert (start.step, start.samples) == (2, 20)
    assert differences(truths[2], other.truth()) == []
    dist.barrier()
    if dist.get_rank() == 0:
        damaged = next((folder / "out" / "step2" / "data").iterdir())
        data = bytearray(damaged.read_bytes())
        data[-100] ^= 1
        damaged.write_bytes(data)
    dist.barrier()
    start = torch_unickpt.resume_or_start(other.model, other.optimizer, folder / "out", scheduler=other.scheduler)
    assert start.step == 1
    assert differences(truths[1], other.truth()) == []


@scenario(2)
def an_asynchronous_save_has_the_state_of_its_call(folder: Path) -> None:
    job = _job("fsdp2", 1)
    job.train(1)
    truth = job.truth()
    saved = unickpt.save_training(
        job.model, job.optimizer, folder / "step1", step=1, scheduler=job.scheduler,
        options=unickpt.SaveOptions(asynchronous=True),
    )  # fmt: skip
    job.train(2)
    assert not isinstance(saved, unickpt.SaveResult)
    saved.wait()
    assert saved.result is not None
    assert saved.result.complete
    other = _job("fsdp2", 6)
    unickpt.load_training(other.model, other.optimizer, folder / "step1", scheduler=other.scheduler)
    assert differences(truth, other.truth()) == []


@scenario(2)
def urls_of_an_object_store_are_folders(folder: Path) -> None:
    url = os.environ.get("UNICKPT_TEST_URL")
    if url is None:
        raise unittest.SkipTest("tests/integration/storage runs it beside an S3 server")
    job = _job("fsdp2", 1)
    job.train(1)
    unickpt.save_training(job.model, job.optimizer, f"{url}/torch/step1", step=1, scheduler=job.scheduler)
    writer = torch_unickpt.UnickptWriter(f"{url}/torch-dcp/step1")
    dcp.save({"model": job.module.state_dict()}, storage_writer=writer)
    other = _job("ddp2", 2)
    start = torch_unickpt.resume_or_start(other.model, other.optimizer, f"{url}/torch", scheduler=other.scheduler)
    assert start.step == 1
    assert differences(job.truth(), other.truth()) == []
    other = _job("fsdp2", 3)
    dcp.load({"model": other.module}, storage_reader=torch_unickpt.UnickptReader(f"{url}/torch-dcp/step1"))
    assert torch.equal(job.truth()["wide.weight"], other.truth()["wide.weight"])


@scenario(2)
def a_newer_checkpoint_in_memory_is_loaded_first(folder: Path) -> None:
    memory, job, truths = torch_unickpt.MemoryOptions(to_disk_every=3), _job("fsdp2", 1), {}
    for step in (1, 2, 3, 4):  # 3 on disk, 4 in memory
        job.train(1)
        saved = unickpt.save_training(
            job.model, job.optimizer, folder / f"step{step}", step=step, scheduler=job.scheduler, memory=memory
        )
        assert isinstance(saved, unickpt.SaveResult) == (step == 3)
        if not isinstance(saved, unickpt.SaveResult):
            saved.wait()
        truths[step] = job.truth()
    dist.barrier()
    assert [each.name for each in folder.glob("step*") if (each / "manifest.json").exists()] == ["step3"]
    for options, step in ((memory, 4), (None, 3)):
        other = _job("ddp2", 5)
        start = torch_unickpt.resume_or_start(other.model, other.optimizer, folder, scheduler=other.scheduler, memory=options)
        assert start.step == step
        assert differences(truths[step], other.truth()) == []


class _Loader:
    """Holds samples between steps."""

    def __init__(self, buffer: list[int]) -> None:
        self.buffer = buffer

    def state_dict(self) -> dict[str, Any]:
        return {"buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer = state["buffer"]

    def reshard(self, states: Any, ranks: int) -> list[dict[str, Any]]:
        return [{"buffer": each} for each in unickpt.deal_samples([state["buffer"] for state in states], ranks)]


@scenario(2)
def loaders_generators_and_stateful_objects_continue(folder: Path) -> None:
    rank, job = dist.get_rank(), _job("fsdp2", 1)
    loader, meter = _Loader([rank, rank + 10]), torch.nn.BatchNorm1d(2)
    meter(torch.randn(4, 2, generator=torch.Generator().manual_seed(rank)))
    torch.manual_seed(100 + rank)
    unickpt.save_training(
        job.model, job.optimizer, folder / "step1", step=1, loader=loader, stateful={"meter": meter},
        client_state={"epoch": 2},
    )  # fmt: skip
    expected, mean = torch.rand(3), meter.running_mean.clone()
    dist.broadcast(mean, 0)
    other, loader, meter = _job("fsdp2", 9), _Loader([]), torch.nn.BatchNorm1d(2)
    start = unickpt.load_training(other.model, other.optimizer, folder / "step1", loader=loader, stateful={"meter": meter})
    assert torch.equal(torch.rand(3), expected)
    assert loader.buffer == [rank, rank + 10]
    assert start.client_state == {"epoch": 2}
    assert torch.equal(meter.running_mean, mean)
    alone = [dist.new_group([each]) for each in range(2)][rank]
    single, loader = Job(Layout.parse(f"one-{ADAMW}"), 3), _Loader([])
    unickpt.load_training(single.model, single.optimizer, folder / "step1", loader=loader, group=alone)
    assert loader.buffer == [0, 1, 10, 11]


@scenario(2)
def a_parameter_that_was_frozen_needs_a_decision(folder: Path) -> None:
    job = _job("fsdp2", 1)
    job.train(1)
    frozen = [p for n, p in job.module.named_parameters() if "wide" in n]
    for group in job.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if all(p is not each for each in frozen)]
    for each in frozen:
        job.optimizer.state.pop(each)
    unickpt.save_training(job.model, job.optimizer, folder / "step1", step=1)
    other = _job("fsdp2", 2)
    before = other.truth()
    with pytest.raises(unickpt.MismatchError, match=r"exp_avg.*wide|wide"):
        unickpt.load_training(other.model, other.optimizer, folder / "step1")
    assert differences(before, other.truth()) == []
    start = unickpt.load_training(other.model, other.optimizer, folder / "step1", missing_state="fresh")
    fresh = {each.name for each in start.report.entries if each.outcome == "re-seeded" and each.state != "object"}
    assert fresh == {"wide.weight", "wide.bias"}
    other.train(1)


@scenario(2)
def optimizers_of_every_kind_continue(folder: Path) -> None:
    """Also those whose constructor makes the states, with states of other shapes, and with frozen parameters."""
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adagrad": torch.optim.Adagrad, "adafactor": torch.optim.Adafactor, "nadam": torch.optim.NAdam,
        "radam": torch.optim.RAdam, "adamax": torch.optim.Adamax, "rmsprop": torch.optim.RMSprop, "asgd": torch.optim.ASGD,
        "rprop": torch.optim.Rprop, "adadelta": torch.optim.Adadelta,
        "amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
        "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }  # fmt: skip
    for name, make in makers.items():
        jobs = []
        for seed, shape in ((1, "ddp2" if name in ("adafactor", "rprop") else "fsdp2"), (2, "ddp2")):
            job = _job(shape, seed)
            job.optimizer = make([p for p in job.module.parameters() if p.requires_grad or name == "nadam"])
            job.scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda _: 1.0)
            jobs.append(job)
        one, two = jobs
        one.train(2)
        unickpt.save_training(one.model, one.optimizer, folder / name, step=2, scheduler=one.scheduler)
        unickpt.load_training(two.model, two.optimizer, folder / name, scheduler=two.scheduler)
        problems = differences(one.truth(), two.truth())
        assert problems == [], (name, problems)
        two.step = 2
        apart = [abs(a - b) for a, b in zip(one.train(2), two.train(2), strict=True)]
        assert max(apart) < 1e-3, (name, apart)


@scenario(2)
def wrappers_leave_no_trace_in_the_names(folder: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), checkpoint_wrapper(torch.nn.Linear(4, 4)))
    model: Any = torch.compile(inner, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    unickpt.save_training(model, optimizer, folder / "step1", step=1)
    names = {info.name for info in Checkpoint.open(folder / "step1").index.tensors if info.kind == "parameter"}
    assert names == {"0.weight", "0.bias", "1.weight", "1.bias"}


@scenario(2)
def stages_with_other_names_save_one_checkpoint(folder: Path) -> None:
    """As pipeline stages do: no rank has all names. Each stage's mesh has one rank here."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = torch.nn.ModuleDict({f"stage{rank}": torch.nn.Linear(3, 3), "norm": torch.nn.LayerNorm(3)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    unickpt.save_training(model, optimizer, folder / "step1", step=1)
    found = Checkpoint.open(folder / "step1")
    record = found.manifest.optimizer
    assert record is not None
    assert {name for group in record.groups for name in group.parameters} == {
        f"{module}.{kind}" for module in ("stage0", "stage1", "norm") for kind in ("weight", "bias")
    }
    assert torch.equal(found.read_tensor(f"stage{rank}.weight", "weight"), model[f"stage{rank}"].weight)
    again = torch.nn.ModuleDict({f"stage{rank}": torch.nn.Linear(3, 3), "norm": torch.nn.LayerNorm(3)})
    unickpt.load_training(again, torch.optim.AdamW(again.parameters()), folder / "step1")
    assert torch.equal(again[f"stage{rank}"].weight, model[f"stage{rank}"].weight)


@scenario(2)
def buffers_that_differ_between_ranks_are_those_of_the_first(folder: Path) -> None:
    model = torch.nn.BatchNorm1d(3)
    model.running_mean.fill_(dist.get_rank() + 1)
    unickpt.save_training(model, None, folder / "step1", step=1)
    again = torch.nn.BatchNorm1d(3)
    unickpt.load_training(again, None, folder / "step1")
    assert again.running_mean.tolist() == [1, 1, 1]


@scenario(2)
def what_cannot_be_described_is_refused_by_name_on_every_rank(folder: Path) -> None:
    job = _job("fsdp2", 1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, 3))], lr=0.1) if dist.get_rank() else job.optimizer
    with pytest.raises(unickpt.SaveFailedError, match=r"rank 1: .*shape \(2, 3\)"):
        unickpt.save_training(job.model, other, folder / "step1", step=1)
    with torch.device("meta"):
        empty = torch.nn.Linear(3, 3)
    unickpt.save_training(torch.nn.Linear(3, 3), None, folder / "step2", step=1)
    with pytest.raises(unickpt.ConfigError, match="to_empty"):
        unickpt.load_training(empty, None, folder / "step2")


@scenario(2)
def a_model_on_the_meta_device_and_offloaded_to_the_cpu_is_filled(folder: Path) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    unickpt.save_training(model, None, folder / "step1", step=1)
    with torch.device("meta"):
        empty = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    fully_shard(empty, offload_policy=CPUOffloadPolicy(pin_memory=False))
    empty.to_empty(device="cpu")
    unickpt.load_training(empty, torch.optim.AdamW(empty.parameters()), folder / "step1", missing_state="fresh")
    first = model[0].weight.detach().clone()
    dist.broadcast(first, 0)
    assert torch.equal(empty[0].weight.full_tensor(), first)
