"""Guarantees of a save: no gathering, no duplicates, no pickles, and a save by DeepSpeed if unickpt cannot."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import threading
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed import comm as dist
from safetensors import safe_open

from tests.jobs.deepspeed.jobs import Layout, build, config, train
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.model import Model
from tests.jobs.deepspeed.resumes import unsupported_engine
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import consolidated, differences
from tests.jobs.faults.calls import watched
from tests.jobs.faults.stalling import Stall
from tests.support.extent import some
from unickpt.base.errors import CorruptCheckpointError
from unickpt.checkpoint.coordination import host_peers
from unickpt.checkpoint.fence import FENCE_FILE
from unickpt.checkpoint.load import shared_gather
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main

ADAM = ("exp_avg", "exp_avg_sq")


def here(stage: int, precision: str = "fp32") -> Layout:
    return Layout(stage, dist.get_world_size(), precision)


def _recorded() -> list[dict[str, Any]]:
    """Return all collectives of this process from torch's flight recorder."""
    trace = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))
    found: list[dict[str, Any]] = trace.get("entries", [])
    return found


@scenario(*some((4, 2), 1))
def a_save_gathers_nothing(folder: Path) -> None:
    assert os.environ["TORCH_FR_BUFFER_SIZE"]
    for stage in (0, 1, 2, 3):
        engine = build(here(stage), seed=1)
        train(engine, 2)
        before = max((e["record_id"] for e in _recorded()), default=-1)
        assert engine.save_checkpoint(str(folder / str(stage)), client_state={"x": torch.ones(1000)})
        during = [e for e in _recorded() if e["record_id"] > before]
        received = sum(int(np.prod(s)) for e in during for s in e["output_sizes"])
        kinds = {e["profiling_name"].split(":")[-1] for e in during}
        # DeepSpeed's own check that the ranks agree on the tag: two all-reduces of 20 bytes
        assert kinds <= {"all_reduce"}, kinds
        assert len(during) <= 2, during
        assert received <= 40, received


@scenario(*some((4, 2), 1))
def a_load_on_one_host_gathers_the_weights_without_messages(folder: Path) -> None:
    for layout in some((here(1), here(2, "bf16"), here(1, "bf16o"), here(2), here(1, "bf16")), 3):
        source = build(layout, seed=1, unickpt={"enabled": True, "async_save": False})
        if type(source.optimizer).__name__ == "FP16_UnfusedOptimizer":  # what DeepSpeed 0.17 makes of bf16o: nothing to gather
            continue
        train(source, 2)
        place = folder / layout.name
        assert source.save_checkpoint(str(place))
        for share in (True, False):
            engine = build(layout, seed=2, unickpt={"enabled": True, "read_once_per_host": share})
            before = max((e["record_id"] for e in _recorded()), default=-1)
            engine.load_checkpoint(str(place))
            during = [e for e in _recorded() if e["record_id"] > before]
            gathered = sum(int(np.prod(s)) for e in during for s in e["output_sizes"])
            weights = sum(flat.numel() for flat in _flat_weights(engine))
            assert gathered < 100 if share else gathered >= weights, (layout, gathered, weights)
            loaded = [flat.clone() for flat in _flat_weights(engine)]
            engine.optimizer.update_lp_params()
            assert all(map(torch.equal, loaded, _flat_weights(engine))), layout
            assert all(map(torch.equal, loaded, _flat_weights(source))), layout


