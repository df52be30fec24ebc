"""Scenarios of ``torch.distributed.checkpoint``: state dicts of every form, under the switch and without."""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import torch_unickpt
import unickpt
from tests.jobs.torch.pairs_worker import differences
from tests.jobs.torch.registry import apart, job_of, scenario, set_state_dict_of, state_dict_of
from tests.support.switch import switched
from unickpt.checkpoint.load.checkpoint import Checkpoint


@scenario(2, 4)
def dcp_saves_and_loads_a_state_dict_of_any_form_under_the_switch(folder: Path) -> None:
    shapes = {2: ("fsdp2", "ddp2"), 4: ("fsdp2xtp2", "hsdp2x2")}[dist.get_world_size()]
    for flat in (False, True):
        job = job_of(shapes[flat], 1)
        job.train(2)
        with switched():
            state = {**state_dict_of(job, flat=flat), f"dp_rank_{dist.get_rank()}": b"%d" % dist.get_rank()}
            dcp.save(state, checkpoint_id=folder / f"step-{flat + 1}")
        other = job_of(shapes[not flat], 7)
        state = {**state_dict_of(other, flat=flat), "step": 0, "extra": {"a": None, "t": torch.zeros(3, dtype=torch.int64)}}
        state["dp_rank_1"] = b""
        dcp.load(state, checkpoint_id=folder / f"step-{flat + 1}")  # without the switch
        set_state_dict_of(other, state, flat=flat)
        assert apart(job.truth(), other.truth()) == []
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
    job = job_of("fsdp2", 1)
    dcp.save({"model": job.module.state_dict()}, checkpoint_id=folder / "step-1")
    assert not (folder / "step-1" / "manifest.json").exists()
    with switched():
        dcp.save({"other": torch.ones(3)}, checkpoint_id=folder / "step-2")
        other = job_of("fsdp2", 5)
        dcp.load({"model": other.module.state_dict()}, checkpoint_id=folder / "step-1")  # torch's own, under the switch
    assert apart(job.truth(), other.truth()) == []


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
    with switched():
        saved(2.0)
    assert list(place.glob("*.distcp")) == []
    assert loaded() == 2.0
    dist.barrier()
    saved(3.0)
    assert loaded() == 3.0, "torch's own checkpoint is newer"
    dist.barrier()
    with switched():
        saved(4.0)
    assert loaded() == 4.0


@scenario(2)
def what_reads_the_metadata_of_torch_gets_that_of_the_checkpoint(folder: Path) -> None:
    job = job_of("fsdp2", 1)
    job.train(1)
    with switched():
        data = {f"rank_{dist.get_rank()}": b"%d" % dist.get_rank(), "world": 2}  # as torchtitan has the position in its data
        dcp.save({**state_dict_of(job), "data": data}, checkpoint_id=folder / "step-1")
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
    job = job_of("fsdp2", 1)
    with switched():
        dcp.save(job.module.state_dict(), checkpoint_id=folder / "step-1")
    other = job_of("fsdp2", 5)
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

    job = job_of("fsdp2", 1)
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

    job = job_of("fsdp2", 1)
    for planner in (Named, Finishing):
        for again in range(2):  # the second time with a plan from the cache
            job.train(1)
            place = folder / f"{planner.__name__}-{again}"
            with switched():
                dcp.save(
                    {"optim": state_dict_of(job, flat=True)["optimizer"], "sched": {"n": 1}},
                    checkpoint_id=place,
                    planner=planner(),
                )
            assert (place / "manifest.json").exists()
            other = job_of("ddp2", 4)
            state = state_dict_of(other, flat=True)
            found = {"optim": state["optimizer"], "sched": {"n": 0}}
            dcp.load(found, checkpoint_id=place)
            set_state_dict_of(other, {**state, "optimizer": found["optim"]}, flat=True)
            assert found["sched"] == {"n": 1}
            different = apart(job.truth(), other.truth())
            assert [each for each in different if "exp_avg" in each or "lr" in each] == []


@scenario(2)
def a_writer_and_a_reader_are_passed_explicitly(folder: Path) -> None:
    job = job_of("fsdp2", 1)
    options = unickpt.SaveOptions(retention=unickpt.Retention(keep_last=1))
    for step in (1, 2):
        dcp.save({"model": job.module}, storage_writer=torch_unickpt.UnickptWriter(folder / f"step-{step}", options=options))
    dist.barrier()  # rank 0 removes old checkpoints
    assert [each.name for each in sorted(folder.glob("step-*"))] == ["step-2"]
    other = job_of("fsdp2", 9)
    dcp.load({"model": other.module}, storage_reader=torch_unickpt.UnickptReader(folder / "step-2"))
    assert torch.equal(job.truth()["wide.weight"], other.truth()["wide.weight"])


@scenario(2)
def asynchronous_saves_of_dcp_are_written_from_their_copy(folder: Path) -> None:
    job = job_of("fsdp2", 1)
    job.train(1)
    with switched():
        truth, saved = job.truth(), dcp.async_save(state_dict_of(job), checkpoint_id=folder / "step-1")
        job.train(1)
        saved.result()
    other = job_of("fsdp2", 4)
    state = state_dict_of(other)
    dcp.load(state, checkpoint_id=folder / "step-1")
    set_state_dict_of(other, state)
    assert apart(truth, other.truth()) == []


@scenario(2)
def a_load_that_does_not_fit_ends_on_every_rank_and_changes_nothing(folder: Path) -> None:
    job = job_of("fsdp2", 1)
    with switched():
        dcp.save({"model": job.module.state_dict()}, checkpoint_id=folder / "step-1")
    other = job_of("fsdp2", 2)
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
    with switched():
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

    with switched():
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
    with switched():
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