@scenario(*some((4, 2), 1))
def weights_of_other_ranks_come_from_the_page_cache_or_from_the_ranks(folder: Path) -> None:
    """All ranks read them, or all ranks exchange them: also if one rank cannot read, or does not find them in the cache.

    If one rank has no shared memory, it waits in DeepSpeed's collective, so the others must go there too.
    """
    fill, exchanged = Checkpoint.fill_from_page_cache, list[int]()
    copy = shared_gather._fill

    def counted(*arguments: Any) -> None:
        exchanged.append(1)
        copy(*arguments)

    def damaged(*_: Any, **__: Any) -> bool:
        raise CorruptCheckpointError("for the test")

    def not_cached(*_: Any, **__: Any) -> bool:
        return False

    shared_gather._fill = counted
    for layout in (here(1), here(2, "bf16"), here(1, "bf16o")):
        source = build(layout, seed=1, unickpt={"enabled": True, "async_save": False})
        if type(source.optimizer).__name__ == "FP16_UnfusedOptimizer":
            continue
        train(source, 2)
        place = folder / layout.name
        assert source.save_checkpoint(str(place))
        for other in (fill, not_cached, damaged):
            engine = build(layout, seed=2, unickpt={"enabled": True})
            exchanged.clear()
            if dist.get_rank() == 1:
                Checkpoint.fill_from_page_cache = other  # type: ignore[method-assign, assignment]
            engine.load_checkpoint(str(place))
            Checkpoint.fill_from_page_cache = fill  # type: ignore[method-assign]
            assert bool(exchanged) is (other is not fill), (layout, other)
            loaded = [flat.clone() for flat in _flat_weights(engine)]
            engine.optimizer.update_lp_params()
            assert all(map(torch.equal, loaded, _flat_weights(engine))), layout
            assert all(map(torch.equal, loaded, _flat_weights(source))), layout
        engine = build(layout, seed=2, unickpt={"enabled": True})
        prepare = host_peers._prepare
        if dist.get_rank() == dist.get_world_size() - 1:
            host_peers._prepare = lambda *_: "no memory, for the test"
        engine.load_checkpoint(str(place))
        host_peers._prepare = prepare
        assert all(map(torch.equal, _flat_weights(engine), _flat_weights(source))), layout
    shared_gather._fill = copy


def _flat_weights(engine: Any) -> list[torch.Tensor]:
    """Return the buffers of all weights with their padding. Uses private attributes of DeepSpeed."""
    optimizer = engine.optimizer
    found: list[torch.Tensor] = getattr(optimizer, "bit16_groups_flat", None) or optimizer.bf16_groups_flat
    return found


@scenario(2)
def after_a_save_the_persistent_parameters_of_zero_3_are_gathered(folder: Path) -> None:
    """DeepSpeed's own save gathers them, also after ``empty_partition_cache``, and other code relies on it."""
    engine = build(here(3), seed=1)
    train(engine, 1)
    small = {name: p for name, p in engine.module.named_parameters() if p.ds_persist}
    whole = {name: p.detach().clone() for name, p in small.items()}
    engine.empty_partition_cache()
    assert small
    assert all(p.numel() == 0 for p in small.values())
    assert engine.save_checkpoint(str(folder))
    assert all(torch.equal(p, whole[name]) for name, p in small.items())
    assert train(engine, 1)


@scenario(*some((4, 2), 1))
def a_load_gathers_the_persistent_parameters_of_zero_3_in_one_message(folder: Path) -> None:
    """Partitions of several sizes, with padding. Whole parameters are those that were saved."""
    for dtype in ("fp32", "bf16"):
        source, target = build(here(3, dtype), seed=1), build(here(3, dtype), seed=2)
        train(source, 2)
        assert source.save_checkpoint(str(folder / dtype))
        small = [(p, q) for p, q in zip(source.module.parameters(), target.module.parameters(), strict=True) if p.ds_persist]
        before = max((e["record_id"] for e in _recorded()), default=-1)
        target.load_checkpoint(str(folder / dtype))
        during = [e for e in _recorded() if e["record_id"] > before]
        gathers = [e for e in during if "gather" in e["profiling_name"]]
        assert len(small) > 2
        assert len(gathers) == 1, [e["profiling_name"] for e in during]
        assert all(torch.equal(p, q) and q.is_contiguous() for p, q in small)
        assert all(q.untyped_storage().nbytes() < 3 * q.nbytes for _, q in small if q.numel() > 4)


@scenario(2)
def an_asynchronous_save_has_the_state_at_the_time_of_the_call(folder: Path) -> None:
    for stage in some((1, 3, 0, 2), 2):
        source = build(here(stage), seed=1, unickpt={"enabled": True, "async_save": True})
        train(source, 2)
        truth = consolidated(source, ADAM)
        stall = Stall("pwrite")
        with watched(folder, stall, ("pwrite",)):  # an asynchronous save writes nothing until the gate is open
            assert source.save_checkpoint(str(folder / str(stage)), client_state={"at": stage}) is True
            train(source, 2)
            assert stall.met.wait(60)
            assert source.checkpoint_engine.saver.pending
            assert not (folder / str(stage) / "latest").exists()
            stall.gate.set()
        target = build(here((stage + 1) % 4), seed=2)
        _, client_state = target.load_checkpoint(str(folder / str(stage)))  # waits for the save
        assert client_state["at"] == stage
        assert not differences(truth, consolidated(target, ADAM))
        assert source.checkpoint_engine.last_save.committed
        assert source.checkpoint_engine.last_save.stall_s <= source.checkpoint_engine.last_save.seconds


class Large(torch.nn.Module):
    """Two million parameters, so that a replica is larger than the fixed overhead."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(1024, 1001), torch.nn.Linear(1001, 1024))
        self.frozen = torch.nn.Parameter(torch.rand(301, 300), requires_grad=False)
        self.register_buffer("table", torch.rand(100, 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) ** 2).mean()


@scenario(2, 4)
def the_checkpoint_is_no_larger_than_the_state(folder: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for stage, precision in ((0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "fp32"), (3, "bf16")):
        layout = here(stage, precision)
        torch.manual_seed(1)
        model = Large()
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        engine = build(layout, seed=1, model=model)
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        loss = engine(torch.rand(2, 1024, dtype=dtype))
        engine.backward(loss)
        engine.step()
        place = folder / layout.name
        assert engine.save_checkpoint(str(place))
        needed = trained * 12 + (301 * 300 + 100 * 100) * dtype.itemsize  # master and two moments; frozen; buffer
        found = sum(p.stat().st_size for p in (place / "global_step1").rglob("*") if p.is_file())
        assert needed <= found <= needed * 1.01, (layout.name, needed, found)
        if rank == 0:
            sizes = [p.stat().st_size for p in sorted((place / "global_step1" / "data").iterdir())]
            assert len(sizes) == world
            assert max(sizes) - min(sizes) < 0.02 * needed + 50_000, sizes  # balanced; only rank 0 has the buffer
        dist.barrier()


@scenario(2)
def every_file_is_json_or_safetensors(folder: Path) -> None:
    engine = build(here(1), seed=1)
    train(engine, 2)
    engine.save_checkpoint(str(folder), client_state={"a": (1, 2), "t": torch.ones(3)})
    dist.barrier()  # rank 0 writes the README last
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert sorted(p.name for p in files) == [
        "README-unickpt.txt", "index.safetensors", "latest", "manifest.json", "rank00000.safetensors", "rank00001.safetensors",
        FENCE_FILE,
    ]  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        if path.suffix == ".json":
            text = path.read_text()
            json.loads(text)
            assert "$opaque" not in text
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    whole = consolidated(engine, ADAM)
    key = "blocks.0.out.weight:exp_avg"
    pieces = sorted((k, v) for k, v in tensors.items() if k.partition("[")[0] == key)
    flat = torch.cat([v.reshape(-1) for _, v in sorted(pieces, key=lambda kv: _first(kv[0]))])
    assert torch.equal(flat, whole["exp_avg/blocks.0.out.weight"].reshape(-1))


def _first(key: str) -> list[int]:
    return [int(part.split(":")[0]) for part in key.split("[")[1].rstrip("]").split(",")] if "[" in key else [0]


@scenario(2)
def without_the_key_deepspeed_is_as_if_we_were_not_installed(folder: Path) -> None:
    for name, extra in (("absent", None), ("false", {"enabled": False})):
        torch.manual_seed(1)
        cfg = config(here(1))
        del cfg["unickpt"]
        if extra is not None:
            cfg["unickpt"] = extra
        model = Model()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=cfg
        )
        assert type(engine.checkpoint_engine).__module__.startswith("deepspeed."), engine.checkpoint_engine
        train(engine, 1)
        assert engine.save_checkpoint(str(folder / name)) is True
        dist.barrier()
        files = {p.name for p in (folder / name / "global_step1").iterdir()}
        assert "mp_rank_00_model_states.pt" in files, files
        assert not any("safetensors" in f or "manifest" in f for f in files), files


@scenario(2)
def a_native_checkpoint_is_loaded_natively_and_saved_universally_from_then_on(folder: Path) -> None:
    stock = build(here(1), seed=1, unickpt={"enabled": False})
    train(stock, 2)
    stock.save_checkpoint(str(folder))
    engine = build(here(1), seed=2)
    path, _ = engine.load_checkpoint(str(folder))
    assert path.endswith("mp_rank_00_model_states.pt"), path
    assert train(stock, 1) == train(engine, 1)
    assert differences(consolidated(stock, ADAM), consolidated(engine, ADAM), ignore=("groups",)) == []
    engine.save_checkpoint(str(folder))
    assert (folder / "global_step3" / "manifest.json").is_file()
    other = build(here(3), seed=3)
    assert other.load_checkpoint(str(folder))[0].endswith("global_step3/manifest.json")
    assert engine.load_checkpoint(str(folder), tag="global_step2")[0].endswith(".pt")
    engine.save_checkpoint(str(folder), tag="global_step2")
    if dist.get_rank() == 0:
        torch.save({"mine": 1}, folder / "global_step2" / "mine.pt")  # the program adds a file of its own
    dist.barrier()
    assert engine.load_checkpoint(str(folder), tag="global_step2")[0].endswith("manifest.json")
    train(stock, 1)
    stock.save_checkpoint(str(folder), tag="global_step2")
    assert engine.load_checkpoint(str(folder), tag="global_step2")[0].endswith(".pt"), "the older of two formats was loaded"
    if dist.get_rank() == 0:
        with redirect_stdout(io.StringIO()) as told:
            assert main(["convert", str(folder / "global_step2"), str(folder / "converted")]) == 0
        assert "left out: the older checkpoint of unickpt" in told.getvalue()
        assert Checkpoint.open(folder / "converted").manifest.step == stock.global_steps
    dist.barrier()


@scenario(2)
def an_unknown_optimizer_wrapper_is_saved_by_deepspeed_itself(folder: Path) -> None:
    engine = unsupported_engine()
    with Log() as log:
        assert engine.save_checkpoint(str(folder)) is True
    assert (folder / "global_step1" / "mp_rank_00_model_states.pt").is_file()
    assert not (folder / "global_step1" / "manifest.json").exists()
    if dist.get_rank() == 0:
        assert any("optimizer wrapper NewZeroOptimizer" in line for line in log.lines), log.lines


@scenario(2)
def settings_without_a_copy_do_not_end_the_start_of_an_engine(folder: Path) -> None:
    place, source = str(folder), build(here(1), seed=1)
    source.save_checkpoint(place)
    model, lock = Model(), threading.Lock()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": parameters, "held": lock, "tried": [0]}], lr=1e-3)
    engine = build(here(1), seed=2, model=model, client_optimizer=optimizer, scheduler={})
    group = engine.optimizer.optimizer.param_groups[0]
    group["tried"].append(1)
    beginning = engine.checkpoint_engine.beginning
    beginning.reset_group(0, group)
    assert (group["held"], group["tried"]) == (lock, [0]), "what has a copy begins anew"
    engine.load_checkpoint(place)


@scenario(2)
def a_second_save_under_one_tag_replaces_the_first_completely(folder: Path) -> None:
    engine = build(here(1), seed=1)
    for _ in range(3):
        train(engine, 1)
        assert engine.save_checkpoint(str(folder), tag="same")
    target = build(here(3), seed=2)
    target.load_checkpoint(str(folder))
    assert target.global_steps == 3
    assert differences(consolidated(engine, ADAM), consolidated(target, ADAM)) == []
    assert len(list((folder / "same" / "data").iterdir())) == 2


@scenario(2)
def a_full_disk_stops_neither_training_nor_resuming(folder: Path) -> None:
    """Uses a small tmpfs, or without the right to mount a limit on the size of a file."""
    rank = dist.get_rank()
    engine = build(here(1), seed=1)
    train(engine, 1)
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    dist.barrier()
    mounted = [False]
    if rank == 0:
        mounted[0] = (
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(disk)], capture_output=True).returncode == 0
        )
    dist.broadcast_object_list(mounted, src=0)
    try:
        assert engine.save_checkpoint(str(disk)) is True
        train(engine, 1)
        with Log() as log:
            assert _until_full(engine, disk, mounted[0]) is False
        if rank == 0:
            assert any("Gave up saving" in line and ("No space left" in line or "too large" in line) for line in log.lines), (
                log.lines
            )
        assert train(engine, 1)
        target = build(here(2), seed=2)
        path, _ = target.load_checkpoint(str(disk))
        assert path.endswith("global_step1/manifest.json")
        if mounted[0]:
            leftovers = [p for p in disk.glob("global_step2/**/*") if p.is_file()]
            assert leftovers == []
    finally:
        dist.barrier()
        if rank == 0 and mounted[0]:
            subprocess.run(["umount", str(disk)], check=True)


def _until_full(engine: Any, disk: Path, mounted: bool) -> bool:
    if mounted:
        outcome = [bool(engine.save_checkpoint(str(disk), tag=f"global_step{n}")) for n in (2,)]
        return outcome[-1]
    import resource

    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old[1]))
    try:
        return bool(engine.save_checkpoint(str(disk), tag="global_step2"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@scenario(2)
def a_damaged_latest_file_selects_the_newest_complete_checkpoint(folder: Path) -> None:
    engine = build(here(1), seed=1)
    for _ in range(3):
        train(engine, 1)
        engine.save_checkpoint(str(folder))
    if dist.get_rank() == 0:
        data = folder / "global_step3" / "data" / "rank00001.safetensors"
        content = bytearray(data.read_bytes())
        content[-100] ^= 1
        data.write_bytes(content)
        (folder / "global_step2" / "manifest.json").unlink()
    dist.barrier()
    for stage in (1, 3, 0):
        target = build(here(stage), seed=2)
        with Log() as log:
            path, _ = target.load_checkpoint(str(folder))
        assert path.endswith("global_step1/manifest.json"), path
        assert target.global_steps == 1
        if dist.get_rank() == 0:
            assert any("global_step3 cannot be used" in line for line in log.lines), log.lines
    with pytest.raises(Exception, match=r"differs from the index|could not load it"):
        target.load_checkpoint(str(folder), tag="global_step3")
    if dist.get_rank() == 0:
        (folder / "latest").write_bytes(b"\xffglobal_step3")
    dist.barrier()
    path, _ = build(here(2), seed=2).load_checkpoint(str(folder))  # on every rank
    assert path.endswith("global_step1/manifest.json"), path
    strict = build(here(1), seed=3, unickpt={"enabled": True, "fall_back": False})
    with pytest.raises(Exception, match="does not hold the name of a checkpoint"):
        strict.load_checkpoint(str(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "latest").write_text("global_step3")
    dist.barrier()
    with pytest.raises(Exception, match=r"differs from the index|could not load it"):
        strict.load_checkpoint(str(folder))


@scenario(2)
def a_save_that_only_one_rank_calls_names_the_missing_ranks(folder: Path) -> None:
    engine = build(
        here(1),
        seed=1,
        unickpt={"enabled": True, "timeout_seconds": 2, "async_save": False},
        checkpoint={"tag_validation": "Ignore"},
    )
    engine.checkpoint_engine.exchange.notice_s = 1.0
    train(engine, 1)
    if dist.get_rank() == 0:
        with Log() as log:
            assert engine.save_checkpoint(str(folder), tag="alone") is False
        assert any("rank 1" in line and "waited" in line for line in log.lines), log.lines
        assert any("gave up" in line and "rank 1" in line for line in log.lines), log.lines
    dist.barrier()
    assert engine.save_checkpoint(str(folder), tag="together") is True
    shutil.rmtree(folder / "alone", ignore_errors=True)
